"""Intervals from resampled prompts.  A prompt is the unit that is drawn: its steps hang together, prompts do not.  No torch.

All intervals are percentile bootstraps with a seed, so the same numbers give the same interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DRAWS = 10_000


class Interval(NamedTuple):
    """A figure and where it lies: [low, high] holds it with the level's chance."""

    center: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        """Whether a ratio differs from 1."""
        return self.low > 1 or self.high < 1


def resampled(
    values: Sequence[Any] | Floats, statistic: Callable[[Floats], Floats], draws: int = DRAWS, seed: int = 0
) -> Floats:
    """`statistic` of every bootstrap draw.  values [P] or [P, K]; statistic takes [draws, P(, K)] and gives [draws]."""
    table = np.asarray(values, dtype=np.float64)
    if len(table) == 0:
        raise ValueError("nothing to resample")
    noise = np.random.default_rng(seed)
    # in pieces: 10,000 draws of 1,000 prompts are 80 MB a column
    piece = max(1, 2_000_000 // len(table))
    counts = [min(piece, draws - start) for start in range(0, draws, piece)]
    return np.concatenate([statistic(table[noise.integers(0, len(table), (count, len(table)))]) for count in counts])


def interval_of(drawn: Floats, center: float, level: float = 0.95) -> Interval:
    """The middle `level` of what was drawn."""
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(center), float(low), float(high))


def mean(values: Sequence[float], level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> Interval:
    drawn = resampled(values, lambda table: table.mean(axis=1), draws, seed)
    return interval_of(drawn, float(np.mean(values)), level)


def geometric_mean(ratios: Sequence[float], level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Of ratios above 0, one a prompt."""
    logs = mean([float(value) for value in np.log(ratios)], level, draws, seed)
    return Interval(*(float(np.exp(value)) for value in logs))


def ratio_of_totals(
    above: Sequence[float], below: Sequence[float], level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """sum(above) / sum(below) over prompts, such as tokens over steps."""
    table = np.stack([np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)], axis=1)

    def ratio(drawn: Floats) -> Floats:
        sums = drawn.sum(axis=1)
        result: Floats = sums[:, 0] / sums[:, 1]
        return result

    totals = table.sum(axis=0)
    return interval_of(resampled(table, ratio, draws, seed), float(totals[0] / totals[1]), level)
