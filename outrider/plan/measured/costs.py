"""Costs on this machine for a plan: which sizes to time, and what is already stored."""

from __future__ import annotations

from collections.abc import Callable

from outrider import machine
from outrider.decoding.protocols import Drafter
from outrider.plan import planner
from outrider.plan.demand import Demand
from outrider.plan.measured import timings
from outrider.plan.measured.allowance import SHARE, Allowance
from outrider.plan.measured.profile import profile
from outrider.plan.measured.timed import TimedCosts
from outrider.plan.planner import Inputs
from outrider.plan.schema import Profile
from outrider.plan.subject import Subject
from outrider.targets.hf.transformers import TransformersTarget

MINUTES = 2.0
"""Default time limit of measuring."""
TIMED_DEPTHS = (1, 2, 4, 7)
TIMED_LOADS = (1, 4, 16)
"""Batch sizes to time if the concurrency is unknown."""
MULTIPLES = (1, 4)
"""Multiples of the traffic's concurrency to time, besides one text."""


def loads(demand: Demand | None) -> list[int]:
    """Batch sizes to time for this traffic."""
    if demand is None or not demand.concurrency:
        return list(TIMED_LOADS)
    return sorted({1, *(max(1, round(demand.concurrency * each)) for each in MULTIPLES)})


def measured_inputs(
    subject: Subject, demand: Demand | None, missing: str, target: TransformersTarget, again: bool,
    drafter: Callable[[str], Drafter], say: Callable[[str], None] = lambda line: None, minutes: float = MINUTES,
) -> Inputs:  # fmt: skip
    """The inputs of a plan, timed now or earlier.  again: ignore stored times.

    drafter: loads the drafter of a method.  say: prints progress.  minutes: time limit.
    """
    batches = loads(demand)
    context = timings.rounded(demand.context if demand else planner.USUAL_CONTEXT, target.spec.context)
    stored = timings.Timings() if again else timings.load_timings(target)
    counts = timings.as_mapping(stored)
    say(f"stored times: {counts['passes']} sizes of passes, {counts['drafts']} of drafts")
    allowance = Allowance(60 * minutes, SHARE * machine.free_memory(target.device))
    times = timings.measure(
        target, list(subject.methods), batches, TIMED_DEPTHS, context, stored, drafter, say, allowance
    )
    path = timings.save_timings(target, times)
    say(f"stored in {path}" if path else "not stored: other programs are busy")
    costs = TimedCosts(times, {name: timings.identity_of(name) for name in subject.methods})
    hardware = f"this machine, {target.device.type}, timed"
    batches = sorted({slots for slots, _, other in times.plain if other == context})
    return Inputs(
        costs,
        demand,
        missing,
        hardware,
        None,
        TIMED_DEPTHS,
        batches,
        float(max(batches)),
        True,
        tuple(allowance.left_out),
    )


def profile_of(subject: Subject, demand: Demand | None, target: TransformersTarget) -> Profile | None:
    """What limits a plain step under this traffic; None on a CPU."""
    context = timings.rounded(demand.context if demand else planner.USUAL_CONTEXT, target.spec.context)
    slots = max(1, round(demand.concurrency or 1)) if demand else 1
    return profile(target, subject.model, slots, context)
