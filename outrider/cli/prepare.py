"""`outrider prepare`: the target's own answers."""

from __future__ import annotations

from outrider.cli.console import Overrides, Recipe, SkipBad, skipping
from outrider.cli.stages import Printer
from outrider.runs import stages


def prepare(recipe: Recipe, overrides: Overrides = None, skip_bad: SkipBad = False) -> None:
    """Let the target answer the prompts; goes on where it was stopped."""
    stages.run(recipe, skipping(overrides, skip_bad), stages=["prepare"], reporter=Printer())
