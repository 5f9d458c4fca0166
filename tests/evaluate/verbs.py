"""The command line with the verbs of `cli.parity`, called as a shell would."""

from __future__ import annotations

from unittest.mock import patch

from outrider import cli
from outrider.cli.parity import lm_eval, parity


def outrider_with(*words: str) -> int:
    """Run `outrider WORDS` in this process; its exit code."""
    there = {command.callback for command in cli.app.registered_commands}
    for verb in (parity, lm_eval):
        if verb not in there:
            cli.app.command()(verb)
    with patch("sys.argv", ["outrider", *words]):
        try:
            cli.main()
        except SystemExit as done:
            return int(done.code or 0)
    return 0
