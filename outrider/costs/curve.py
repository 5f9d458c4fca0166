"""Seconds by size, learnt from samples that are noisy and grow old."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise


class Curve:
    """Seconds of a step at one batch size, by depth: trimmed means of recent samples, made to rise with depth."""

    WINDOW, AGE = 32, 512
    """Most samples of a depth, and steps after which samples are too old where there are newer ones."""

    def __init__(self, todo: list[int], age: float = AGE):
        self.age = age
        self.todo = [*todo[:1], *(depth for depth in dict.fromkeys(todo) for _ in range(2 if depth else 3))]
        """Depths still to be tried: twice, since one of two samples may be an outlier, and the very first is not
        counted; depth 0 three times, since the first plain step after a draft is not counted either."""
        self.samples: dict[int, deque[tuple[int, float]]] = {}
        """By depth: step and seconds."""
        self.means: dict[int, float] = {}
        self.known: dict[int, float] = {}
        """Seconds by depth of another time, which count where there are no samples, times what all have changed by."""
        self.curve = rising([])
        """Depths and seconds, rising."""

    @classmethod
    def of(cls, known: Mapping[int, float], age: float = AGE) -> Curve:
        """With these seconds by depth, from another time; nothing is left to be tried."""
        curve = cls([], age)
        curve.known = dict(known)
        curve._rise()
        return curve

    @property
    def is_known(self) -> bool:
        return bool(self.samples or self.known)

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
        changes = [mean / self.known[depth] for depth, mean in self.means.items() if depth in self.known]
        change = statistics.median(changes) if changes else 1.0
        points = {depth: (change * seconds, 1) for depth, seconds in self.known.items()}
        points |= {depth: (mean, len(self.samples[depth])) for depth, mean in self.means.items()}
        self.curve = rising([(depth, *points[depth]) for depth in sorted(points)])

    def shift(self, depth: int, seconds: Sequence[float]) -> None:
        """Scale everything where what took so long now took twice as long before, or half: all has become another.

        One slow sample may be an outlier, one fast sample is none.
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
        trim = len(ordered) // 8  # outliers are slow, and one of few samples may be an outlier
        left = ordered[trim : max(1, len(ordered) - trim - 1)]
        return sum(left) / len(left)

    def at(self, depth: float) -> float:
        """Linear between measured depths, with the whole curve's slope beyond them; nearly 0 before the first
        measurement."""
        (first, low), (last, high) = self.curve[0], self.curve[-1]
        if depth >= last:
            return high + (high - low) / max(1, last - first) * (depth - last)
        for (left, less), (right, more) in pairwise(self.curve):
            if left <= depth < right:
                return less + (more - less) * (depth - left) / (right - left)
        return low


def rising(points: list[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """The nearest curve that never falls (pool adjacent violators).  points: depth, seconds and weight, by depth."""
    pools: list[tuple[float, int, list[int]]] = []
    for depth, seconds, weight in points or [(0, 1e-9, 1)]:
        depths = [depth]
        while pools and pools[-1][0] > seconds:
            before, heavy, others = pools.pop()
            seconds = (before * heavy + seconds * weight) / (heavy + weight)
            weight, depths = heavy + weight, others + depths
        pools.append((seconds, weight, depths))
    return [(depth, seconds) for seconds, _, depths in pools for depth in depths]
