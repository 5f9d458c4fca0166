"""The command line, called as a shell would."""

from unittest.mock import patch

from outrider import cli
from outrider.cli import console


def outrider_with(*words: str) -> int:
    """Run `outrider WORDS` in this process; its exit code."""
    before = console.out._file
    with patch("sys.argv", ["outrider", *words]):
        try:
            cli.main()
        except SystemExit as done:
            return int(done.code or 0)
        finally:
            console.out._file = before  # `--json -` turned it to standard error, which a test's end closes
    return 0
