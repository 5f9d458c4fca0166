"""Measured costs, interpolated linearly in slots and depth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from outrider.plan.measured.timings import CHAINS, Cell, Key, Timings, nearest
from outrider.plan.predict import StepCost

MIN_ERROR = 0.1
"""Minimum relative error of a measured speed-up, acceptance aside."""


@dataclass(frozen=True)
class TimedCosts:
    """Costs of one target on this machine."""

    timings: Timings
    identities: Mapping[str, str]
    """By method: its identity in the timings."""

    @property
    def error(self) -> float:
        """A tenth, or the spread of drafted steps relative to plain ones if that is larger."""
        cells = [cell for key in self.identities.values() for cell in self.timings.drafts.get(key, {}).values()]
        return min(0.9, max(MIN_ERROR, median(cell.spread for cell in cells))) if cells else MIN_ERROR

    def plain(self, batch: float, context: float) -> float:
        return _between(self.timings.plain, batch, 0, context).seconds

    def drafted(self, method: str, batch: float, depth: int, offered: Sequence[float], context: float) -> StepCost:
        cell = _between(self.timings.drafts[self.identities[method]], batch, depth, context)
        if cell.drafted >= 1:  # all drafts had the same size, so shorter ones need no correction
            return StepCost(cell.draft_s, cell.verify_s, cell.other_s)
        return StepCost(cell.draft_s, self._verify(batch, offered[:depth] or [1.0] * depth, context), cell.other_s)

    def prompt(self, tokens: float) -> float:
        return tokens * self.timings.prompt_s

    def prompt_of(self, method: str, tokens: float) -> float:
        return tokens * self.timings.prompts.get(self.identities[method], 0.0)

    def _verify(self, batch: float, offered: Sequence[float], context: float) -> float:
        """Seconds of a pass padded to its widest slot, if a share offered[k] of the slots draft k + 1 nodes or more."""
        cells = self.timings.plain | self.timings.drafts[CHAINS]
        wider = [1.0, *(1 - (1 - min(1.0, share)) ** batch for share in offered), 0.0]
        seconds = [_between(cells, batch, depth, context).verify_s for depth in range(len(wider) - 1)]
        return sum((more - less) * each for (more, less), each in zip(pairwise(wider), seconds, strict=True))


def _between(cells: Mapping[Key, Cell], batch: float, depth: int, context: float) -> Cell:
    """The cell of this size, interpolated between the nearest measured ones."""
    near = nearest(context, {key[2] for key in cells})
    slots = sorted({key[0] for key in cells if key[2] == near})
    return _line([(count, _at_depth(cells, count, depth, near)) for count in slots], batch, extrapolates=True)


def _at_depth(cells: Mapping[Key, Cell], slots: int, depth: int, context: int) -> Cell:
    return _line(sorted((key[1], cell) for key, cell in cells.items() if (key[0], key[2]) == (slots, context)), depth)


def _line(points: Sequence[tuple[int, Cell]], at: float, extrapolates: bool = False) -> Cell:
    """Interpolate between points; below them take the first, above them extrapolate the last segment, which never
    falls."""
    positions = [position for position, _ in points]
    right = min(bisect_left(positions, at), len(positions) - 1)
    left = max(0, right - 1)
    beyond = at > positions[right]
    if positions[right] == at or left == right or (beyond and not extrapolates):
        return points[right][1]
    share = (at - positions[left]) / (positions[right] - positions[left])
    if share < 0:
        return points[left][1]
    cell = [a + (b - a) * share for a, b in zip(points[left][1], points[right][1], strict=True)]
    return Cell(*(map(max, cell, points[right][1]) if beyond else cell))
