"""Bootstrap intervals over prompts.  No torch.

Prompts are resampled, not steps: the steps of a prompt are correlated, while prompts are independent.  All intervals
are percentile bootstraps with a seed, so the same numbers give the same interval.  With few prompts and small
probabilities, as in a gate, plain percentiles are too narrow: `Estimate` expands them to Student's t (Hesterberg, What
Teachers Should Know About the Bootstrap, 2015), and `holm` controls the false-alarm probability of many tests (Holm,
1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

Floats = NDArray[np.float64]
DRAWS = 10_000
MIN_PROMPTS = 5
"""Minimum number of prompts for an interval; resampling fewer would be misleading."""
FEWEST_BEYOND = 20
"""Number of draws beyond a quantile that make it reliable; farther out, the tail is extrapolated as normal."""


class Interval(NamedTuple):
    """A figure with its confidence interval [low, high]."""

    center: float
    low: float
    high: float


def resampled(
    values: Sequence[Any] | Floats, statistic: Callable[[Floats], Floats], draws: int = DRAWS, seed: int = 0
) -> Floats:
    """`statistic` of every bootstrap draw.  values [P] or [P, K]; statistic maps [draws, P(, K)] to [draws]."""
    table = np.asarray(values, dtype=np.float64)
    if len(table) == 0:
        raise ValueError("nothing to resample")
    return np.concatenate([statistic(table[taken]) for taken in _taken(len(table), draws, seed)])


def interval_of(drawn: Floats, center: float, level: float = 0.95) -> Interval:
    """The middle `level` of the draws."""
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(center), float(low), float(high))


def mean(values: Sequence[float], level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> Interval:
    drawn = resampled(values, lambda table: table.mean(axis=1), draws, seed)
    return interval_of(drawn, float(np.mean(values)), level)


def geometric_mean(ratios: Sequence[float], level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> Interval:
    """The geometric mean of positive ratios, one per prompt, with its interval."""
    logs = mean([float(value) for value in np.log(ratios)], level, draws, seed)
    return Interval(*(float(np.exp(value)) for value in logs))


def ratio_of_totals(
    above: Sequence[float], below: Sequence[float], level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """sum(above) / sum(below) over prompts, such as tokens over steps."""
    table = np.stack([np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)], axis=1)

    def ratio(drawn: Floats) -> Floats:
        sums = drawn.sum(axis=-2)
        result: Floats = sums[..., 0] / sums[..., 1]
        return result

    return interval_of(resampled(table, ratio, draws, seed), float(ratio(table)), level)


def ratio_of_rates(
    values: Sequence[Sequence[float]], level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """One rate over another, each a ratio of totals over the same prompts, such as a speed-up in tokens per second.

    values [P, 4]: amount and time of the first, amount and time of the second.
    """
    table = np.asarray(values, dtype=np.float64)
    return interval_of(resampled(table, rate_ratio, draws, seed), float(rate_ratio(table)), level)


def rate_ratio(values: Floats) -> Floats:
    """(sum of column 0 / column 1) / (column 2 / column 3).  values [..., P, 4]; returns [...]."""
    sums = values.sum(axis=-2)
    ratio: Floats = sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2]
    return ratio


# ── tests that share one false-alarm probability ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A figure and the spread of its draws: a share Φ(z) of them lies below center + `deviation(z)`."""

    center: float
    deviation: Callable[[float], float]
    freedom: float = math.inf
    """Degrees of freedom of Student's t."""
    widening: float = 1.0
    """Factor on all deviations, for noise that the draws don't show."""

    def bound(self, tail: float) -> float:
        """The bound below which the figure lies with probability `tail`; a tail above 1/2 gives an upper bound."""
        return self.center + self.widening * self.deviation(student(tail, self.freedom))

    def interval(self, tail: float) -> Interval:
        """The interval with probability `tail` beyond either end."""
        return Interval(self.center, self.bound(tail), self.bound(1 - tail))

    def chance_of(self, value: float) -> float:
        """The p-value of a figure below `value`: the smallest tail whose upper bound is below it."""
        if self.center >= value:
            return 1.0
        smallest, largest = 1e-12, 0.5
        if self.bound(1 - smallest) < value:
            return smallest
        for _ in range(50):
            middle = math.sqrt(smallest * largest)
            smallest, largest = (smallest, middle) if self.bound(1 - middle) < value else (middle, largest)
        return largest


def estimate_of(center: float, drawn: Floats, prompts: int, strata: int = 1) -> Estimate:
    """Estimate from draws within strata, of `prompts` in total.  Each stratum costs one degree of freedom."""
    ordered = np.sort(drawn)
    freedom = max(1, prompts - strata)
    expansion = math.sqrt(prompts / freedom)
    edge = -float(ndtri(min(0.25, FEWEST_BEYOND / len(ordered))))

    def deviation(z: float) -> float:
        z *= expansion
        inside = max(-edge, min(edge, z))
        position = float(ndtr(inside)) * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        distance = float(ordered[low]) + (position - low) * float(ordered[high] - ordered[low]) - center
        return distance if inside == z else distance * z / inside

    return Estimate(center, deviation, freedom)


def normal(center: float, error: float, freedom: float = math.inf) -> Estimate:
    """The estimate of a normal distribution with this standard error."""
    return Estimate(center, lambda z: z * error, freedom)


def student(tail: float, freedom: float) -> float:
    """The quantile of Student's t; of a normal distribution for infinite degrees of freedom."""
    return float(ndtri(tail) if math.isinf(freedom) else stdtrit(freedom, tail))


def holm(chances: Sequence[float], tail: float) -> list[float]:
    """The tail that each of several tests may use, so that together they raise a false alarm with probability at most
    `tail`.

    The smallest p-value must pass tail / count, the next tail / (count - 1), and so on; after the first failure, all
    others use the same tail.
    """
    allowed = [0.0] * len(chances)
    has_failed, at = False, 0.0
    for rank, which in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        at = at if has_failed else tail / (len(chances) - rank)
        has_failed = has_failed or chances[which] > at
        allowed[which] = at
    return allowed


def sums(table: Floats, draws: int = DRAWS, seed: int = 0) -> Floats:
    """Column sums of every draw of the rows.  table [P, K].  Returns [draws, K]."""
    return np.concatenate([_times(taken, len(table)) @ table for taken in _taken(len(table), draws, seed)])


def _times(taken: NDArray[np.int64], prompts: int) -> Floats:
    """How often each draw contains each prompt, [draws, prompts]: counting once is cheaper than gathering columns."""
    positions = taken + prompts * np.arange(len(taken))[:, None]
    return np.bincount(positions.ravel(), minlength=taken.size).reshape(taken.shape).astype(np.float64)


def _taken(prompts: int, draws: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Which prompts each draw contains, [some draws, prompts] at a time: 10,000 draws of 1,000 prompts take 80 MB."""
    noise = np.random.default_rng(seed)
    piece = max(1, 2_000_000 // prompts)
    for start in range(0, draws, piece):
        yield noise.integers(0, prompts, (min(piece, draws - start), prompts))
