"""A plan: the costs of a target, the acceptance of its drafters and what is asked of it, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.plan import money
from outrider.plan.decide import decide
from outrider.plan.demand import Demand, at_once
from outrider.plan.paper.hardware import Place
from outrider.plan.paper.roofline import saturation_rows
from outrider.plan.predict import Costs, Memory, PaperCosts, break_even, loads_up_to, request_seconds, row
from outrider.plan.rules import rules
from outrider.plan.schema import BreakEven, Cost, Once, Plan, Probed, Row
from outrider.plan.subject import Subject

DEPTHS = (1, 2, 3, 4, 5, 7)
LOADS = (1, 4, 16, 64)
"""Requests at once that a plan shows beside those that were asked for."""
NO_PRICES = money.Prices()
USUAL_CONTEXT = 1024.0
"""Tokens of a text where no traffic was given."""


def on_paper(own: Subject, place: Place) -> PaperCosts:
    """Costs by the data sheet.  Raises ConfigError for a target that does not fit."""
    if own.model.weight_bytes > place.memory_bytes:
        raise ConfigError(
            f"the weights of {own.target} take {own.model.weight_bytes / 1e9:.0f} GB, and {place.devices} "
            f"{place.accelerator.name} have {place.memory_bytes / 1e9:.0f} GB; give more --devices, or --weights int4"
        )
    return PaperCosts(own.model, place, own.drafts)


class Given(NamedTuple):
    """What a plan is made from beside its subject."""

    costs: Costs
    demand: Demand | None
    missing: str
    """Why there is no demand."""
    hardware: str
    memory: Memory | None
    depths: Sequence[int] = DEPTHS
    loads: Sequence[int] = LOADS
    most: float = 4096.0
    """Most requests at once for which there are costs."""
    is_measured: bool = False
    left_out: tuple[str, ...] = ()
    """What was to be timed and was not, in sentences."""


def plan(own: Subject, given: Given, prices: money.Prices = NO_PRICES, training: money.Training | None = None,
         place: Place | None = None) -> Plan:  # fmt: skip
    """The plan."""
    notes = [f"costs may be wrong by {given.costs.error:.0%}, which the intervals hold", *_notes(own, place)]
    notes += given.left_out
    whole: dict[str, Any] = {
        "target": own.target, "hardware": given.hardware, "measured": given.is_measured, "acceptance": sources(own),
    }  # fmt: skip
    if given.demand is None:
        points = even_points(own, given, USUAL_CONTEXT, 1.0)
        notes.append(f"the points are for texts of {USUAL_CONTEXT:.0f} tokens, one at once")
        because = f"{given.missing}; without traffic nothing can be decided, but this is what must be reached"
        return Plan(decision="NEED DATA", because=because, break_even=tuple(points), notes=tuple(notes), **whole)
    demand, costs = given.demand, given.costs
    most = min(given.most, money.most_at_once(demand, given.memory))
    load = demand.concurrency or at_once(demand.rate or 0.0, lambda many: request_seconds(costs, demand, many), most)
    asked = {key: value for key, value in demand._asdict().items() if value is not None and key != "slo"}
    whole["demand"] = asked | {"concurrency": load, "slo": dict(demand.slo)}
    if load is None:
        because = (
            f"{demand.rate:g} requests a second need more than the {most:.0f} texts at once that fit; more machines or "
            "larger batches come first"
        )
        return Plan(decision="BATCH INSTEAD", because=because, notes=tuple(notes), **whole)
    if prices.device_hour is not None and demand.rate is None:
        notes.append("what a day costs is not known: requests a second are missing; give --rate")
    load = max(1.0, load)
    whole["rows"] = rows = rows_at(own, given, demand, load)
    choice = decide(rows, demand, load, own.unknown, costs.error)
    chosen = choice.row if choice.decision == "ENABLE" else None
    whole["once"] = first = _once(own, given, demand, training, prices, place, choice.row)
    whole["costs"] = _daily(own, given, demand, chosen, most, prices, place, first)
    whole["break_even"] = points = even_points(own, given, demand.context, load)
    return Plan(
        decision=choice.decision, because=choice.because, method=chosen.method if chosen else None,
        depth=chosen.depth if chosen else None, depths=dict(choice.depths), notes=tuple(notes),
        rules=rules(own, rows, points, load, place, chosen), **whole,
    )  # fmt: skip


def unplaced(own: Subject, probe: Probed) -> Plan:
    """What is known before hardware is: the acceptance."""
    because = "no hardware was given; name it with --hardware, or time this machine with --measure"
    return Plan(
        decision="NEED DATA", because=because, target=own.target, hardware="not given", measured=False,
        acceptance=sources(own), probe=probe, notes=tuple(_notes(own, None)),
    )  # fmt: skip


def sources(own: Subject) -> dict[str, str]:
    """Where each method's acceptance is from."""
    return {name: f"{value.basis}: {value.source}" for name, value in own.accepted.items()}


