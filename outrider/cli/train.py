"""`outrider train`: a drafter from the target's answers."""

from __future__ import annotations

from outrider.cli.console import Overrides, Recipe
from outrider.cli.stages import Printer
from outrider.runs import stages


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train the drafter on the target's answers; goes on where it was stopped."""
    stages.run(recipe, overrides or (), stages=["train"], reporter=Printer())
