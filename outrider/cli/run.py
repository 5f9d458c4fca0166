"""`outrider run`, `prepare`, `train` and `calibrate`: the stages of a run file, all or one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.checkpoint import manifest_of
from outrider.cli.console import JsonTo, Overrides, Recipe, SkipBad, place_of_json, write_json
from outrider.cli.stages import Printer
from outrider.runs import stages
from outrider.targets.load import load_target


def run(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None, skip_bad: SkipBad = False) -> None:
    """Prepare, train and evaluate: all stages that the run file has."""
    place_of_json(json_to)
    report = stages.run(recipe, _skipping(overrides, skip_bad), reporter=Printer())
    if report is not None:
        write_json(json_to, json.loads(report.json_text()))


def prepare(recipe: Recipe, overrides: Overrides = None, skip_bad: SkipBad = False) -> None:
    """Let the target answer the prompts; goes on where it was stopped."""
    stages.run(recipe, _skipping(overrides, skip_bad), stages=["prepare"], reporter=Printer())


def _skipping(overrides: list[str] | None, skip_bad: bool) -> list[str]:
    """Overrides with what `--skip-bad` is short for."""
    return [*(overrides or ()), *(["prepare.skip_bad=true"] if skip_bad else [])]


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train the drafter on the target's answers; goes on where it was stopped."""
    stages.run(recipe, overrides or (), stages=["train"], reporter=Printer())


def calibrate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a drafter with a confidence head.", show_default=False)],
    prompts: Annotated[str, typer.Option(help="`stdlib`, or a file of prompts that it was not trained on.")] = "stdlib",
    count: Annotated[int, typer.Option(min=2, help="Prompts; half of them are scaled on, the others judged on.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    target: Annotated[str | None, typer.Option(help="Where the target is, if not where it was in training.")] = None,
    shifts: Annotated[bool, typer.Option("--shifts/--no-shifts", help="Shift logits too, or scale them alone.")] = True,
    json_to: JsonTo = None,
) -> None:
    """Scale confidences by what is accepted on held-out prompts, and print their error before and after."""
    place_of_json(json_to)
    loaded = load_target(target or manifest_of(checkpoint)["target"]["name"])
    found = stages.calibrate(
        checkpoint, loaded, prompts, count, max_new_tokens=max_new_tokens, temperature=temperature, shifting=shifts,
        reporter=Printer(),
    )  # fmt: skip
    write_json(json_to, asdict(found))
