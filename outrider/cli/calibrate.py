"""`outrider calibrate`: confidences of a checkpoint, scaled."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.checkpoint import manifest_of
from outrider.cli.console import JsonTo, place_of_json, write_json
from outrider.cli.stages import Printer
from outrider.runs import stages
from outrider.targets.load import load_target


def calibrate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a drafter with a confidence head.", show_default=False)],
    prompts: Annotated[str, typer.Option(help="`stdlib`, or a file of prompts; none that it was trained on.")] = "stdlib",
    count: Annotated[int, typer.Option(min=2, help="Prompts; every second one is kept apart to judge on.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    target: Annotated[str | None, typer.Option(help="Where the target is, if not where it was in training.")] = None,
    shifts: Annotated[bool, typer.Option("--shifts/--no-shifts", help="Shift logits too, or scale them alone.")] = True,
    json_to: JsonTo = None,
) -> None:
    """Make confidences mean what they say: scale them by what was accepted of held-out prompts, and say how far off."""
    place_of_json(json_to)
    loaded = load_target(target or manifest_of(checkpoint)["target"]["name"])
    found = stages.calibrate(
        checkpoint, loaded, prompts, count, max_new_tokens=max_new_tokens, temperature=temperature, shifting=shifts,
        reporter=Printer(),
    )  # fmt: skip
    write_json(json_to, asdict(found))
