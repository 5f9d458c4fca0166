"""Seconds of whole steps: of the draft by its nodes, of the rest by slots and tokens, corrected while decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.costs.curve import Curve
from outrider.costs.kept import NOTHING, Known
from outrider.costs.passes import PassSeconds

FIRST = 8
"""Most nodes of the first draft that is tried: deeper ones are drafted where these make them look worth it."""


class StepSize(NamedTuple):
    """What the seconds of a step depend on."""

    live: int
    asked: int
    """Nodes that the drafter was asked for."""
    tokens: int
    """Tokens in the pass, anchors and padding included."""
    kind: int
    """0 for a pass of anchors alone, 1 for one of drafts."""


class StepCosts:
    """Seconds of a step: of its draft, by nodes asked for, and of the rest, by slots and tokens of its pass."""

    def __init__(self, limit: int, table: PassSeconds | None, known: Known = NOTHING):
        """known: from an earlier process, which needs no table."""
        if known.passes:
            table = PassSeconds(known.passes)
        self.limit, self.table = limit, table
        self.tabled = {_key(slots) for slots, _ in known.passes}
        """Numbers of slots, in bits, that the table has from an earlier process."""
        self.drafts = {
            key: Curve.of({n: each for (slots, n), each in known.drafts.items() if _key(slots) == key}, float("inf"))
            for key in {_key(slots) for slots, _ in known.drafts}
        }
        """By the live slots' number in bits, as everywhere here."""
        self.passes: dict[int, Curve] = {}
        """The same by nodes a slot in the pass, where there is no table."""
        self.scales: dict[int, dict[int, Curve]] = {0: {}, 1: {}}
        """Measured seconds over the table's: by kind of pass, then as `passes`.  A table that was timed beside other
        work is wrong at single sizes, so one factor for all of them would keep what is wrong between them."""
        self.single: dict[tuple[Curve, int], float] = {}
        """Sizes timed once, which do not count yet: one of one may be an outlier."""

    def todo(self, live: int) -> list[int]:
        """Depths still to be tried with so many slots."""
        key = _key(live)
        if key not in self.drafts:
            is_timed = self.table is not None and (not self.tabled or key in self.tabled)
            first = min(self.limit, FIRST)
            tries = [first, 1] if is_timed else [first, 0, (first + 1) // 2, 1]
            # a depth that is not drafted any more keeps its seconds, but all change together
            self.drafts[key] = Curve(tries, age=float("inf"))
        return self.drafts[key].todo

    @property
    def known(self) -> Known:
        """All of this, for the next process."""
        drafts = {(2**key, n): each for key, own in self.drafts.items() for n, each in own.curve if own.is_known and n}
        if self.table is None:
            passes = {(2**key, 1 + n): each for key, own in self.passes.items() for n, each in own.curve if own.samples}
            return Known(passes, drafts)
        sizes = {(slots, int(width)) for slots, (widths, _) in self.table.curves.items() for width in widths}
        sizes |= {(2**key, 1 + n) for own in self.scales.values() for key, scales in own.items() for n in scales.means}
        return Known({size: self.verify(size[0], math.prod(size), min(1, size[1] - 1)) for size in sizes}, drafts)

    def add(self, size: StepSize, seconds: Sequence[tuple[float, float]], step: int) -> None:
        """Steps of this size took so long: (draft, the rest)."""
        live, asked, tokens, kind = size
        self.todo(live)
        key, nodes, (drafts, passes) = _key(live), -(-tokens // live) - 1, zip(*seconds, strict=True)
        if asked:
            self.drafts[key].shift(asked, drafts)
            self._add(self.drafts[key], asked, drafts, step)
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
        """Whether drafts of this depth were timed."""
        return depth in self.drafts[_key(live)].samples

    def draft(self, live: int, depth: int) -> float:
        known = self._nearest(self.drafts, live)
        return known.at(depth) if known is not None else 0.0

    def verify(self, live: int, tokens: float, kind: int) -> float:
        """Of all but the draft, for a pass of so many tokens; nearly 0 before anything is known."""
        if self.table is not None:
            return self._scale(live, tokens / live - 1, kind) * self.table.seconds(live, tokens)
        known = self._nearest(self.passes, live)
        return known.at(tokens / live - 1) if known is not None else 1e-9

    def _scale(self, live: int, nodes: float, kind: int) -> float:
        """The factor of the nearest size that was timed: of this kind, else of the other."""
        known = self._nearest(self.scales[kind], live) or self._nearest(self.scales[1 - kind], live)
        if known is None:
            return 1.0
        return known.means[min(known.means, key=lambda other: abs(other - nodes))]

    def _nearest(self, costs: Mapping[int, Curve], live: int) -> Curve | None:
        """Those of the nearest number of slots that was timed."""
        key = _key(live)
        timed = [other for other, own in costs.items() if own.is_known]
        return costs[min(timed, key=lambda other: abs(other - key))] if timed else None


def _key(live: int) -> int:
    """So many slots, in bits."""
    return (live - 1).bit_length()
