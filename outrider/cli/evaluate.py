"""`outrider evaluate`: the drafter and its baselines, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from outrider.cli.console import JsonTo, Overrides, Recipe, place_of_json, write_json
from outrider.cli.stages import Printer
from outrider.runs import stages


def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of prompt sets, in place of the hub.")] = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run written code, walled in, where a task is scored by its tests.")
    ] = False,
    json_to: JsonTo = None,
) -> None:
    """Measure the trained drafter, and those beside it, against the target alone."""
    place_of_json(json_to)
    # as YAML text: a folder may be called null, or 2024
    options = [f"evaluate.data={yaml.safe_dump(str(data))}"] if data is not None else []
    options += ["evaluate.allow_code_execution=true", "evaluate.score=true"] if allow_code_execution else []
    report = stages.run(recipe, [*(overrides or ()), *options], stages=["evaluate"], reporter=Printer())
    assert report is not None
    write_json(json_to, json.loads(report.json_text()))
