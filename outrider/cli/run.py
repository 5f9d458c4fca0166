"""`outrider run`: all stages of a run file."""

from __future__ import annotations

import json

from outrider.cli.console import JsonTo, Overrides, Recipe, SkipBad, place_of_json, skipping, write_json
from outrider.cli.stages import Printer
from outrider.runs import stages


def run(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None, skip_bad: SkipBad = False) -> None:
    """Prepare, train and evaluate: all stages that the run file has."""
    place_of_json(json_to)
    report = stages.run(recipe, skipping(overrides, skip_bad), reporter=Printer())
    if report is not None:
        write_json(json_to, json.loads(report.json_text()))
