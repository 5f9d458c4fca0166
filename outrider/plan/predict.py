"""Speed-ups from acceptance and costs.

A step of depth K commits t(K) tokens and takes draft + verify + other seconds; plain decoding takes one step per token.
So the speed-up is t(K) * plain / (draft + verify + other).  Its interval spans that of the acceptance, widened by the
error of the costs.  No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.plan.acceptance import Acceptance, alpha_of
from outrider.plan.demand import Demand
from outrider.plan.paper.anatomy import Anatomy
from outrider.plan.paper.drafts import DraftModelOnPaper
from outrider.plan.paper.hardware import Place
from outrider.plan.paper.roofline import pass_of, prefill_seconds
from outrider.plan.schema import BreakEven, Row
from outrider.report.parts import Range

RESERVED = 0.1
"""Share of memory reserved for activations and graphs."""
MOST_AT_ONCE = 4096


class StepCost(NamedTuple):
    """Seconds of a drafted step of the whole batch."""

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


class Costs(Protocol):
    """Seconds of steps, on paper or measured."""

    @property
    def error(self) -> float:
        """Relative error of a speed-up, acceptance aside."""

    def plain(self, batch: float, context: float) -> float:
        """Seconds of a plain step of `batch` texts."""

    def drafted(self, method: str, batch: float, depth: int, offered: Sequence[float], context: float) -> StepCost:
        """Seconds of a step that drafts.  offered: share of steps that draft each node; empty if all do."""

    def prompt(self, tokens: float) -> float:
        """Seconds for the target to read a prompt."""

    def prompt_of(self, method: str, tokens: float) -> float:
        """Additional seconds for the drafter to read it."""


@dataclass(frozen=True)
class PaperCosts:
    """Costs from the roofline model."""

    model: Anatomy
    place: Place
    drafts: Mapping[str, DraftModelOnPaper]

    @property
    def error(self) -> float:
        return self.place.efficiency.error

    def plain(self, batch: float, context: float) -> float:
        return pass_of(self.model, self.place, batch, 1, context).seconds + self.place.efficiency.step_s

    def drafted(self, method: str, batch: float, depth: int, offered: Sequence[float], context: float) -> StepCost:
        efficiency, nodes = self.place.efficiency, sum(offered[:depth]) if offered else depth
        draft = self.drafts[method].seconds(self.place, batch, depth, context)
        verify = pass_of(self.model, self.place, batch, 1 + nodes, context).seconds
        return StepCost(draft, verify, efficiency.step_s + efficiency.cycle_s)

    def prompt(self, tokens: float) -> float:
        return prefill_seconds(self.model, self.place, tokens)

    def prompt_of(self, method: str, tokens: float) -> float:
        return self.drafts[method].prompt_seconds(self.place, tokens)


@dataclass(frozen=True)
class Memory:
    """Memory of the hardware, and what has to fit in it."""

    bytes: float
    model: Anatomy
    drafts: Mapping[str, DraftModelOnPaper]

    def slots(self, length: float, method: str | None = None, depth: int = 0) -> int:
        """Number of texts of `length` tokens that fit beside the weights, with the logits of every verified row."""
        draft = self.drafts.get(method) if method else None
        free = (1 - RESERVED) * self.bytes - self.model.weight_bytes - (draft.weight_bytes if draft else 0.0)
        rows = 1 + (2 * depth if draft and draft.model is not None else depth)  # q of the draft as well
        each = self.model.cache_bytes(length + depth) + rows * self.model.vocabulary * 4
        each += draft.cache_bytes(length) if draft else 0.0
        return max(0, int(free / each))

    def drafter_bytes(self, method: str, depth: int, batch: float, length: float) -> float:
        """Bytes that drafting takes from keys and values."""
        draft = self.drafts[method]
        rows = 2 * depth if draft.model is not None else depth
        more = self.model.cache_bytes(length + depth) - self.model.cache_bytes(length)
        return draft.weight_bytes + batch * (draft.cache_bytes(length) + rows * self.model.vocabulary * 4 + more)


def row(
    costs: Costs, method: str, depth: int, accepted: Acceptance, demand: Demand, concurrency: float,
    memory: Memory | None,
) -> Row:  # fmt: skip
    """One method at one depth under one load."""
    context, length = demand.context, demand.prompt_tokens + demand.new_tokens
    accepted = accepted.at(depth)
    step = costs.drafted(method, concurrency, depth, accepted.offered, context)
    plain, tokens = costs.plain(concurrency, context), accepted.tokens(depth)
    ratios = [each * plain / step.seconds for each in tokens]
    speedup = Range(low=ratios[0] * (1 - costs.error), center=ratios[1], high=ratios[2] * (1 + costs.error))
    reading, draft_reading = costs.prompt(demand.prompt_tokens), costs.prompt_of(method, demand.prompt_tokens)
    decoding = demand.new_tokens * plain
    slots = plain_slots = memory_bytes = None
    if memory is not None:
        slots, plain_slots = memory.slots(length, method, depth), memory.slots(length)
        memory_bytes = memory.drafter_bytes(method, depth, concurrency, length)
    tpot = step.seconds / tokens[1]
    limit = demand.slo.get("tpot")
    return Row(
        method=method, depth=depth, concurrency=concurrency, context=context,
        tokens_per_step=Range(low=tokens[0], center=tokens[1], high=tokens[2]), speedup=speedup,
        request_speedup=(reading + decoding) / (reading + draft_reading + decoding / ratios[1]),
        plain_s=plain, draft_s=step.draft_s, verify_s=step.verify_s, other_s=step.other_s,
        tokens_per_s=concurrency / tpot, plain_tokens_per_s=concurrency / plain,
        tpot_ms=1e3 * tpot, plain_tpot_ms=1e3 * plain, memory_bytes=memory_bytes, slots=slots, plain_slots=plain_slots,
        fits=None if slots is None else slots >= concurrency,
        break_even_tokens=draft_reading / (plain * (1 - 1 / ratios[1])) if ratios[1] > 1 else None,
        basis=accepted.basis,
        meets_slo=None if limit is None else tpot <= limit,
    )  # fmt: skip


def break_even(
    costs: Costs, method: str, depth: int, accepted: Acceptance | None, context: float, concurrency: float,
    loads: Sequence[int],
) -> BreakEven:  # fmt: skip
    """What a method must reach at this load, and up to which of `loads` it pays off at its acceptance."""
    accepted = accepted and accepted.at(depth)
    offered = accepted.offered if accepted else ()
    ratio = lambda batch: costs.drafted(method, batch, depth, offered, context).seconds / costs.plain(batch, context)
    needed = ratio(concurrency)
    pays, crossover = None, None
    if accepted is not None:
        tokens = accepted.tokens(depth)[1]
        paying = [batch for batch in loads if tokens > ratio(batch)]
        pays = loads[0] in paying
        crossover = None if len(paying) == len(loads) else max(paying, default=0)
    alpha = alpha_of(max(needed, 1.0), depth) if needed <= depth + 1 else None
    return BreakEven(
        method=method, depth=depth, concurrency=concurrency, tokens_per_step=needed, acceptance=alpha,
        crossover=crossover, pays=pays,
    )  # fmt: skip


def loads_up_to(most: float) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 ... up to `most`."""
    few = {*(2**n for n in range(13)), *(3 * 2**n for n in range(12))}
    return sorted(load for load in few if load <= min(most, MOST_AT_ONCE)) or [1]


def request_seconds(costs: Costs, demand: Demand, batch: float) -> float:
    """Seconds of a request in a batch of this size, without a drafter."""
    return costs.prompt(demand.prompt_tokens) + demand.new_tokens * costs.plain(math.ceil(batch), demand.context)
