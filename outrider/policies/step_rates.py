"""How many steps a second a target makes, by the size of its pass: the table SPS(B) of DSpark's scheduler.

Differs from the paper's: it is measured for several numbers of slots too, since sixteen slots of one token and two of
eight are as many tokens and other seconds.
"""

from __future__ import annotations

import logging
import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Target
from outrider.errors import ConfigError
from outrider.policies.adaptive import Costs

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, *(each for n in range(2, 16) for each in (2**n, 3 * 2 ** (n - 1))))
"""Tokens a slot that are timed; and the widest."""


class StepRates:
    """Seconds of a target's pass, by slots and tokens; linear between measured sizes.

    Numbers of slots above or below all measured ones are read from the nearest curve, by tokens in all.  So a table of
    one curve is one of tokens alone, as the paper's is: `StepRates.by_tokens`.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]):
        """seconds: of one pass, by (slots, tokens a slot).  Raises ConfigError for a table that can't be one."""
        wrong = [f"{size}: {each}" for size, each in seconds.items() if min(size) < 1 or not 0 < each < float("inf")]
        if wrong or not seconds:
            raise ConfigError(
                f"step rates need seconds above 0 by (slots, tokens a slot), both at least 1, got "
                f"{', '.join(wrong) or 'none'}; measure them with policies.step_rates.measured"
            )
        curves: dict[int, list[tuple[int, float]]] = {}
        for (slots, width), each in sorted(seconds.items()):
            curves.setdefault(slots, []).append((width, each))
        self.slots = list(curves)
        """Measured numbers of slots, ascending."""
        self.curves = {slots: tuple(zip(*curve, strict=True)) for slots, curve in curves.items()}
        """For each of them: tokens a slot, ascending, and seconds."""
        self._known: dict[tuple[int, float], float] = {}

    @classmethod
    def by_tokens(cls, rates: Mapping[int, float]) -> StepRates:
        """From steps per second by tokens a step, whatever the slots.  Raises ConfigError for a rate of 0."""
        if not all(rate > 0 for rate in rates.values()):
            raise ConfigError(f"steps per second must be above 0, got {dict(rates)}; leave out what never runs")
        return cls({(1, tokens): 1 / rate for tokens, rate in rates.items()})

    def seconds(self, slots: int, tokens: float) -> float:
        """Of a pass over `slots` slots and `tokens` tokens in all."""
        found = self._known.get((slots, tokens))
        if found is None:
            found = self._known[slots, tokens] = self._between(slots, tokens)
        return found

    def _between(self, slots: int, tokens: float) -> float:
        after = bisect_right(self.slots, slots)
        low, high = self.slots[max(0, after - 1)], self.slots[min(after, len(self.slots) - 1)]
        if low in (slots, high):
            return self._along(low, tokens / low)
        less, more = self._along(low, tokens / slots), self._along(high, tokens / slots)
        return less + (more - less) * (slots - low) / (high - low)

    def _along(self, slots: int, width: float) -> float:
        """A curve's seconds at this many tokens a slot; beyond its end with its last slope, which never falls."""
        widths, seconds = self.curves[slots]
        if width <= widths[0] or len(widths) == 1:
            return float(seconds[0])
        right = min(bisect_right(widths, width), len(widths) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (widths[right] - widths[right - 1])
        if width > widths[-1]:
            return float(seconds[-1] + max(0.0, slope) * (width - widths[-1]))
        return float(seconds[right - 1] + slope * (width - widths[right - 1]))


class StepSize(NamedTuple):
    """What the seconds of a step depend on."""

    live: int
    asked: int
    """Nodes that the drafter was asked for."""
    tokens: int
    """Tokens in the pass, anchors and padding included."""
    kind: int
    """0 for a pass of anchors alone, 1 for one of drafts."""


class StepSeconds:
    """Seconds of a step: of its draft, by nodes asked for, and of the rest, by slots and tokens of its pass."""

    def __init__(self, limit: int, rates: StepRates | None):
        self.limit, self.rates = limit, rates
        self.drafts: dict[int, Costs] = {}
        """By the live slots' number in bits, as in `Adaptive`."""
        self.passes: dict[int, Costs] = {}
        """The same by nodes a slot in the pass, where there is no table."""
        self.scales: dict[int, dict[int, Costs]] = {0: {}, 1: {}}
        """Measured seconds over the table's: by kind of pass, then as `passes`.  A table that was timed beside other
        work is wrong at single sizes, so one factor for all of them would keep what is wrong between them."""
        self.single: dict[tuple[Costs, int], float] = {}
        """Sizes timed once, which do not count yet: one of one may be an outlier."""

    def todo(self, live: int) -> list[int]:
        """Depths still to be tried with so many slots."""
        key = (live - 1).bit_length()
        if key not in self.drafts:
            tries = [self.limit, 0, (self.limit + 1) // 2, 1] if self.rates is None else [self.limit, 1]
            # a depth that is not drafted any more keeps its seconds: the others say nothing of it
            self.drafts[key], self.passes[key] = Costs(tries, age=float("inf")), Costs([])
        return self.drafts[key].todo

    def add(self, size: StepSize, seconds: Sequence[tuple[float, float]], step: int) -> None:
        """Steps of this size took so long: (draft, the rest)."""
        live, asked, tokens, kind = size
        self.todo(live)
        key, nodes, (drafts, passes) = (live - 1).bit_length(), -(-tokens // live) - 1, zip(*seconds, strict=True)
        if asked:
            self._add(self.drafts[key], asked, drafts, step)
        if self.rates is None:
            self._add(self.passes[key], nodes, passes, step)
        else:
            usual = self.rates.seconds(live, tokens)
            scales = self.scales[kind].setdefault(key, Costs([]))
            self._add(scales, nodes, [each / usual for each in passes], step)

    def _add(self, costs: Costs, size: int, seconds: Sequence[float], step: int) -> None:
        if size not in costs.samples:
            if (costs, size) in self.single:
                seconds = [self.single.pop((costs, size)), *seconds]
            if len(seconds) < 2:
                self.single[costs, size] = seconds[0]
                return
        costs.add(size, seconds, step)

    def knows(self, live: int, depth: int) -> bool:
        """Whether drafts of this depth were timed."""
        return depth in self.drafts[(live - 1).bit_length()].samples

    def draft(self, live: int, depth: int) -> float:
        known = self._nearest(self.drafts, live)
        return known.at(depth) if known is not None else 0.0

    def verify(self, live: int, tokens: float, kind: int) -> float:
        """Of all but the draft, for a pass of so many tokens; nearly 0 before anything is known."""
        if self.rates is not None:
            return self._scale(live, tokens / live - 1, kind) * self.rates.seconds(live, tokens)
        known = self._nearest(self.passes, live)
        return known.at(tokens / live - 1) if known is not None else 1e-9

    def _scale(self, live: int, nodes: float, kind: int) -> float:
        """The factor of the nearest size that was timed: of this kind, else of the other."""
        known = self._nearest(self.scales[kind], live) or self._nearest(self.scales[1 - kind], live)
        if known is None:
            return 1.0
        return known.means[min(known.means, key=lambda other: abs(other - nodes))]

    def _nearest(self, costs: Mapping[int, Costs], live: int) -> Costs | None:
        """Those of the nearest number of slots that was timed."""
        key = (live - 1).bit_length()
        timed = [other for other, own in costs.items() if own.samples]
        return costs[min(timed, key=lambda other: abs(other - key))] if timed else None


def measured(
    target: Target, drafter: Drafter, slots: int, *, context: int = 32, repeats: int = 7, most_s: float = 20.0
) -> StepRates:
    """Time passes of this target: 1, 2, 4 ... `slots` slots, over the anchor alone and with up to all of the drafter's
    nodes.

    Every slot holds `context` random tokens.  Sizes are timed in turn, `repeats` rounds after one that warms up, fewer
    where they would take longer than most_s seconds, and the median counts.  Raises ConfigError for slots or repeats
    below 1.
    """
    if slots < 1 or repeats < 1:
        raise ConfigError(f"slots and repeats must be at least 1, got {slots} and {repeats}")
    widest = 1 if target.spec.mode == "off" else 1 + drafter.limit
    rows = [*(2**n for n in range(slots.bit_length()) if 2**n < slots), slots]
    sizes = [(row, width) for row in rows for width in sorted({*WIDTHS, widest}) if width <= widest]
    return StepRates(timed(target, drafter, sizes, context=context, repeats=repeats, most_s=most_s))


def timed(
    target: Target, drafter: Drafter, sizes: Sequence[tuple[int, int]], *, context: int, repeats: int, most_s: float
) -> dict[tuple[int, int], float]:  # fmt: skip
    """Median seconds of passes over (slots, tokens a slot), with what the drafter taps; as `measured` does it."""
    slots, widest = (max(each) for each in zip(*sizes, strict=True))
    context = max(1, min(context, target.spec.context - widest - 1))
    noise = torch.Generator().manual_seed(0)
    text = torch.randint(target.spec.vocabulary, (slots, context + widest), generator=noise).to(target.device)
    cache = target.allocate(slots, context + widest + 1)
    target.prefill(cache, range(slots), text[:, :context], [context] * slots, drafter.taps)
    found: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    began = time.perf_counter()
    for number in range(repeats + 1):
        for size in sizes:
            seconds = _pass_seconds(target, drafter, cache, text[: size[0], context : context + size[1]])
            if number:
                found[size].append(seconds)
        spent = time.perf_counter() - began
        if not number:
            log.info("timing %d sizes of pass, about %.1f s", len(sizes), min(spent * repeats, max(spent, most_s)))
        elif spent * (number + 2) / (number + 1) > most_s:
            break
    return {size: statistics.median(each) for size, each in found.items()}


def _pass_seconds(target: Target, drafter: Drafter, cache: Any, tokens: torch.Tensor) -> float:
    """Of verifying the chains tokens[:, 1:] after the anchors tokens[:, 0], [R, n]; nothing stays in the cache."""
    slots, width = tokens.shape
    nothing = Draft.empty(slots, target.device)
    draft = Draft.chain(tokens[:, 1:], torch.full((slots,), width - 1)) if width > 1 else nothing
    began = time.perf_counter()
    scores = target.verify(cache, range(slots), tokens[:, 0], draft, drafter.taps)
    float(scores.logits.flatten()[0])  # waits for a GPU
    return time.perf_counter() - began
