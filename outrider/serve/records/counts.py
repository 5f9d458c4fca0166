"""The list of what the engine counts: the place of each number, and what is read out of a copy of the list."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

READING_S = 1.0
"""Seconds between two copies of the counts."""
NOW_S, RECENT_S, LATENCY_S = 5.0, 60.0, 300.0
"""The page's periods: of rates and shares of time, of acceptance, of latencies."""
HISTORY_S = 120
DEEPEST = 128
"""Tokens accepted after this many of one draft count as the last of these."""
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
)  # fmt: skip
"""Upper limits of Prometheus' buckets, seconds."""
EDGES = tuple(sorted({*BUCKETS, *(1e-4 * 10 ** (i / 20) for i in range(141))}))
"""Upper limits of our own, 0.1 ms to 1000 s: a quantile is exact to 6 %."""

# Places in the list of counts.
(
    STEPS, PASSES, GENERATED, DRAFTS, DRAFTED, ACCEPTED, PROMPT, QUERIED, CACHED, READ, DRAFT_S, VERIFY_S, OTHER_S,
    READ_S,
) = range(14)  # fmt: skip
WIDTH = len(EDGES) + 2
"""Of a histogram: its buckets, what lies beyond, the sum."""
ACCEPTED_BY = READ_S + 1
REACHED_BY = ACCEPTED_BY + DEEPEST + 1
FIRST, GAP, PER_TOKEN, WHOLE, QUEUED = range(REACHED_BY + DEEPEST + 1, REACHED_BY + DEEPEST + 1 + 5 * WIDTH, WIDTH)
SIZE = QUEUED + WIDTH
PARTS = (("draft", DRAFT_S), ("verify", VERIFY_S), ("other", OTHER_S), ("prompts", READ_S))


def reading_at(
    readings: Sequence[tuple[float, list[Any]]], at: float, counts: Sequence[Any]
) -> tuple[float, Sequence[Any]]:
    """When a reading was made that holds for `at`, up to a second earlier, and its counts.

    The first step a second or more after a reading makes the next one before it counts itself.  So a second after a
    reading, and until the next one, the counts are as the next one found them.
    """
    place = bisect_right(readings, at, key=lambda reading: reading[0]) - 1
    if place < 0:
        return readings[0]
    made, counts_then = readings[place]
    if at - made < READING_S:
        return made, counts_then
    return at, readings[place + 1][1] if place + 1 < len(readings) else counts


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at` on the line through these points, level outside them."""
    place = bisect_right(points, at, key=lambda point: point[0])
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (at - left) / (right - left)


def num_reaching(counts: Sequence[Any], place: int) -> list[int]:
    """[k]: how many had k + 1 or more."""
    return list(itertools.accumulate(reversed(counts[place + 1 : place + DEEPEST + 1])))[::-1]


def deepest(counts: Sequence[Any]) -> int:
    """Depth of the deepest draft."""
    return sum(count > 0 for count in num_reaching(counts, REACHED_BY))


def by_depth(counts: Sequence[Any]) -> list[float]:
    """[k]: of the drafts that reach depth k + 1, the share whose token there was accepted."""
    columns = zip(num_reaching(counts, ACCEPTED_BY), num_reaching(counts, REACHED_BY), strict=True)
    return [round(min(1.0, accepted / reached), 4) for accepted, reached in columns if reached > 0]


def buckets(counts: Sequence[Any], place: int) -> tuple[list[tuple[str, float]], float]:
    """Prometheus' buckets of a histogram, each with all below it, and the sum."""
    below = list(itertools.accumulate(counts[place : place + WIDTH - 1]))
    limits = [(str(limit), below[bisect_left(EDGES, limit)]) for limit in BUCKETS]
    return [*limits, ("+Inf", below[-1])], counts[place + WIDTH - 1]


def quantiles(counts: Sequence[Any], place: int) -> dict[str, float | int | None]:
    """Seconds that half, and 99 of 100, take at most, in the middle of their bucket; None where there are none."""
    below = list(itertools.accumulate(counts[place : place + WIDTH - 1]))
    figures: dict[str, float | int | None] = {"count": below[-1], "p50": None, "p99": None}
    for name, share in (("p50", 0.5), ("p99", 0.99)) if below[-1] else ():
        bucket = min(bisect_left(below, share * below[-1]), len(EDGES) - 1)
        figures[name] = round(math.sqrt(EDGES[max(bucket - 1, 0)] * EDGES[bucket]), 6)
    return figures


def share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def is_speculating(counts: Sequence[Any]) -> bool | None:
    """Whether any step had a draft; None where there was no step."""
    return counts[DRAFTS] > 0 if counts[STEPS] else None


def shares_of_time(counts: Sequence[Any], seconds: float) -> dict[str, float]:
    busy = {part: counts[place] for part, place in PARTS}
    whole = max(seconds, sum(busy.values()))
    shares = {part: round(spent / whole, 4) for part, spent in busy.items()}
    return shares | {"idle": round(max(0.0, 1 - sum(shares.values())), 4)}
