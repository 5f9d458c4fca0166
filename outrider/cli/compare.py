"""`outrider compare`: your own method against others, at equal minutes or steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import place_of_json, present, say, table
from outrider.cli.options import JsonTo
from outrider.cli.stages import Printer
from outrider.errors import ConfigError
from outrider.runs import compare as comparing
from outrider.runs.compare import Line


def compare(
    file: Annotated[
        Path, typer.Argument(metavar="RUNFILE", help="Target, prompts, training and evaluation.", show_default=False)
    ],
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...", help="Kinds, FILE.py, or run files; the first is yours.", show_default=False
        ),
    ],
    minutes: Annotated[float | None, typer.Option(help="Minutes of each training.", min=0.1)] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each training, in place of --minutes.", min=1)] = None,
    seeds: Annotated[str, typer.Option(metavar="N,…", help="Seeds of the trainings of each method.")] = "0",
    cells: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also compare with stored results: benchmarks/results/methods.jsonl."),
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Train your drafter and others on the same answers for the same time, and measure all in one run.

    Rerun the same command to resume.
    """
    place_of_json(json_to)
    try:
        numbers = tuple(dict.fromkeys(map(int, seeds.split(","))))
    except ValueError:
        raise ConfigError(f"--seeds {seeds!r} is not a list of numbers; expected a list such as 0,1,2") from None
    names = [word for word in methods if "=" not in word]
    settings = [word for word in methods if "=" in word]
    options = comparing.Options(minutes, steps, numbers, cells)
    lines, _ = comparing.compare(file, names, options, settings, Printer())
    columns = ("tokens per step", "seeds", f"{names[0]} to it")
    shown = table("task", "method", *columns, right=columns)
    for line in lines:
        shown.add_row(*_cells(line))
    present(json_to, [line._asdict() for line in lines], shown)
    if json_to != "-":
        say("          ratios of tokens per step with 95 % intervals over prompts; report.html has every row")


def _cells(line: Line) -> tuple[str, str, str, str, str]:
    ratio = "" if line.ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*line.ratio)
    seeds = " ".join(f"{rate:.2f}" for rate in line.seeds)
    return f"{line.task} · T {line.temperature:g}", line.method, f"{line.tokens_per_step:.2f}", seeds, ratio
