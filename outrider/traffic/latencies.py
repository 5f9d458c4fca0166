"""What one server did with the calls it was given: counts that add up, times as numbers, no text.  No torch.

Times are in seconds.  TTFT: from the moment the call was first sent to its first text; E2E: to the end of its answer, waiting
and asking again included.  TPOT = (E2E - TTFT) / (tokens - 1), which speculation shortens; the gaps between pieces of an answer
are reported beside it, since a step that keeps several tokens sends them in one piece.
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
from outrider.traffic.answer import Answer

Table = np.ndarray[Any, np.dtype[Any]]
BLOCKS = 500
"""Pairs are drawn in as many blocks at most, each of neighbours in time: drawing a million one by one would take an hour."""


class Spread(NamedTuple):
    """Of `samples` values."""

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
    """Gaps between pieces, counted in bins 1 % apart: there are hundreds a call, and memory stays as it is."""

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
        """Percentiles to 1 %."""
        sums = np.cumsum(np.frombuffer(self.counts, dtype=np.int64))
        count = int(sums[-1])
        if not count:
            return None
        bins = [int(np.searchsorted(sums, share * count)) for share in (0.5, 0.95, 0.99)]
        found = [min(self.SHORTEST_S * math.exp((at - 0.5) * self.STEP) if at else 0.0, self.most_s) for at in bins]
        return Spread(self.total_s / count, found[0], found[1], found[2], self.most_s, count)


class Outcome(NamedTuple):
    """One call at one server."""

    answer: Answer
    began_s: float
    """When it was first sent."""
    attempts: int
    due_s: float | None

    @property
    def kind(self) -> str:
        """answered, failed or cut off: each call is one of them."""
        return "answered" if self.answer.is_whole else "cut off" if self.answer.is_cut else "failed"

    @property
    def ttft_s(self) -> float | None:
        return None if self.answer.first_s is None else self.answer.first_s - self.began_s

    @property
    def e2e_s(self) -> float:
        return self.answer.ended_s - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token, or one whose tokens nobody counted."""
        if self.answer.tokens is None or self.answer.tokens < 2 or self.ttft_s is None:
            return None
        return (self.e2e_s - self.ttft_s) / (self.answer.tokens - 1)

    def meets(self, slo: Mapping[str, float]) -> bool:
        """Whether it was answered within all limits, in seconds."""
        tokens = self.answer.tokens
        if "tpot" in slo and self.tpot_s is None and (tokens is None or tokens > 1):  # nobody knows
            return False
        found = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return self.answer.is_whole and all((found[name] or 0.0) <= limit for name, limit in slo.items())


@dataclass
class Tally:
    """Counts of one server while it is asked."""

    sent: int = 0
    answered: int = 0
    cut_off: Counter[str] = field(default_factory=Counter)
    """By reason; something of the answer came."""
    failed: Counter[str] = field(default_factory=Counter)
    """By reason; nothing came."""
    retried: int = 0
    """Calls that were sent more than once."""
    attempts: int = 0
    met: int = 0
    warmed: int = 0
    """Calls that were not timed."""
    timed_from_s: float = math.inf
    timed_until_s: float = 0.0
    """From the sending of the first timed call to the end of the last."""
    tokens: int = 0
    uncounted: int = 0
    """Answers whose tokens the server did not count."""
    gaps: Gaps = field(default_factory=Gaps)
    which: array[int] = field(default_factory=lambda: array("q"))
    """Number of each answered call in the log; the columns below go with it.  NaN is "there is none"."""
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    late_s: array[float] = field(default_factory=lambda: array("d"))
    """Of all calls that had a time: sent - due."""
    said: Counter[str] = field(default_factory=Counter)
    """What answers said of their own drafts, added up; `answers` is how many did."""
    first_said: dict[str, str] = field(default_factory=dict)
    """By reason: what the first such call was told."""
    ended_s: float = 0.0

    def take(self, number: int, outcome: Outcome, slo: Mapping[str, float], counts: bool = True) -> None:
        """Add one call.  Without `counts` it is accounted for, and its times are not: it warmed the server up."""
        answer = outcome.answer
        self.attempts += outcome.attempts
        self.retried += outcome.attempts > 1
        self.ended_s = max(self.ended_s, answer.ended_s)
        if outcome.kind == "answered":
            self.answered += 1
        else:
            (self.cut_off if outcome.kind == "cut off" else self.failed)[answer.reason] += 1
            self.first_said.setdefault(answer.reason, answer.failure or "")
        if answer.acceptance:
            self.said.update(answer.acceptance, answers=1)
        self.tokens += answer.tokens or 0
        if not counts:
            self.warmed += 1
            return
        self.timed_from_s = min(self.timed_from_s, outcome.began_s)
        self.timed_until_s = max(self.timed_until_s, answer.ended_s)
        if outcome.due_s is not None:
            self.late_s.append(outcome.began_s - outcome.due_s)
        for gap_s in answer.gaps_s:
            self.gaps.take(gap_s)
        if outcome.kind == "answered":
            self.uncounted += answer.tokens is None
            self.met += outcome.meets(slo)
            self.which.append(number)
            for column, value in ((self.ttft_s, outcome.ttft_s), (self.tpot_s, outcome.tpot_s), (self.e2e_s, outcome.e2e_s)):
                column.append(math.nan if value is None else value)

    @property
    def lost(self) -> int:
        """Calls of which nobody knows what became; 0, or there is a fault in here."""
        return self.sent - self.answered - self.cut_off.total() - self.failed.total()


