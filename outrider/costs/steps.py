"""Seconds of whole steps: the draft by its nodes, the rest by slots and tokens, corrected while decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.costs.curve import Curve
from outrider.costs.passes import PassSeconds
from outrider.costs.stored import NO_SECONDS, RunnerSeconds

FIRST = 8
"""Maximum number of nodes of the first draft to try; deeper drafts follow if its times suggest that they pay."""


class StepSize(NamedTuple):
    """What the seconds of a step depend on."""

    live: int
    requested: int
    """Nodes requested from the drafter."""
    tokens: int
    """Tokens in the pass, including anchors and padding."""
    kind: int
    """0 for a pass over anchors only, 1 for one that verifies drafts."""


class StepCosts:
    """Seconds of a step: its draft by requested nodes, the rest by slots and tokens of its pass."""

    def __init__(self, limit: int, table: PassSeconds | None, earlier: RunnerSeconds = NO_SECONDS):
        """earlier: times of an earlier process; they replace the table."""
        if earlier.passes:
            table = PassSeconds(earlier.passes)
        self.limit, self.table = limit, table
        self.tabled = {_key(slots) for slots, _ in earlier.passes}
        """Numbers of slots, in bits (see `_key`), that an earlier process measured."""
        self.drafts = {
            key: Curve.of({n: each for (slots, n), each in earlier.drafts.items() if _key(slots) == key}, float("inf"))
            for key in {_key(slots) for slots, _ in earlier.drafts}
        }
        """By number of live slots in bits, as everywhere in this class."""
        self.passes: dict[int, Curve] = {}
        """Without a table: the rest of the step, by nodes per slot in the pass."""
        self.scales: dict[int, dict[int, Curve]] = {0: {}, 1: {}}
        """Measured seconds / the table's seconds, by kind of pass, then as `passes`.  Not one factor for all sizes: a
        table timed under load can be wrong at single sizes."""
        self.single: dict[tuple[Curve, int], float] = {}
        """Sizes timed only once so far; they do not count yet, since a single sample may be an outlier."""

    def untried(self, live: int) -> list[int]:
        """Depths still to be tried with this many live slots."""
        key = _key(live)
        if key not in self.drafts:
            is_timed = self.table is not None and (not self.tabled or key in self.tabled)
            first = min(self.limit, FIRST)
            tries = [first, 1] if is_timed else [first, 0, (first + 1) // 2, 1]
            # depths that are no longer drafted keep their seconds; `shift` rescales all together
            self.drafts[key] = Curve(tries, age=float("inf"))
        return self.drafts[key].untried

    @property
    def seconds(self) -> RunnerSeconds:
        """Everything measured, for the next process."""
        drafts = {
            (2**key, n): each
            for key, curve in self.drafts.items()
            for n, each in curve.points
            if curve.has_seconds and n
        }
        if self.table is None:
            timed = {key: curve for key, curve in self.passes.items() if curve.samples}
            return RunnerSeconds(
                {(2**key, 1 + n): each for key, curve in timed.items() for n, each in curve.points}, drafts
            )
        sizes = {(slots, int(width)) for slots, (widths, _) in self.table.curves.items() for width in widths}
        for by_slots in self.scales.values():
            sizes |= {(2**key, 1 + n) for key, scales in by_slots.items() for n in scales.means}
        passes = {size: self.verify(size[0], math.prod(size), min(1, size[1] - 1)) for size in sizes}
        return RunnerSeconds(passes, drafts)

    def add(self, size: StepSize, seconds: Sequence[tuple[float, float]], step: int) -> None:
        """Add seconds of steps of this size, each (draft, the rest)."""
        live, requested, tokens, kind = size
        self.untried(live)
        key, nodes = _key(live), -(-tokens // live) - 1
        drafts, passes = zip(*seconds, strict=True)
        if requested:
            self.drafts[key].shift(requested, drafts)
            self._add(self.drafts[key], requested, drafts, step)
        if self.table is None:
            self._add(self.passes.setdefault(key, Curve([])), nodes, passes, step)
        else:
            usual = self.table.seconds(live, tokens)
            scales = self.scales[kind].setdefault(key, Curve([]))
            self._add(scales, nodes, [each / usual for each in passes], step)

    def _add(self, costs: Curve, size: int, seconds: Sequence[float], step: int) -> None:
        if size not in costs.samples:
            if (costs, size) in self.single:
                seconds = [self.single.pop((costs, size)), *seconds]
            if len(seconds) < 2:
                self.single[costs, size] = seconds[0]
                return
        costs.add(size, seconds, step)

    def knows(self, live: int, depth: int) -> bool:
        """Whether drafts of this depth have been timed."""
        return depth in self.drafts[_key(live)].samples

    def draft(self, live: int, depth: int) -> float:
        """Seconds of a draft of `depth` requested nodes; 0 before any was timed."""
        curve = self._nearest(self.drafts, live)
        return curve.at(depth) if curve is not None else 0.0

    def verify(self, live: int, tokens: float, kind: int) -> float:
        """Seconds of the rest of a step with this many tokens in its pass; nearly 0 before any was timed."""
        if self.table is not None:
            return self._scale(live, tokens / live - 1, kind) * self.table.seconds(live, tokens)
        curve = self._nearest(self.passes, live)
        return curve.at(tokens / live - 1) if curve is not None else 1e-9

    def _scale(self, live: int, nodes: float, kind: int) -> float:
        """The factor of the nearest timed size, of this kind of pass if there is any."""
        curve = self._nearest(self.scales[kind], live) or self._nearest(self.scales[1 - kind], live)
        if curve is None:
            return 1.0
        return curve.means[min(curve.means, key=lambda other: abs(other - nodes))]

    def _nearest(self, costs: Mapping[int, Curve], live: int) -> Curve | None:
        """The curve of the nearest timed number of slots."""
        key = _key(live)
        timed = [other for other, curve in costs.items() if curve.has_seconds]
        return costs[min(timed, key=lambda other: abs(other - key))] if timed else None


def _key(live: int) -> int:
    """Number of live slots in bits."""
    return (live - 1).bit_length()