def rows_at(own: Subject, given: Given, demand: Demand, load: float) -> list[Row]:
    """Every method at every depth, at this load and the usual ones."""
    loads = sorted({load, *(float(each) for each in given.loads if each <= given.most)})
    return [made for name in own.accepted for at in loads for made in rows_of(own, given, demand, name, at)]


def rows_of(own: Subject, given: Given, demand: Demand, name: str, load: float) -> list[Row]:
    """A method at every depth whose acceptance is known."""
    known = own.accepted[name]
    depths = [depth for depth in given.depths if depth <= known.depth]
    return [row(given.costs, name, depth, known, demand, load, given.memory) for depth in depths]


def even_points(own: Subject, given: Given, context: float, load: float) -> list[BreakEven]:
    """What each method must reach at each depth."""
    most = min(given.most, 4096.0)
    loads = loads_up_to(most)
    found = []
    for name in own.methods:
        known = own.accepted.get(name)
        for depth in given.depths:
            if known is None or depth <= known.depth:
                found.append(break_even(given.costs, name, depth, known, context, load, loads))
    return found


def _at(own: Subject, given: Given, demand: Demand, chosen: Row | None, load: float) -> Row | None:
    """The chosen method's best row at another load."""
    if chosen is None:
        return None
    return max(rows_of(own, given, demand, chosen.method, load), key=lambda each: each.speedup.center or 0.0)


def _daily(
    own: Subject, given: Given, demand: Demand, chosen: Row | None, most: float, prices: money.Prices,
    place: Place | None, first: Once | None,
) -> list[Cost]:  # fmt: skip
    again = lambda many: _at(own, given, demand, chosen, many)
    spent = first.money if first else None
    return money.daily(demand, given.costs, place.devices if place else 1, again, most, prices, spent)


def _once(
    own: Subject, given: Given, demand: Demand, training: money.Training | None, prices: money.Prices,
    place: Place | None, best: Row | None,
) -> Once | None:  # fmt: skip
    if training is None or place is None or best is None:
        return None
    return money.once(
        training, demand, own.drafts[best.method], own.model, place, given.costs, given.memory, prices
    )  # fmt: skip


def _notes(own: Subject, place: Place | None) -> list[str]:
    found = []
    if probed := [name for name, value in own.accepted.items() if value.basis == "probe"]:
        found.append(
            f"acceptance of {', '.join(probed)} was {own.accepted[probed[0]].source}, each request alone: what a "
            "drafter learns from earlier requests is not in it"
        )
    if any(value.basis == "published" for value in own.accepted.values()):
        names = ", ".join(name for name, value in own.accepted.items() if value.basis == "published")
        found.append(
            f"acceptance of {names} was published for other targets; measure it on your texts before you rely on it"
        )
    if own.unknown:
        found.append(f"nothing is known of the acceptance of {', '.join(own.unknown)}; name a --report that has it")
    if place is not None:
        rows = saturation_rows(own.model, place)
        found.append(f"from {rows:.0f} rows a pass on, this target's layers compute instead of waiting for memory")
    return found
