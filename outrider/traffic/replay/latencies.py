"""Counts and latencies of one server's calls, without texts.  No torch.

Times are in seconds; `Answer` defines TTFT, TPOT and E2E.  Gaps between the pieces of an answer are also reported,
since a step that accepts several tokens sends them in one piece.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outrider.report import bootstrap
from outrider.report.bootstrap import Interval
from outrider.traffic.replay.answer import Answer
from outrider.traffic.replay.comparison import TextComparison

Table = np.ndarray[Any, np.dtype[Any]]
BLOCKS = 500
"""Pairs are resampled in at most this many blocks of consecutive calls: a million individual draws would take an hour.
"""

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
IN_JSON = (
    "url", "model", "sent", "answered", "failed", "cut_off", "first_messages", "retried", "attempts", "seconds",
    "answers_per_s", "tokens", "tokens_per_s", "ttft_s", "tpot_s", "gap_s", "e2e_s", "goodput_per_s", "within_limits",
    "acceptance", "reported_acceptance",
)  # fmt: skip


class Spread(NamedTuple):
    """Mean and percentiles of `samples` values."""

    mean: float
    p50: float
    p95: float
    p99: float
    most: float
    samples: int


def spread(values: Sequence[float] | Table) -> Spread | None:
    if not len(values):
        return None
    table = np.asarray(values, dtype=np.float64)
    middle, high, higher = (float(value) for value in np.quantile(table, [0.5, 0.95, 0.99]))
    return Spread(float(table.mean()), middle, high, higher, float(table.max()), len(table))


class Gaps:
    """Gaps between pieces, counted in bins 1 % apart, since there are hundreds per call: memory stays constant."""

    SHORTEST_S = 1e-6
    STEP = math.log(1.01)

    def __init__(self) -> None:
        self.counts = array("q", bytes(8 * 2600))
        self.total_s = self.most_s = 0.0

    def take(self, seconds: float) -> None:
        at = int(math.log(seconds / self.SHORTEST_S) / self.STEP) + 1 if seconds > self.SHORTEST_S else 0
        self.counts[min(at, len(self.counts) - 1)] += 1
        self.total_s += seconds
        self.most_s = max(self.most_s, seconds)

    def spread(self) -> Spread | None:
        """Percentiles, accurate to 1 %."""
        sums = np.cumsum(np.frombuffer(self.counts, dtype=np.int64))
        count = int(sums[-1])
        if not count:
            return None
        bins = [int(np.searchsorted(sums, share * count)) for share in (0.5, 0.95, 0.99)]
        p50, p95, p99 = (
            min(self.SHORTEST_S * math.exp((at - 0.5) * self.STEP) if at else 0.0, self.most_s) for at in bins
        )
        return Spread(self.total_s / count, p50, p95, p99, self.most_s, count)


@dataclass
class Endpoint:
    """Results of one server: counts during the replay, and figures derived from them at the end."""

    url: str
    model: str | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    sent: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By reason; no text arrived."""
    cut_off: Counter[str] = field(default_factory=Counter)
    """By reason; a part of the answer arrived."""
    first_messages: dict[str, str] = field(default_factory=dict)
    """By reason: the message of the first such call."""
    retried: int = 0
    """Calls that were sent more than once."""
    attempts: int = 0
    seconds: float = 0.0
    """Seconds from the start of the replay to the end of the last answer."""
    answers_per_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    ttft_s: Spread | None = None
    tpot_s: Spread | None = None
    gap_s: Spread | None = None
    e2e_s: Spread | None = None
    goodput_per_s: float | None = None
    """Answers per second within all limits, over the duration of the timed calls."""
    within_limits: int | None = None
    acceptance: Mapping[str, Any] | None = None
    """The server's counters over the replay; None if it has none."""
    reported_acceptance: Counter[str] | None = None
    """Sums of what answers reported about their drafts; `answers` is how many reported it."""
    warmed: int = 0
    """Calls that were not timed."""
    timed_from_s: float = math.inf
    timed_until_s: float = 0.0
    """Seconds from sending the first timed call to the end of the last."""
    ended_s: float = 0.0
    uncounted: int = 0
    """Answers without a token count from the server."""
    met: int = 0
    gaps: Gaps = field(default_factory=Gaps)
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Number in the log of each answered call; `columns` has the same order.  NaN if there is no such time."""
    columns: Mapping[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in LATENCIES})
    late_s: array[float] = field(default_factory=lambda: array("d"))
    """Delay of all calls that had a due time."""
    with_first: TextComparison = field(default_factory=TextComparison)
    """Its answers compared with those of the first server."""
    with_log: TextComparison = field(default_factory=TextComparison)

    def take(self, number: int, answer: Answer, counts: bool = True) -> None:
        """Add one call.  counts: False for warm-up calls, which are counted but not timed."""
        self.attempts += answer.attempts
        self.retried += answer.attempts > 1
        self.ended_s = max(self.ended_s, answer.ended_s)
        is_answered = answer.kind == "answered"
        if is_answered:
            self.answered += 1
        else:
            (self.cut_off if answer.kind == "cut off" else self.failed)[answer.reason] += 1
            self.first_messages.setdefault(answer.reason, answer.failure or "")
        if answer.acceptance:
            self.reported_acceptance = self.reported_acceptance or Counter()
            self.reported_acceptance.update(answer.acceptance, answers=1)
        self.tokens += answer.tokens or 0
        if not counts:
            self.warmed += 1
            return
        self.timed_from_s = min(self.timed_from_s, answer.began_s)
        self.timed_until_s = max(self.timed_until_s, answer.ended_s)
        if answer.due_s is not None:
            self.late_s.append(answer.began_s - answer.due_s)
        for gap_s in answer.gaps_s:
            self.gaps.take(gap_s)
        if is_answered:
            self.uncounted += answer.tokens is None
            self.met += answer.meets(self.slo)
            self.numbers.append(number)
            for name, value in zip(LATENCIES, (answer.ttft_s, answer.tpot_s, answer.e2e_s), strict=True):
                self.columns[name].append(math.nan if value is None else value)

    def end(self, start_s: float) -> None:
        """Derive the figures of a replay that began at `start_s`."""
        if self.sent:
            self.seconds = max(self.ended_s - start_s, 1e-9)
            self.answers_per_s, self.tokens_per_s = self.answered / self.seconds, self.tokens / self.seconds
        self.ttft_s, self.tpot_s, self.e2e_s = (spread(_without_nan(self.columns[name])) for name in LATENCIES)
        self.gap_s = self.gaps.spread()
        if self.slo:
            timed_s = self.timed_until_s - self.timed_from_s if self.warmed else self.seconds
            self.goodput_per_s, self.within_limits = self.met / max(timed_s, 1e-9), self.met

    @property
    def lost(self) -> int:
        """Calls that are not accounted for; anything other than 0 is a bug."""
        return self.sent - self.answered - self.cut_off.total() - self.failed.total()

    def json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in IN_JSON}


def _without_nan(values: Sequence[float] | Table) -> Table:
    table = np.asarray(values, dtype=np.float64)
    return table[~np.isnan(table)]


def ratios(first: Endpoint, second: Endpoint, paired: bool) -> dict[str, Interval]:
    """second / first of the mean TTFT, TPOT and E2E; below 1 if the second is faster.

    paired: over the calls that both answered; otherwise the servers had different calls, and each is resampled
    separately.
    """
    intervals = {}
    for name in LATENCIES:
        columns = [np.asarray(one.columns[name], dtype=np.float64) for one in (first, second)]
        if paired:
            _, *both = np.intersect1d(first.numbers, second.numbers, return_indices=True)
            table = np.stack([column[indices] for column, indices in zip(columns, both, strict=True)])
            columns = [_in_blocks(row) for row in table[:, ~np.isnan(table).any(axis=0)]]
        else:
            columns = [_in_blocks(_without_nan(column), mean=True) for column in columns]
        if min(map(len, columns)) < 2 or columns[0].sum() <= 0:
            continue
        if paired:
            intervals[name] = bootstrap.ratio_of_totals(columns[1].tolist(), columns[0].tolist())
        else:
            drawn = [
                bootstrap.resampled(column, lambda t: t.mean(axis=1), seed=seed) for seed, column in enumerate(columns)
            ]
            intervals[name] = bootstrap.interval_of(drawn[1] / drawn[0], float(columns[1].mean() / columns[0].mean()))
    return intervals


def _in_blocks(values: Table, mean: bool = False) -> Table:
    if len(values) <= BLOCKS:
        return values
    blocks = np.array_split(values, BLOCKS)
    return np.asarray([block.mean() if mean else block.sum() for block in blocks])
