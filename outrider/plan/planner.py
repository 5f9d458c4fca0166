"""Makes a plan from the costs of a target, the acceptance of its drafters and the traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.plan import money
from outrider.plan.decide import decide
from outrider.plan.demand import Demand, at_once
from outrider.plan.paper.hardware import Place
from outrider.plan.paper.roofline import saturation_rows
from outrider.plan.placement import placements
from outrider.plan.predict import Costs, Memory, PaperCosts, break_even, loads_up_to, request_seconds, row
from outrider.plan.schema import BreakEven, Cost, Once, Plan, Probed, Row
from outrider.plan.subject import Subject

DEPTHS = (1, 2, 3, 4, 5, 7)
LOADS = (1, 4, 16, 64)
"""Numbers of concurrent requests that a plan shows in addition to the traffic's."""
NO_PRICES = money.Prices()
USUAL_CONTEXT = 1024.0
"""Length of a text if no traffic was given."""


def on_paper(subject: Subject, place: Place) -> PaperCosts:
    """Costs from the data sheet.  Raises ConfigError for a target that does not fit."""
    if subject.model.weight_bytes > place.memory_bytes:
        raise ConfigError(
            f"the weights of {subject.target} take {subject.model.weight_bytes / 1e9:.0f} GB, but {place.devices} "
            f"{place.accelerator.name} have {place.memory_bytes / 1e9:.0f} GB; give more --devices, or --weights int4"
        )
    return PaperCosts(subject.model, place, subject.drafts)


class Inputs(NamedTuple):
    """The inputs of a plan besides its subject."""

    costs: Costs
    demand: Demand | None
    missing: str
    """Why the demand is unknown."""
    hardware: str
    memory: Memory | None
    depths: Sequence[int] = DEPTHS
    loads: Sequence[int] = LOADS
    most: float = 4096.0
    """Maximum number of concurrent requests for which costs are known."""
    is_measured: bool = False
    left_out: tuple[str, ...] = ()
    """Sentences about what was not timed, and why."""


def plan(subject: Subject, inputs: Inputs, prices: money.Prices = NO_PRICES, training: money.Training | None = None,
         place: Place | None = None) -> Plan:  # fmt: skip
    """Make the plan."""
    notes = [f"costs may be wrong by {inputs.costs.error:.0%}, which the intervals include", *_notes(subject, place)]
    notes += inputs.left_out
    fields: dict[str, Any] = {
        "target": subject.target, "hardware": inputs.hardware, "measured": inputs.is_measured,
        "acceptance": sources(subject),
    }  # fmt: skip
    if inputs.demand is None:
        points = even_points(subject, inputs, USUAL_CONTEXT, 1.0)
        notes.append(f"the break-even points are for one text of {USUAL_CONTEXT:.0f} tokens at a time")
        because = f"{inputs.missing}; without traffic nothing can be decided, but the table shows what it would take"
        return Plan(decision="NEED DATA", because=because, break_even=tuple(points), notes=tuple(notes), **fields)
    demand, costs = inputs.demand, inputs.costs
    most = min(inputs.most, money.most_at_once(demand, inputs.memory))
    load = demand.concurrency or at_once(demand.rate or 0.0, lambda many: request_seconds(costs, demand, many), most)
    traffic = {key: value for key, value in demand._asdict().items() if value is not None and key != "slo"}
    fields["demand"] = traffic | {"concurrency": load, "slo": dict(demand.slo)}
    if load is None:
        because = (
            f"{demand.rate:g} requests per second need more than the {most:.0f} concurrent texts that fit; "
            "add machines or enlarge batches first"
        )
        return Plan(decision="BATCH INSTEAD", because=because, notes=tuple(notes), **fields)
    if prices.device_hour is not None and demand.rate is None:
        notes.append("the cost of a day is unknown without requests per second; give --rate")
    load = max(1.0, load)
    fields["rows"] = rows = rows_at(subject, inputs, demand, load)
    choice = decide(rows, demand, load, subject.without_acceptance, costs.error)
    fields["placements"] = placements(subject, demand, load, rows, place) if place else ()
    chosen = choice.row if choice.decision == "ENABLE" else None
    fields["once"] = once = _once(subject, inputs, demand, training, prices, place, choice.row)
    fields["costs"] = _daily(subject, inputs, demand, chosen, most, prices, place, once)
    fields["break_even"] = even_points(subject, inputs, demand.context, load)
    return Plan(
        decision=choice.decision, because=choice.because, method=chosen.method if chosen else None,
        depth=chosen.depth if chosen else None, depths=dict(choice.depths), notes=tuple(notes),
        **fields,
    )  # fmt: skip


