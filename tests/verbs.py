"""The command line, called as a shell would."""

from __future__ import annotations

from unittest.mock import patch

from outrider import cli


def outrider_with(*words: str) -> int:
    """Run `outrider WORDS` in this process; its exit code."""
    with patch("sys.argv", ["outrider", *words]):
        try:
            cli.main()
        except SystemExit as done:
            return int(done.code or 0)
    return 0
