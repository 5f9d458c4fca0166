"""`outrider run`, `prepare`, `train` and `calibrate`: the stages of a run file."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import counted, lasting, place_of_json, present, sized, write_json
from outrider.cli.look import show_samples
from outrider.cli.options import JsonTo, Overrides, RunFile, SkipBad, Yes
from outrider.cli.stages import Printer
from outrider.errors import ConfigError, ExportError
from outrider.loading import describe
from outrider.measure.tasks import names as tasks
from outrider.plan.paper import hardware as table
from outrider.runs import stages
from outrider.targets.load import load_target

Look = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Print N texts as the target reads them, and which tokens are trained on; write nothing.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Resume from a checkpoint even if settings changed that its weights depend on.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Also send metrics to tensorboard, wandb or trackio; can be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print counts and sizes, and write nothing.")]

Hardware = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="With --dry-run: hours on this accelerator; see outrider plan --hardware list."),
]
Devices = Annotated[int, typer.Option(min=1, help="Number of accelerators for --hardware.")]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Like --dry-run, but also measure two steps: memory, time, and the largest train.tokens that fits.",
    ),
]


def run(
    file: RunFile,
    overrides: Overrides = None,
    json_to: JsonTo = None,
    skip_bad: SkipBad = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
    track: Track = None,
    hardware: Hardware = None,
    devices: Devices = 1,
) -> None:
    """Run all stages of a run file: prepare, train, evaluate.  Rerun the same command to resume."""
    place_of_json(json_to)
    all_overrides = [*_skipping(overrides, skip_bad), *_tracked(track)]
    if hardware is None and devices != 1:
        raise ConfigError(f"--devices {devices} has no effect without --hardware; add it, or leave --devices out")
    if hardware is not None and not dry_run:
        raise ConfigError(f"--hardware {hardware} has no effect without --dry-run; add it, or leave --hardware out")
    if dry_run:
        place = None if hardware is None else table.place(hardware, devices)
        show(stages.plan(file, all_overrides, place=place), json_to)
        return
    report = stages.run(file, all_overrides, reporter=Printer(yes), force=force)
    if report is not None:
        write_json(json_to, json.loads(report.json_text()))


def prepare(
    file: RunFile,
    overrides: Overrides = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Use a server with OpenAI's API; can be repeated."),
    ] = None,
    skip_bad: SkipBad = False,
    dry_run: DryRun = False,
    look: Look = None,
    yes: Yes = False,
) -> None:
    """Generate training answers with the target, locally or on servers.  Rerun the same command to resume."""
    servers = [f"prepare.servers={json.dumps(server)}"] if server else []
    all_overrides = [*_skipping(overrides, skip_bad), *servers]
    if look is not None:
        show_samples(file, all_overrides, look)
    else:
        _stage("prepare", file, all_overrides, dry_run, yes)


def train(
    file: RunFile, overrides: Overrides = None, dry_run: DryRun = False, measure: Measure = False, force: Force = False,
    track: Track = None,
) -> None:  # fmt: skip
    """Train the drafter on the target's answers.  Rerun the same command to resume."""
    if measure:
        show(stages.plan(file, overrides or (), stages=["train"], measure=True), None)
        return
    _stage("train", file, [*(overrides or ()), *_tracked(track)], dry_run, force=force)


def _stage(
    stage: stages.Stage, file: Path, overrides: list[str], dry_run: bool, yes: bool = False, force: bool = False
) -> None:
    if dry_run:
        preview(file, overrides, [stage])
    else:
        stages.run(file, overrides, stages=[stage], reporter=Printer(yes), force=force)


def _tracked(names: list[str] | None) -> list[str]:
    """The override for `--track`."""
    return [f"train.track={json.dumps(names)}"] if names else []


def _skipping(overrides: list[str] | None, skip_bad: bool) -> list[str]:
    """Overrides, including that of `--skip-bad`."""
    return [*(overrides or ()), *(["prepare.skip_bad=true"] if skip_bad else [])]


def preview(file: Path, overrides: list[str], only: Sequence[stages.Stage] | None = None) -> None:
    """Print what a run will do."""
    show(stages.plan(file, overrides, stages=only), None)


def show(lines: Sequence[stages.Line], json_to: str | None) -> None:
    """Print what will be done."""
    table = console.table("stage", "what", "value")
    for i, line in enumerate(lines):
        is_first = i == 0 or lines[i - 1].stage != line.stage
        table.add_row(line.stage if is_first else "", line.what, _shown(line))
    present(json_to, [line._asdict() for line in lines], table, "dry run: nothing was written")


def _shown(line: stages.Line) -> str:
    if isinstance(line.value, str):
        return line.value
    return {"bytes": sized, "minutes": lambda value: lasting(60 * value), "": counted}[line.unit](line.value)


def calibrate(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Folder of a drafter with a confidence head, or a published one's id.", show_default=False),
    ],
    prompts: Annotated[str, typer.Option(help="`stdlib`, or a file of held-out prompts.")] = "stdlib",
    count: Annotated[
        int, typer.Option(min=2, help="Number of prompts: half to fit scales, half to measure the error.")
    ] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    target: Annotated[str | None, typer.Option(help="Location of the target, if it moved since training.")] = None,
    shifts: Annotated[
        bool, typer.Option("--shifts/--no-shifts", help="Fit shifts of logits as well as scales.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="New checkpoint, for a published drafter, which is never modified.")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Calibrate confidences on held-out prompts, and print their error before and after."""
    place_of_json(json_to)
    source = describe(checkpoint)
    if (name := target or source.target) is None:
        raise ConfigError(f"{checkpoint} does not name its target; name it with --target")
    if (source.format is None) != (out is None):
        if out is not None:
            raise ConfigError(f"{checkpoint} is a checkpoint, which is calibrated in place; leave out --out")
        raise ConfigError(
            f"{checkpoint} is a published drafter, which is never modified; name a new checkpoint with --out"
        )
    if out is not None and out.exists():
        raise ExportError(f"{out} exists already; name a new folder, or delete it first")
    drawn = list(tasks.prompts(prompts, count, seed=1))
    calibration = stages.calibrate(
        checkpoint, load_target(name), prompts, drawn, out=out, max_new_tokens=max_new_tokens,
        temperature=temperature, shifting=shifts, reporter=Printer(),
    )  # fmt: skip
    write_json(json_to, asdict(calibration))
