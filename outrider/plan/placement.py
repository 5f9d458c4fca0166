"""Where a drafter runs: on its target's device, on an accelerator of its own, or on the CPU.  No torch.

On another device it leaves more memory to the target, but Python runs between the passes
(`outrider.nn.drafting.remote`): its layers are launched one by one, the features of a step are sent to it, and its
draft comes back.  Target and drafter take turns; `generate(halves=True)` is not counted, since it does without captured
passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from outrider.drafters import method
from outrider.plan.demand import Demand
from outrider.plan.paper.hardware import Place, host
from outrider.plan.predict import Memory, PaperCosts, StepCost, row
from outrider.plan.schema import Placement, Row, Where
from outrider.plan.subject import Subject

TAPS = 5
"""Features sent per token: as many as most drafters read."""
WIDTH = 2
"""Bytes of a number."""


@dataclass(frozen=True)
class ElsewhereCosts(PaperCosts):
    """Costs of drafters on another device than the target's."""

    elsewhere: Place

    def drafted(self, method: str, batch: float, depth: int, offered: Sequence[float], context: float) -> StepCost:
        step = super().drafted(method, batch, depth, offered, context)
        draft = self.drafts[method]
        if draft.model is None:
            return step
        efficiency = self.elsewhere.efficiency
        tokens = batch * (1 + depth)
        sent = tokens * TAPS * self.model.hidden * WIDTH / efficiency.link_bandwidth + 2 * efficiency.send_s
        return step._replace(draft_s=draft.seconds(self.elsewhere, batch, depth, context) + sent)

    def prompt_of(self, method: str, tokens: float) -> float:
        sent = tokens * TAPS * self.model.hidden * WIDTH / self.place.efficiency.link_bandwidth
        return self.drafts[method].prompt_seconds(self.elsewhere, tokens) + sent


def placements(subject: Subject, demand: Demand, load: float, rows: Sequence[Row], place: Place) -> list[Placement]:
    """Every method with a draft model at its best depth under this load, at each place."""
    best: dict[str, Row] = {}
    for each in rows:
        if each.concurrency == load and subject.drafts[each.method].model is not None:
            best[each.method] = max(best.get(each.method, each), each, key=lambda one: one.speedup.center or 0.0)
    placed = [_placed(subject, demand, each, where, place) for each in best.values() for where in get_args(Where)]
    return [each for each in placed if each is not None]


def _placed(subject: Subject, demand: Demand, best: Row, where: Where, place: Place) -> Placement | None:
    draft, model, length = subject.drafts[best.method], subject.model, demand.prompt_tokens + demand.new_tokens
    assert draft.model is not None
    costs, accepted = PaperCosts(model, place, subject.drafts), subject.accepted[best.method]
    memory = Memory(place.memory_bytes, model, subject.drafts)
    own_bytes = draft.weight_bytes + best.concurrency * draft.cache_bytes(length)
    if where != "same device":
        slow = eager(host() if where == "cpu" else Place(place.accelerator, 1, place.efficiency))
        costs = ElsewhereCosts(model, place, subject.drafts, slow)
        # embedding and head of the target are copied there
        own_bytes += 0.0 if method(draft.kind).is_model else 2 * model.head * model.head_bytes
        if own_bytes > slow.memory_bytes:
            return None  # it does not fit there
        memory = Memory(place.memory_bytes, model, {best.method: replace(draft, model=None)})
    made = row(costs, best.method, best.depth, accepted, demand, best.concurrency, memory)
    return Placement(
        method=best.method, where=where, depth=made.depth, concurrency=made.concurrency, plain_s=made.plain_s,
        draft_s=made.draft_s, rest_s=made.verify_s + made.other_s, speedup=made.speedup,
        tokens_per_s=made.tokens_per_s, drafter_bytes=own_bytes, slots=made.slots,
        devices=place.devices + (where == "own device"),
    )  # fmt: skip


def eager(place: Place) -> Place:
    """This place, with Python between the operations of a pass."""
    slow = place.efficiency.eager_layer_s
    return place._replace(efficiency=place.efficiency._replace(layer_s=slow, many_layer_s=slow))
