"""Costs of this machine, as a plan uses them: which sizes are timed, and what was timed before."""

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
from outrider.plan.planner import Given
from outrider.plan.schema import Profile
from outrider.plan.subject import Subject
from outrider.targets.hf.transformers import TransformersTarget

MINUTES = 2.0
"""Most that timing takes, unless told otherwise."""
TIMED_DEPTHS = (1, 2, 4, 7)
TIMED_LOADS = (1, 4, 16)
"""Texts at once that are timed where the traffic does not say how many there are."""
MULTIPLES = (1, 4)
"""Of the traffic's own number, which are timed beside one text."""


def loads(demand: Demand | None) -> list[int]:
    """Texts at once that are timed for this traffic."""
    if demand is None or not demand.concurrency:
        return list(TIMED_LOADS)
    return sorted({1, *(max(1, round(demand.concurrency * each)) for each in MULTIPLES)})


def given(
    own: Subject, demand: Demand | None, missing: str, target: TransformersTarget, again: bool,
    drafter: Callable[[str], Drafter], say: Callable[[str], None] = lambda line: None, minutes: float = MINUTES,
) -> Given:  # fmt: skip
    """What a plan is made from, timed now or before.  again: nothing that was timed before counts.

    drafter: loads a method's.  say: is told what is timed, and where it is stored.  minutes: most that timing takes.
    """
    batches = loads(demand)
    context = timings.rounded(demand.context if demand else planner.USUAL_CONTEXT, target.spec.context)
    before = timings.Timings() if again else timings.cached(target)
    known = timings.as_mapping(before)
    say(f"{known['passes']} sizes of pass and {known['drafts']} of draft were timed before")
    allowed = Allowance(60 * minutes, SHARE * machine.free_memory(target.device))
    found = timings.measure(target, list(own.methods), batches, TIMED_DEPTHS, context, before, drafter, say, allowed)
    place = timings.keep(target, found)
    say(f"kept in {place}" if place else "not kept: other programs are busy")
    costs = TimedCosts(found, {name: timings.identity_of(name) for name in own.methods})
    what = f"this machine, {target.device.type}, timed"
    batches = sorted({slots for slots, _, other in found.plain if other == context})
    return Given(
        costs, demand, missing, what, None, TIMED_DEPTHS, batches, float(max(batches)), True, tuple(allowed.left_out)
    )


def profile_of(own: Subject, demand: Demand | None, target: TransformersTarget) -> Profile | None:
    """What a plain step of this traffic waits for, where there is a device to ask."""
    context = timings.rounded(demand.context if demand else planner.USUAL_CONTEXT, target.spec.context)
    slots = max(1, round(demand.concurrency or 1)) if demand else 1
    return profile(target, own.model, slots, context)
