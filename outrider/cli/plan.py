"""`outrider plan`: whether speculation will pay, with which method, how deep, and what it costs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import JsonTo, place_of_json, say, sized, write_json
from outrider.cli.plan_checklist import show_checklist
from outrider.cli.plan_probe import replayed
from outrider.cli.plan_shown import show_plan
from outrider.plan import asked as asking
from outrider.plan import planner
from outrider.plan.asked import Asked
from outrider.plan.measured import costs, probe
from outrider.plan.paper import hardware as table
from outrider.plan.schema import Plan
from outrider.plan.subject import rest_on
from outrider.targets.load import load_target

TargetName = Annotated[
    str, typer.Option(help="demo, a folder with config.json, or a Hugging Face id; no weights are read.")
]
Hardware = Annotated[str | None, typer.Option(help="Accelerator by its data sheet; `--hardware list` names all.")]
Measure = Annotated[bool, typer.Option("--measure", help="Time target and drafters on this machine instead.")]
Devices = Annotated[int, typer.Option(help="Accelerators that share the target.")]
Weights = Annotated[
    str | None, typer.Option(help="How its weights will be stored: bf16, fp8, int8, int4 …; its config's unless given.")
]
Log = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Recorded requests; docs/traffic-logs.md lists the formats.")
]
Format = Annotated[str | None, typer.Option(help="Of the log; recognised by its first row without it.")]
PromptTokens = Annotated[float | None, typer.Option(help="Mean tokens of a prompt.")]
NewTokens = Annotated[float | None, typer.Option(help="Mean tokens of an answer.")]
Concurrency = Annotated[float | None, typer.Option(help="Requests at once.")]
Rate = Annotated[float | None, typer.Option(help="Requests a second, in place of --concurrency.")]
Slo = Annotated[str | None, typer.Option(metavar="tpot=50", help="Limit in ms a token that a method must meet.")]
Methods = Annotated[list[str] | None, typer.Option(help="Kind of drafter, or its folder; may be given again.")]
DraftModel = Annotated[str | None, typer.Option(metavar="MODEL", help="The language model of small_model.")]
Reports = Annotated[
    list[str] | None, typer.Option(metavar="REPORT", help="Of `outrider evaluate`, for its acceptance.")
]
Again = Annotated[bool, typer.Option("--again", help="Time again what was timed before.")]
PricePerHour = Annotated[float | None, typer.Option(help="Of one accelerator, in your currency.")]
PricePerMonth = Annotated[float | None, typer.Option(help="Of storage.")]
TrainAnswers = Annotated[int | None, typer.Option(help="Answers that a drafter would learn from.")]
Epochs = Annotated[float | None, typer.Option(help="Passes of that training over its answers; 10 unless given.")]
Requests = Annotated[
    int | None,
    typer.Option(min=0, help="Requests of the log to replay with drafters that need no training; 24, if quick."),
]
Minutes = Annotated[float | None, typer.Option(help="Most that --measure takes; 2 unless given.")]
Checklist = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Instead: what of the roll-out of a run's drafter is done.")
]


def plan(
    target: TargetName = "demo", hardware: Hardware = None, measure: Measure = False, devices: Devices = 1,
    weights: Weights = None, log: Log = None, format: Format = None, prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None, concurrency: Concurrency = None, rate: Rate = None, slo: Slo = None,
    method: Methods = None, draft_model: DraftModel = None, report: Reports = None, again: Again = False,
    price_per_hour: PricePerHour = None, price_per_gb_month: PricePerMonth = None, train_answers: TrainAnswers = None,
    epochs: Epochs = None, probe: Requests = None, minutes: Minutes = None, checklist: Checklist = None,
    json_to: JsonTo = None,
) -> None:  # fmt: skip
    """Will speculation pay?  ENABLE (method and depth), BATCH INSTEAD or NEED DATA, and the number that decided.

    With --checklist RUN: what of the roll-out of a run's drafter is done.  Exit code 0 only where all is.
    """
    console.quiet()
    place_of_json(json_to)
    if hardware == "list":
        _list()
        return
    asked = Asked(
        target, hardware, measure, devices, weights, log, format, prompt_tokens, new_tokens, concurrency, rate, slo,
        method or (), draft_model, report or (), again, price_per_hour, price_per_gb_month, train_answers, epochs,
        probe, minutes,
    )  # fmt: skip
    if checklist is not None:
        asking.refuse_with_checklist(asked, checklist)
        show_checklist(checklist, log, json_to)
        return
    asking.refuse(asked)
    found = _planned(asked)
    if json_to != "-":
        show_plan(found)
    write_json(json_to, found.model_dump(mode="json"))


def _planned(asked: Asked) -> Plan:
    """The plan; what takes long says so while it runs."""
    own, load, probed = asked.subject(), functools.cache(load_target), None
    demand, missing = asked.demand(own)
    if asked.is_probed:
        probed, known = replayed(own, asked, load)
        own = rest_on(own, known, asked.added)
    if asked.measure:
        loaded = load(asked.target)
        say(f"plan      {asked.target} on this machine, {loaded.device.type}")
        drafter = functools.partial(probe.drafter_of, own, target=loaded, draft_model=asked.draft_model)
        tell = lambda line: say(f"          {line}")
        minutes = asked.minutes or costs.MINUTES
        given = costs.given(own, demand, missing, loaded, asked.again, drafter, tell, minutes)
        profile = costs.profile_of(own, demand, loaded)
        found = planner.plan(own, given, asked.prices).model_copy(update={"profile": profile})
    elif asked.hardware is None:
        assert probed is not None
        found = planner.unplaced(own, probed)
    else:
        found = asking.on_paper(asked, own, demand, missing)
    return found.model_copy(update={"probe": probed})


def _list() -> None:
    shown = console.table("name", "memory", "GB/s", "TFLOP/s", "source", right=("memory", "GB/s"))
    for name in table.names():
        own = table.find(name)
        flops = ", ".join(f"{kind} {value / 1e12:.0f}" for kind, value in own.flops.items())
        shown.add_row(name, sized(own.memory_bytes), f"{own.bandwidth / 1e9:.0f}", flops, own.source)
    console.show(shown)
