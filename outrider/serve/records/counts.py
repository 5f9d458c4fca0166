"""The layout of the engine's list of counts, and the figures computed from a copy of it."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

READING_S = 1.0
"""Seconds between two copies of the counts."""
NOW_S, RECENT_S, LATENCY_S = 5.0, 60.0, 300.0
"""Periods of the live page: of rates and shares of time, of acceptance, and of latencies."""
HISTORY_S = 120
DEEPEST = 128
"""Deeper positions of a draft are counted at this one."""
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
)  # fmt: skip
"""Upper limits of the Prometheus buckets, in seconds."""
EDGES = tuple(sorted({*BUCKETS, *(1e-4 * 10 ** (i / 20) for i in range(141))}))
"""Upper limits of the page's finer buckets, 0.1 ms to 1000 s: quantiles are exact to 6 %."""

# Indices of the list of counts.
(
    STEPS, PASSES, GENERATED, DRAFTS, DRAFTED, ACCEPTED, PROMPT, QUERIED, CACHED, READ, DRAFT_S, VERIFY_S, OTHER_S,
    READ_S,
) = range(14)  # fmt: skip
WIDTH = len(EDGES) + 2
"""Size of a histogram: its buckets, the overflow bucket, the sum."""
ACCEPTED_BY = READ_S + 1
REACHED_BY = ACCEPTED_BY + DEEPEST + 1
FIRST, GAP, PER_TOKEN, WHOLE, QUEUED = range(REACHED_BY + DEEPEST + 1, REACHED_BY + DEEPEST + 1 + 5 * WIDTH, WIDTH)
SIZE = QUEUED + WIDTH
PARTS = (("draft", DRAFT_S), ("verify", VERIFY_S), ("other", OTHER_S), ("prompts", READ_S))


def reading_at(
    readings: Sequence[tuple[float, list[Any]]], at: float, counts: Sequence[Any]
) -> tuple[float, Sequence[Any]]:
    """A time at most a second before `at`, and the counts at that time.

    The first step that is a second or more after a reading makes the next reading before it is counted.  So from one
    second after a reading until the next, the counts equal those of the next reading.
    """
    place = bisect_right(readings, at, key=lambda reading: reading[0]) - 1
    if place < 0:
        return readings[0]
    made, counts_then = readings[place]
    if at - made < READING_S:
        return made, counts_then
    return at, readings[place + 1][1] if place + 1 < len(readings) else counts


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear interpolation of these points at `at`, constant outside them."""
    place = bisect_right(points, at, key=lambda point: point[0])
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (at - left) / (right - left)


def num_reaching(counts: Sequence[Any], place: int) -> list[int]:
    """[k]: how many drafts have a depth of at least k + 1."""
    return list(itertools.accumulate(reversed(counts[place + 1 : place + DEEPEST + 1])))[::-1]


def deepest(counts: Sequence[Any]) -> int:
    """Depth of the deepest draft."""
    return sum(count > 0 for count in num_reaching(counts, REACHED_BY))


def by_depth(counts: Sequence[Any]) -> list[float]:
    """[k]: of the drafts that reach depth k + 1, the share whose token at that depth was accepted."""
    columns = zip(num_reaching(counts, ACCEPTED_BY), num_reaching(counts, REACHED_BY), strict=True)
    return [round(min(1.0, accepted / reached), 4) for accepted, reached in columns if reached > 0]


def buckets(counts: Sequence[Any], place: int) -> tuple[list[tuple[str, float]], float]:
    """Cumulative Prometheus buckets of a histogram, and the sum."""
    below = list(itertools.accumulate(counts[place : place + WIDTH - 1]))
    limits = [(str(limit), below[bisect_left(EDGES, limit)]) for limit in BUCKETS]
    return [*limits, ("+Inf", below[-1])], counts[place + WIDTH - 1]


def quantiles(counts: Sequence[Any], place: int) -> dict[str, float | int | None]:
    """Median and 99th percentile in seconds, in the middle of their bucket; None without observations."""
    below = list(itertools.accumulate(counts[place : place + WIDTH - 1]))
    figures: dict[str, float | int | None] = {"count": below[-1], "p50": None, "p99": None}
    for name, share in (("p50", 0.5), ("p99", 0.99)) if below[-1] else ():
        bucket = min(bisect_left(below, share * below[-1]), len(EDGES) - 1)
        figures[name] = round(math.sqrt(EDGES[max(bucket - 1, 0)] * EDGES[bucket]), 6)
    return figures


def share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def is_speculating(counts: Sequence[Any]) -> bool | None:
    """Whether any step had a draft; None without steps."""
    return counts[DRAFTS] > 0 if counts[STEPS] else None


def shares_of_time(counts: Sequence[Any], seconds: float) -> dict[str, float]:
    busy = {part: counts[place] for part, place in PARTS}
    whole = max(seconds, sum(busy.values()))
    shares = {part: round(spent / whole, 4) for part, spent in busy.items()}
    return shares | {"idle": round(max(0.0, 1 - sum(shares.values())), 4)}