@dataclass(frozen=True)
class Endpoint:
    """What one server did, to keep."""

    url: str
    model: str | None
    sent: int
    answered: int
    failed: Mapping[str, int]
    cut_off: Mapping[str, int]
    first_said: Mapping[str, str]
    """By reason: what the first such call was told."""
    retried: int
    attempts: int
    seconds: float
    """From the first call's time to the end of the last answer."""
    answers_per_s: float
    tokens: int
    tokens_per_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    gap_s: Spread | None
    e2e_s: Spread | None
    goodput_per_s: float | None
    """Answers a second within all limits, over the time of the calls that are timed."""
    within_limits: int | None
    acceptance: Mapping[str, Any] | None
    """What the server's counters say of the time in between; None where there are none."""
    acceptance_said: Mapping[str, int] | None
    """What answers said of their own drafts, added up."""


def endpoint(
    tally: Tally, url: str, model: str | None, start_s: float, slo: Mapping[str, float], acceptance: Mapping[str, Any] | None
) -> Endpoint:
    seconds = max(tally.ended_s - start_s, 1e-9) if tally.sent else 0.0
    timed_s = tally.timed_until_s - tally.timed_from_s if tally.warmed else seconds
    per_s = lambda count: count / seconds if seconds else 0.0
    return Endpoint(
        url, model, tally.sent, tally.answered, dict(tally.failed), dict(tally.cut_off), dict(tally.first_said), tally.retried,
        tally.attempts, seconds, per_s(tally.answered), tally.tokens, per_s(tally.tokens), spread(_known(tally.ttft_s)),
        spread(_known(tally.tpot_s)), tally.gaps.spread(), spread(_known(tally.e2e_s)),
        tally.met / max(timed_s, 1e-9) if slo else None, tally.met if slo else None, acceptance, dict(tally.said) or None,
    )  # fmt: skip


def _known(values: Sequence[float]) -> Table:
    table = np.asarray(values, dtype=np.float64)
    return table[~np.isnan(table)]


def ratios(first: Tally, second: Tally, paired: bool) -> dict[str, Interval]:
    """second / first of the mean TTFT, TPOT and E2E, below 1 where the second is faster.

    `paired`: over the calls that both answered; else each server answered calls of its own, and both are drawn by themselves.
    """
    found = {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        columns = [np.asarray(getattr(tally, name), dtype=np.float64) for tally in (first, second)]
        if paired:
            columns = _paired(columns, [np.asarray(tally.which, dtype=np.int64) for tally in (first, second)])
            if len(columns[0]) > 1 and columns[0].sum() > 0:
                found[name] = bootstrap.ratio_of_totals(columns[1].tolist(), columns[0].tolist())
            continue
        columns = [_in_blocks(column[~np.isnan(column)], mean=True) for column in columns]
        if min(map(len, columns)) > 1 and columns[0].sum() > 0:
            drawn = [bootstrap.resampled(column, lambda t: t.mean(axis=1), seed=seed) for seed, column in enumerate(columns)]
            center = float(columns[1].mean() / columns[0].mean())
            found[name] = bootstrap.interval_of(drawn[1] / drawn[0], center)
    return found


def _paired(columns: list[Table], which: list[Table]) -> list[Table]:
    """Values of the calls that stand in both, in blocks of neighbours."""
    _, first, second = np.intersect1d(which[0], which[1], return_indices=True)
    table = np.stack([columns[0][first], columns[1][second]])
    table = table[:, ~np.isnan(table).any(axis=0)]
    return [_in_blocks(row) for row in table]


def _in_blocks(values: Table, mean: bool = False) -> Table:
    if len(values) <= BLOCKS:
        return values
    blocks = np.array_split(values, BLOCKS)
    return np.asarray([block.mean() if mean else block.sum() for block in blocks])
