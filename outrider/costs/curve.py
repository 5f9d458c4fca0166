"""Seconds by size, from samples that are noisy and become outdated."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise


class Curve:
    """Seconds of a step at one batch size, by depth: trimmed means of recent samples, made monotone in depth."""

    WINDOW, AGE = 32, 512
    """Maximum number of samples per depth; steps after which samples are dropped if other depths have newer ones."""

    def __init__(self, untried: list[int], age: float = AGE):
        self.age = age
        self.untried = [*untried[:1], *(depth for depth in dict.fromkeys(untried) for _ in range(2 if depth else 3))]
        """Depths still to be tried, each twice since one sample may be an outlier.  The very first step is not counted,
        nor the first plain step after a draft, so the first depth and depth 0 are tried once more."""
        self.samples: dict[int, deque[tuple[int, float]]] = {}
        """By depth: step and seconds."""
        self.means: dict[int, float] = {}
        self.earlier: dict[int, float] = {}
        """Seconds by depth from an earlier process, used for depths without samples, scaled by the median change."""
        self.points = rising([])
        """(depth, seconds), both non-decreasing."""

    @classmethod
    def of(cls, earlier: Mapping[int, float], age: float = AGE) -> Curve:
        """A curve with these seconds by depth from an earlier process; no depth is left to be tried."""
        curve = cls([], age)
        curve.earlier = dict(earlier)
        curve._rise()
        return curve

    @property
    def has_seconds(self) -> bool:
        return bool(self.samples or self.earlier)

    def add(self, depth: int, seconds: Sequence[float], step: int) -> None:
        if not seconds:
            return
        self.samples.setdefault(depth, deque(maxlen=self.WINDOW)).extend((step, each) for each in seconds)
        stale = [other for other, samples in self.samples.items() if other and samples[-1][0] < step - self.age]
        for other in stale if depth else ():
            del self.samples[other], self.means[other]
        self.means[depth] = self.mean(depth)
        self._rise()

    def _rise(self) -> None:
        changes = [mean / self.earlier[depth] for depth, mean in self.means.items() if depth in self.earlier]
        change = statistics.median(changes) if changes else 1.0
        weighted = {depth: (change * seconds, 1) for depth, seconds in self.earlier.items()}
        weighted |= {depth: (mean, len(self.samples[depth])) for depth, mean in self.means.items()}
        self.points = rising([(depth, *weighted[depth]) for depth in sorted(weighted)])

    def shift(self, depth: int, seconds: Sequence[float]) -> None:
        """Rescale all samples if these seconds are less than half or more than twice the mean: conditions have changed.

        A single slow sample may be an outlier; a fast one is not.
        """
        before = self.means.get(depth, 0.0)
        if not before or not (max(seconds) < before / 2 or (len(seconds) > 1 and min(seconds) > 2 * before)):
            return
        ratio = min(seconds) / before
        for other, samples in self.samples.items():
            self.samples[other] = deque(((step, ratio * each) for step, each in samples), maxlen=self.WINDOW)
            self.means[other] *= ratio

    def mean(self, depth: int) -> float:
        ordered = sorted(seconds for _, seconds in self.samples[depth])
        trim = len(ordered) // 8  # outliers are slow, so one more is cut at the slow end
        left = ordered[trim : max(1, len(ordered) - trim - 1)]
        return sum(left) / len(left)

    def at(self, depth: float) -> float:
        """Linear between measured depths, extrapolated with the slope of the whole curve; nearly 0 before the first
        measurement."""
        (first, low), (last, high) = self.points[0], self.points[-1]
        if depth >= last:
            return high + (high - low) / max(1, last - first) * (depth - last)
        for (left, less), (right, more) in pairwise(self.points):
            if left <= depth < right:
                return less + (more - less) * (depth - left) / (right - left)
        return low


def rising(points: list[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """Isotonic regression (pool adjacent violators).  points: (depth, seconds, weight), ordered by depth."""
    pools: list[tuple[float, int, list[int]]] = []
    for depth, seconds, weight in points or [(0, 1e-9, 1)]:
        depths = [depth]
        while pools and pools[-1][0] > seconds:
            before, heavy, others = pools.pop()
            seconds = (before * heavy + seconds * weight) / (heavy + weight)
            weight, depths = heavy + weight, others + depths
        pools.append((seconds, weight, depths))
    return [(depth, seconds) for seconds, _, depths in pools for depth in depths]