def unplaced(subject: Subject, probe: Probed) -> Plan:
    """A plan without hardware: acceptance only."""
    because = "no hardware was given; name it with --hardware, or time this machine with --measure"
    return Plan(
        decision="NEED DATA", because=because, target=subject.target, hardware="not given", measured=False,
        acceptance=sources(subject), probe=probe, notes=tuple(_notes(subject, None)),
    )  # fmt: skip


def sources(subject: Subject) -> dict[str, str]:
    """The source of each method's acceptance."""
    return {name: f"{value.basis}: {value.source}" for name, value in subject.accepted.items()}


def rows_at(subject: Subject, inputs: Inputs, demand: Demand, load: float) -> list[Row]:
    """Every method at every depth, at this load and the default ones."""
    loads = sorted({load, *(float(each) for each in inputs.loads if each <= inputs.most)})
    return [made for name in subject.accepted for at in loads for made in rows_of(subject, inputs, demand, name, at)]


def rows_of(subject: Subject, inputs: Inputs, demand: Demand, name: str, load: float) -> list[Row]:
    """A method at every depth for which its acceptance is known."""
    accepted = subject.accepted[name]
    depths = [depth for depth in inputs.depths if depth <= accepted.depth]
    return [row(inputs.costs, name, depth, accepted, demand, load, inputs.memory) for depth in depths]


def even_points(subject: Subject, inputs: Inputs, context: float, load: float) -> list[BreakEven]:
    """The acceptance each method needs at each depth to pay off."""
    most = min(inputs.most, 4096.0)
    loads = loads_up_to(most)
    points = []
    for name in subject.methods:
        accepted = subject.accepted.get(name)
        for depth in inputs.depths:
            if accepted is None or depth <= accepted.depth:
                points.append(break_even(inputs.costs, name, depth, accepted, context, load, loads))
    return points


def _at(subject: Subject, inputs: Inputs, demand: Demand, chosen: Row | None, load: float) -> Row | None:
    """The chosen method's best row at another load."""
    if chosen is None:
        return None
    return max(rows_of(subject, inputs, demand, chosen.method, load), key=lambda each: each.speedup.center or 0.0)


def _daily(
    subject: Subject, inputs: Inputs, demand: Demand, chosen: Row | None, most: float, prices: money.Prices,
    place: Place | None, once: Once | None,
) -> list[Cost]:  # fmt: skip
    row_at = lambda many: _at(subject, inputs, demand, chosen, many)
    spent = once.money if once else None
    return money.daily(demand, inputs.costs, place.devices if place else 1, row_at, most, prices, spent)


def _once(
    subject: Subject, inputs: Inputs, demand: Demand, training: money.Training | None, prices: money.Prices,
    place: Place | None, best: Row | None,
) -> Once | None:  # fmt: skip
    if training is None or place is None or best is None:
        return None
    return money.once(
        training, demand, subject.drafts[best.method], subject.model, place, inputs.costs, inputs.memory, prices
    )  # fmt: skip


def _notes(subject: Subject, place: Place | None) -> list[str]:
    notes = []
    if probed := [name for name, value in subject.accepted.items() if value.basis == "probe"]:
        notes.append(
            f"acceptance of {', '.join(probed)} was {subject.accepted[probed[0]].source}, each request alone, "
            "without what drafters learn from earlier requests"
        )
    if any(value.basis == "published" for value in subject.accepted.values()):
        names = ", ".join(name for name, value in subject.accepted.items() if value.basis == "published")
        notes.append(
            f"acceptance of {names} was published for other targets; measure it on your texts before relying on it"
        )
    if subject.without_acceptance:
        notes.append(
            f"the acceptance of {', '.join(subject.without_acceptance)} is unknown; name a --report that has it"
        )
    if place is not None:
        rows = saturation_rows(subject.model, place)
        notes.append(f"from {rows:.0f} rows per pass on, this target's layers are bound by compute, not by memory")
    return notes
