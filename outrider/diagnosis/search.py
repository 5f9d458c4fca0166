"""Finds the causes: changes back what differs from the training, tries alternatives for what is not recorded, and
measures what each change that helped costs while all others are made.

Costs are measured with everything else corrected, since two causes can hide each other.  An alternative is chosen on a
third of the texts and must hold on the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outrider.diagnosis.bench import Setup
from outrider.diagnosis.changes import Change
from outrider.diagnosis.conditions import distance
from outrider.diagnosis.walk import Steps, total
from outrider.report.bootstrap import Interval, interval_of, resampled

LEVEL = 0.99
"""Of the intervals that must exclude 0."""
LEAST = 0.03
"""Smallest cost that is named, as a share of the tokens per step."""
LEAST_OF_TEXTS = 0.1
"""The same for a change of the texts, whose predictability differs by itself."""
POOR = 1.3
"""Tokens per step below which pairs of alternatives are tried, since two causes may hide each other."""
MOST_CHANGES = 4
SCREENED = slice(None, None, 3)
UNLIKE = 0.4
"""`distance` from the languages or categories of the training at which they are named."""
OF_TEXTS = ("template", "thinking", "temperature", "end tokens")


class Cause(NamedTuple):
    """What costs acceptance, how much, and what to do."""

    name: str
    here: str
    instead: str
    cost: Interval
    """Tokens per step, with everything else corrected."""
    advice: str


@dataclass(slots=True)
class Diagnosis:
    """The causes, and the tokens per step with and without them."""

    here: Interval
    corrected: Interval
    promised: Interval | None = None
    """On held-out answers of the training, or on texts like those in training."""
    causes: list[Cause] = field(default_factory=list)
    no_effect: list[Cause] = field(default_factory=list)
    """Differences from the training that cost nothing measurable."""
    num_tried: int = 0
    """Alternatives that were measured."""


class Texts(NamedTuple):
    """What a group of texts is."""

    languages: Mapping[str, float]
    categories: Mapping[str, float]


Measure = Callable[[Setup, slice], list[Steps]]
"""(set-up, which prompts) -> the steps of each."""


def diagnose(
    measure: Measure, setup: Setup, differing: Sequence[Change], candidates: Sequence[Change],
    is_recorded: bool = True, on_try: Callable[[str], None] = lambda _: None,
) -> tuple[Diagnosis, Setup]:  # fmt: skip
    """The causes in the set-up, and the set-up without them.

    differing: changes back to recorded conditions.  candidates: alternatives to try.  is_recorded: the conditions of
    the training are known.  on_try: called with the name of every experiment.
    """
    search = _Search(measure, on_try)
    corrected = _all(differing, setup)
    alternatives = search.alternatives(corrected, candidates)
    corrected = _all(alternatives, corrected)
    steps = search.measured(corrected)
    result = Diagnosis(rate(search.measured(setup)), rate(steps), num_tried=search.num_tried)
    for change in (*differing, *alternatives):
        without = corrected.undone(change.field, setup)
        cost = gain(search.measured(without), steps)
        least = LEAST if is_recorded else _least([change])
        is_cause = _counts(cost, result.corrected, least)
        (result.causes if is_cause else result.no_effect).append(Cause(*change.described, cost, change.advice))
    return result, corrected


def compare_texts(
    result: Diagnosis, here: Sequence[Steps], expected: Sequence[Steps], texts: Texts, before: Texts
) -> None:
    """Add a cause to the diagnosis if texts like those of the training accept more.

    here, expected: both without the other causes.  before: the texts of the training.
    """
    result.promised = rate(expected)
    cost = gap(here, expected)
    if not _counts(cost, result.promised, LEAST_OF_TEXTS):
        return
    advice = "fine-tune it on prompts like these: `outrider init --from`, see docs/training.md"
    cause = Cause("prompts", "yours", "the training's", cost, advice)
    for name, now, then in (
        ("domain", texts.categories, before.categories), ("language", texts.languages, before.languages),
    ):  # fmt: skip
        if distance(now, then) >= UNLIKE:
            cause = Cause(name, _shown(now), _shown(then), cost, advice)
    result.causes.append(cause)


def _counts(cost: Interval, of: Interval, least: float) -> bool:
    return cost.low > 0 and cost.center >= least * of.center


class _Search:
    """Measurements of one diagnosis, each made once."""

    def __init__(self, measure: Measure, on_try: Callable[[str], None]):
        self.measure, self.on_try, self.num_tried = measure, on_try, 0
        self._measured: dict[str, list[Steps]] = {}

    def measured(self, setup: Setup) -> list[Steps]:
        key = repr(setup)
        if key not in self._measured:
            self._measured[key] = self.measure(setup, slice(None))
        return self._measured[key]

    def alternatives(self, setup: Setup, candidates: Sequence[Change]) -> list[Change]:
        """The alternatives that help, best first; each is tried with the better ones made."""
        chosen: list[Change] = []
        for _ in range(MOST_CHANGES):
            fields = {change.field for change in chosen}
            left = [change for change in candidates if change.field not in fields]
            best = self._best(setup, [(change,) for change in left])
            if best is None and total(self.measured(setup)) < POOR:
                pairs = itertools.combinations(left, 2)
                best = self._best(setup, [pair for pair in pairs if pair[0].field != pair[1].field])
            if best is None:
                break
            chosen += best
            setup = _all(best, setup)
        return chosen

    def _best(self, setup: Setup, groups: Sequence[tuple[Change, ...]]) -> tuple[Change, ...] | None:
        """The changes that gain most on the screened texts, if they also gain on the others."""
        now = total(self.measure(setup, SCREENED))
        gains = []
        for group in groups:
            self.on_try(" and ".join(change.cause for change in group))
            self.num_tried += 1
            gains.append(total(self.measure(_all(group, setup), SCREENED)) / now - 1)
        if not gains or max(gains) < LEAST:
            return None
        best = groups[int(np.argmax(gains))]
        before, after = self.measured(setup), self.measured(_all(best, setup))
        fresh = sorted({*range(len(before))} - {*range(len(before))[SCREENED]})
        improvement = gain([before[i] for i in fresh], [after[i] for i in fresh])
        return best if _counts(improvement, rate([after[i] for i in fresh]), _least(best)) else None


def _least(group: Sequence[Change]) -> float:
    return LEAST_OF_TEXTS if any(change.cause in (*OF_TEXTS, "vocabulary") for change in group) else LEAST


def _all(group: Sequence[Change], setup: Setup) -> Setup:
    for change in group:
        setup = change.applied(setup)
    return setup


def _shown(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.0%} {name}" for name, share in list(shares.items())[:2])


# ── statistics ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rate(texts: Sequence[Steps]) -> Interval:
    """Tokens per step with its interval over texts."""
    return _interval([(*text, 0.0, 1.0) for text in texts], total(texts))


def gain(before: Sequence[Steps], after: Sequence[Steps]) -> Interval:
    """How many more tokens per step the second measurement of the same prompts has."""
    pairs = [(*new, *old) for old, new in zip(before, after, strict=True)]
    return _interval(pairs, total(after) - total(before))


def gap(here: Sequence[Steps], expected: Sequence[Steps]) -> Interval:
    """How many more tokens per step other texts have."""
    drawn = _drawn([(*text, 0.0, 1.0) for text in expected]) - _drawn([(*text, 0.0, 1.0) for text in here], seed=1)
    return interval_of(drawn, total(expected) - total(here), LEVEL)


def _interval(rows: Sequence[tuple[float, ...]], center: float) -> Interval:
    return interval_of(_drawn(rows), center, LEVEL)


def _drawn(rows: Sequence[tuple[float, ...]], seed: int = 0) -> Any:
    """Draws of tokens per step minus those of the last two columns."""

    def difference(table: Any) -> Any:
        sums = table.sum(axis=-2)
        return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]

    return resampled(rows, difference, seed=seed)
