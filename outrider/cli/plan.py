"""`outrider plan`: whether speculation will pay, with which method, how deep, and what it costs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, say, sized, write_json
from outrider.cli.options import Fields, JsonTo, with_options
from outrider.cli.plan_checklist import show_checklist
from outrider.cli.plan_probe import replayed
from outrider.cli.plan_shown import show_plan
from outrider.plan import options as plan_options
from outrider.plan import planner
from outrider.plan.measured import costs, probe
from outrider.plan.options import PlanOptions
from outrider.plan.paper import hardware as table
from outrider.plan.schema import Plan
from outrider.plan.subject import with_measured
from outrider.targets.load import load_target

Checklist = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Show the roll-out status of a run's drafter instead.")
]

OPTIONS = " ".join(PlanOptions.model_fields)


@with_options
def plan(
    options: Annotated[PlanOptions, Fields(PlanOptions, OPTIONS)], checklist: Checklist = None, json_to: JsonTo = None
) -> None:
    """Will speculation pay?  ENABLE (method and depth), BATCH INSTEAD or NEED DATA, with the number that decided.

    With --checklist RUN: roll-out status of a run's drafter.  Exit code 0 only if everything is done.
    """
    console.quiet()
    place_of_json(json_to)
    if options.hardware == "list":
        _list()
        return
    if checklist is not None:
        plan_options.refuse_with_checklist(options, checklist)
        show_checklist(checklist, options.log, json_to)
        return
    plan_options.refuse(options)
    made = _planned(options)
    if json_to != "-":
        show_plan(made)
    write_json(json_to, made.model_dump(mode="json"))


def _planned(options: PlanOptions) -> Plan:
    """Make the plan, printing progress of replays and measurements."""
    subject, load, probed = options.subject(), functools.cache(load_target), None
    demand, missing = options.demand(subject)
    if options.is_probed:
        probed, measured = replayed(subject, options, load)
        subject = with_measured(subject, measured, options.extra_methods)
    if options.measure:
        loaded = load(options.target)
        say(f"plan      {options.target} on this machine, {loaded.device.type}")
        drafter = functools.partial(probe.drafter_of, subject, target=loaded, draft_model=options.draft_model)
        tell = lambda line: say(f"          {line}")
        minutes = options.minutes or costs.MINUTES
        inputs = costs.measured_inputs(subject, demand, missing, loaded, options.again, drafter, tell, minutes)
        profile = costs.profile_of(subject, demand, loaded)
        plan = planner.plan(subject, inputs, options.prices).model_copy(update={"profile": profile})
    elif options.hardware is None:
        assert probed is not None
        plan = planner.unplaced(subject, probed)
    else:
        plan = plan_options.on_paper(options, subject, demand, missing)
    return plan.model_copy(update={"probe": probed})


def _list() -> None:
    shown = console.table("name", "memory", "GB/s", "TFLOP/s", "source", right=("memory", "GB/s"))
    for name in table.names():
        accelerator = table.find(name)
        flops = ", ".join(f"{kind} {value / 1e12:.0f}" for kind, value in accelerator.flops.items())
        shown.add_row(
            name, sized(accelerator.memory_bytes), f"{accelerator.bandwidth / 1e9:.0f}", flops, accelerator.source
        )
    console.show(shown)
