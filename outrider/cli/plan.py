"""`outrider plan`: whether speculation will pay, with which method, how deep, and what it costs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import JsonTo, lasting, place_of_json, say, sized, write_json
from outrider.cli.plan_checklist import show_checklist
from outrider.cli.plan_probe import ADDED, around, drafter_of, replayed, show_probe
from outrider.data import encodings
from outrider.errors import ConfigError
from outrider.plan import demand as demands
from outrider.plan import hardware as table
from outrider.plan import planner, timings
from outrider.plan.demand import Demand
from outrider.plan.drafts import DEFAULT_KINDS
from outrider.plan.money import Prices, Training
from outrider.plan.planner import Given, Subject
from outrider.plan.predict import Memory
from outrider.plan.schema import Plan, Row
from outrider.plan.timed import TimedCosts
from outrider.targets.load import load_target
from outrider.traffic.plan import limits

TIMED_DEPTHS = (1, 2, 4, 7)
TIMED_LOADS = (1, 4, 16)
"""Texts at once that are timed where the traffic does not say how many there are."""
MULTIPLES = (1, 4)
"""Of the traffic's own number, which are timed beside one text."""
SHOWN_DEPTHS = (1, 4, 7)
"""Of the table of break-even points; the JSON has them all."""


def plan(
    target: Annotated[
        str, typer.Option(help="demo, a folder with config.json, or a Hugging Face id; no weights are read.")
    ] = "demo",
    hardware: Annotated[
        str | None, typer.Option(help="Accelerator by its data sheet; `--hardware list` names all.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time target and drafters on this machine instead.")
    ] = False,
    devices: Annotated[int, typer.Option(help="Accelerators that share the target.")] = 1,
    weights: Annotated[
        str | None,
        typer.Option(help="How its weights will be stored: bf16, fp8, int8, int4 …; its config's unless given."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recorded requests; docs/replay.md lists the formats.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="Of the log; recognised by its first row without it.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option(help="Mean tokens of a prompt.")] = None,
    new_tokens: Annotated[float | None, typer.Option(help="Mean tokens of an answer.")] = None,
    concurrency: Annotated[float | None, typer.Option(help="Requests at once.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, in place of --concurrency.")] = None,
    slo: Annotated[str | None, typer.Option(metavar="tpot=50", help="Limits in ms that a method must meet.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Kind of drafter, or its folder; may be given again.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option(metavar="MODEL", help="The language model of small_model.")] = None,
    report: Annotated[
        list[str] | None, typer.Option(metavar="REPORT", help="Of `outrider evaluate`, for its acceptance.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Time again what was timed before.")] = False,
    price_per_hour: Annotated[float | None, typer.Option(help="Of one accelerator, in your currency.")] = None,
    price_per_gb_month: Annotated[float | None, typer.Option(help="Of storage.")] = None,
    train_answers: Annotated[int | None, typer.Option(help="Answers that a drafter would learn from.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes of that training over its answers.")] = 10.0,
    probe: Annotated[
        int | None,
        typer.Option(min=0, help="Requests of the log to replay with drafters that need no training; 24, if quick."),
    ] = None,
    checklist: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Instead: what of the roll-out of a run's drafter is done.")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Will speculation pay?  ENABLE (method and depth), BATCH INSTEAD or NEED DATA, and the number that decided.

    With --checklist RUN: what of the roll-out of a run's drafter is done.  Exit code 0 only where all is.
    """
    console.quiet()
    place_of_json(json_to)
    if hardware == "list":
        _list()
        return
    if checklist is not None:
        _refuse_with_checklist(
            checklist, hardware=hardware, measure=measure, weights=weights, method=method, report=report, probe=probe,
            prompt_tokens=prompt_tokens, new_tokens=new_tokens, concurrency=concurrency, rate=rate, slo=slo,
        )  # fmt: skip
        show_checklist(checklist, log, json_to)
        return
    is_probed = log is not None and probe != 0
    _refuse(hardware, measure, is_probed, rate, concurrency)
    _refuse_idle(
        ("--devices", devices != 1, "--hardware", hardware), ("--weights", weights, "--hardware", hardware),
        ("--train-answers", train_answers, "--hardware", hardware),
        ("--again", again, "--measure or --log", measure or is_probed),
        ("--price-per-gb-month", price_per_gb_month, "--train-answers", train_answers),
        ("--format", format, "--log", log), ("--probe", probe, "--log", log),
    )  # fmt: skip
    prices, training = Prices(price_per_hour, price_per_gb_month), None
    added = () if method or not is_probed else ADDED
    own = planner.subject(target, method or (*DEFAULT_KINDS, *added), weights, draft_model, report or ())
    asked, missing = demands.given(
        prompt_tokens, new_tokens, concurrency, rate, limits(slo), None if log is None else demands.of_log(log, format)
    )
    if train_answers is not None:
        training = Training(train_answers, epochs, _token_bytes(own))
    load, probed = functools.cache(load_target), None
    if log is not None and is_probed:
        probed, measured = replayed(own, log, format, probe, draft_model, again, load)
        own = planner.rest_on(own, measured, added)
    if measure:
        found = planner.plan(own, _timed(own, asked, missing, draft_model, again, load), prices)
    elif hardware is None:
        assert probed is not None
        found = planner.unplaced(own, probed)
    else:
        place = table.place(hardware, devices)
        memory = Memory(place.memory_bytes, own.model, own.drafts)
        name = f"{devices} {place.accelerator.name}" if devices > 1 else place.accelerator.name
        given = Given(planner.on_paper(own, place), asked, missing, name, memory)
        found = planner.plan(own, given, prices, training, place)
    found = found.model_copy(update={"probe": probed})
    if json_to != "-":
        _show(found)
    write_json(json_to, found.model_dump(mode="json"))


def _refuse_idle(*options: tuple[str, Any, str, Any]) -> None:
    """ConfigError for an option that has no effect without another."""
    for name, given, other, there in options:
        if given and not there:
            raise ConfigError(f"{name} has no effect without {other}; give {other} too, or leave {name} out")


def _refuse_with_checklist(checklist: Path, **given: Any) -> None:
    """ConfigError for options of a plan, which a checklist does not make."""
    idle = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if idle:
        raise ConfigError(f"{', '.join(idle)} has no effect with --checklist {checklist}; leave it out")


def _refuse(
    hardware: str | None, measure: bool, is_probed: bool, rate: float | None, concurrency: float | None
) -> None:
    if hardware is None and not measure and not is_probed:
        raise ConfigError(
            f"no hardware was given; name it with --hardware ({', '.join(table.names())}), or --measure on this machine"
        )
    if hardware is not None and measure:
        raise ConfigError("--hardware and --measure were both given; choose one")
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency were both given; choose one")


def _list() -> None:
    shown = console.table("name", "memory", "GB/s", "TFLOP/s", "source", right=("memory", "GB/s"))
    for name in table.names():
        own = table.find(name)
        flops = ", ".join(f"{kind} {value / 1e12:.0f}" for kind, value in own.flops.items())
        shown.add_row(name, sized(own.memory_bytes), f"{own.bandwidth / 1e9:.0f}", flops, own.source)
    console.show(shown)


def _token_bytes(own: Subject) -> float:
    """What a token's stored features take: five taps and the final state, in bfloat16."""
    return encodings.bytes_per_token("bf16", own.model.hidden, 5)


# ── measured ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _timed(
    own: Subject, asked: Demand | None, missing: str, draft_model: str | None, again: bool, load: Callable[..., Any]
) -> Given:
    """Costs of this machine, timed now or before."""
    loaded = load(own.target)
    at_once = asked.concurrency if asked is not None else None
    batches = sorted({1, *(max(1, round(at_once * each)) for each in MULTIPLES)} if at_once else TIMED_LOADS)
    context = asked.context if asked is not None else planner.USUAL_CONTEXT
    at = timings.rounded(context, loaded.spec.context)
    before = timings.Timings() if again else timings.cached(loaded)
    known = timings.as_mapping(before)
    say(f"plan      {own.target}: {known['passes']} sizes of pass and {known['drafts']} of draft were timed before")
    made = functools.partial(drafter_of, own, target=loaded, draft_model=draft_model)
    found = timings.measure(
        loaded, list(own.methods), batches, TIMED_DEPTHS, at, before, made, lambda line: say(f"          {line}")
    )
    place = timings.keep(loaded, found)
    say(f"          {'kept in ' + str(place) if place else 'not kept: other programs are busy'}")
    identities = {name: timings.identity_of(name) for name in own.methods}
    costs = TimedCosts(found, identities)
    what = f"this machine, {loaded.device.type}, timed"
    return Given(costs, asked, missing, what, None, TIMED_DEPTHS, batches, float(max(batches)), True)


# ── shown ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _show(found: Plan) -> None:
    say(f"plan      {found.target} on {found.hardware}")
    for name, source in found.acceptance.items():
        say(f"          {name}: {source}")
    if found.probe is not None and found.probe.rows:
        show_probe(found.probe)
    if found.rows:
        console.show(_rows(found))
    elif found.break_even:
        console.show(_points(found))
    _show_costs(found)
    for note in found.notes:
        say(f"          {note}")
    depths = ", ".join(f"{depth} at {load}" for load, depth in found.depths.items())
    if depths:
        say(f"          depth by requests at once: {depths}")
    what = f" {found.method}, depth {found.depth}" if found.method else ""
    say(f"{found.decision}{what}", "green" if found.decision == "ENABLE" else "yellow")
    say(f"          {found.because}")


def _rows(found: Plan) -> console.FittedTable:
    """The best depth of each method at each load."""
    best: dict[tuple[str, float], Row] = {}
    for row in found.rows:
        key = row.method, row.concurrency
        if key not in best or (row.speedup.center or 0) > (best[key].speedup.center or 0):
            best[key] = row
    heads = ("at once", "depth", "tokens/step", "speed-up", "plain", "draft", "rest", "memory")
    shown = console.table("ms a step", *heads, right=heads)
    for row in best.values():
        ms = (f"{1e3 * each:.2f}" for each in (row.plain_s, row.draft_s, row.verify_s + row.other_s))
        memory = "" if row.memory_bytes is None else sized(row.memory_bytes)
        numbers = around(row.tokens_per_step), around(row.speedup)
        shown.add_row(row.method, f"{row.concurrency:.4g}", str(row.depth), *numbers, *ms, memory)
    return shown


def _points(found: Plan) -> console.FittedTable:
    heads = ("depth", "tokens/step needed", "chance a token", "pays up to")
    shown = console.table("method", *heads, right=heads)
    for point in (each for each in found.break_even if each.depth in SHOWN_DEPTHS):
        chance = "never" if point.acceptance is None else f"{point.acceptance:.2f}"
        up_to = "unknown" if point.pays is None else "any" if point.crossover is None else f"{point.crossover} at once"
        shown.add_row(point.method, str(point.depth), f"{point.tokens_per_step:.2f}", chance, up_to)
    return shown


def _show_costs(found: Plan) -> None:
    if found.once is not None:
        own = found.once
        hours = ", ".join(
            f"{lasting(3600 * each)} of {what}"
            for what, each in (("data", own.data_hours), ("training", own.training_hours)) if each is not None
        )  # fmt: skip
        price = "" if own.money is None else f", {own.money:,.0f} in money"
        say(f"once      {hours}, {sized(own.storage_bytes or 0)} stored{price}")
        for line in own.assumed:
            say(f"          {line}")
    for cost in found.costs:
        if cost.concurrency is None:
            say(f"traffic   x{cost.traffic:g}: more than the machine can do")
            continue
        parts = [f"x{cost.traffic:g}: {cost.concurrency:.1f} at once"]
        if cost.speedup is not None:
            parts.append(f"{cost.device_hours_saved_per_day:.1f} of {cost.device_hours_per_day:.1f} hours a day saved")
        if cost.saved_per_day is not None:
            parts.append(f"{cost.saved_per_day:,.2f} a day")
        if cost.pays_back_after_days is not None:
            parts.append(f"pays back after {cost.pays_back_after_days:,.1f} days")
        say(f"traffic   {', '.join(parts)}")
