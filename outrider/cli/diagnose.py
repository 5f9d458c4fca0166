"""`outrider diagnose`: why acceptance is lower than it could be here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, present, restarted, say
from outrider.cli.options import DRAFTERS_OWN, Fields, JsonTo, with_options
from outrider.config import build, override
from outrider.diagnosis import run as diagnosis
from outrider.diagnosis.search import LEVEL, Cause, Diagnosis
from outrider.errors import ConfigError
from outrider.measure.config import Config
from outrider.measure.tasks.names import Prompt
from outrider.measure.tasks.prompts import draw
from outrider.report.bootstrap import Interval
from outrider.runs.file import TargetConfig
from outrider.storage.trusted import whole_text
from outrider.targets.load import load_target

TARGET_OPTIONS = "name=target device dtype quantize adapter trust_remote_code"


@with_options
def diagnose(
    drafter: Annotated[
        str, typer.Argument(help="A checkpoint, or a published draft model: folder or GGUF file.", show_default=False)
    ],
    target_overrides: Annotated[list[str], Fields(TargetConfig, TARGET_OPTIONS, "target", DRAFTERS_OWN)],
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="Your prompts: FILE.jsonl, or a task of `outrider tasks`.")
    ] = "stdlib",
    trained_on: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts like those used in training, if the checkpoint has no figures."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of your requests; defaults to that of training.", min=0)
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Passed to the chat template.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chat template that your engine uses; `none` for none.")
    ] = None,
    trained_target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="The training target, if the folder does not name it.")
    ] = None,
    count: Annotated[int, typer.Option(help="Number of prompts to answer.", min=6)] = diagnosis.PROMPTS,
    json_to: JsonTo = None,
) -> None:  # fmt: skip
    """Find out why a drafter accepts less than it could: template, temperature, end tokens, quantised target, layers
    it reads, rope, vocabulary, length and kind of the texts."""
    place_of_json(json_to)
    source = diagnosis.source_of(drafter)
    section = override({}, target_overrides).get("target", {})
    if "name" not in section and source.target is None:
        raise ConfigError(f"{drafter} names no target; give it with --target")
    settings = build(TargetConfig, {"name": source.target} | section, "target")
    options = diagnosis.Options(temperature, thinking, _template(template), trained_target)
    here, like = _drawn(prompts, count), () if trained_on is None else _drawn(trained_on, count)
    target = load_target(settings.name, **settings.model_dump(exclude={"name"}))
    say(
        f"diagnose  {source.kind} {drafter} on {len(here)} prompts of {prompts}; answers of {diagnosis.MOST_NEW} tokens"
    )
    tried: set[str] = set()

    def tell(name: str) -> None:
        if name not in tried:
            say(f"try       {name}")
            tried.add(name)

    with restarted("diagnosis"):
        result = diagnosis.run(drafter, target, here, options, like, tell)
    present(json_to, dataclasses.asdict(result), *_shown(result))


def _template(name: str | None) -> str | None:
    """The text of a template file; empty for `none`."""
    if name in (None, "none"):
        return None if name is None else ""
    try:
        return whole_text(Path(name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--template {name} can't be read ({error}); name a file with a chat template") from None


def _drawn(task: str, count: int) -> Sequence[Prompt]:
    return draw(task, build(Config, {"tasks": [task], "prompts": count}, "evaluate")).prompts[:count]


def _shown(result: Diagnosis) -> list[Any]:
    lines: list[Any] = [f"here      {_range(result.here)} tokens per step ({LEVEL:.0%} interval over prompts)"]
    if result.promised is not None:
        lines.append(f"expected  {_range(result.promised)} on texts like those in training")
    if not result.causes:
        lines.append("causes none with a measurable cost in tokens per step")
    else:
        lines += [f"corrected {_range(result.corrected)} with everything below changed back", _table(result.causes)]
        lines += [f"to do     {cause.name}: {cause.advice}" for cause in result.causes]
    names = ", ".join(f"{cause.name} ({cause.here})" for cause in result.no_effect)
    lines += [f"no effect {names}: differs from training, without a measurable cost"] * bool(names)
    return [*lines, f"tried     {result.num_tried} alternatives of settings that no checkpoint records"]


def _table(causes: Sequence[Cause]) -> console.PlainTable:
    shown = console.table("cause", "here", "instead", "costs, tokens per step", right=["costs, tokens per step"])
    for cause in causes:
        shown.add_row(cause.name, cause.here, cause.instead, _range(cause.cost))
    return shown


def _range(value: Interval) -> str:
    return f"{value.center:.2f} ({value.low:.2f} to {value.high:.2f})" if math.isfinite(value.center) else "unknown"
