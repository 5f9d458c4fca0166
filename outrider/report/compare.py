"""The same rows of several reports side by side, prompt by prompt.  No torch.

A ratio is computed over the prompts that both reports share: differences between prompts cancel out, so small changes
show.  Its interval is over prompts and ignores load on the machine.  Speed-ups, which are relative to the target alone
in the same run, therefore come before tokens per second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from outrider.errors import DataError
from outrider.report.bootstrap import MIN_PROMPTS, Floats, estimate_of, rate_ratio, resampled
from outrider.report.parts import PromptResult
from outrider.report.schema import Report, Row
from outrider.report.summary import many, named, say

Statistic = Callable[[Floats], Floats]
Fact = str | int | float | bool | None
"""A value of a fingerprint."""


@dataclass(frozen=True)
class Change:
    """One measure in both reports."""

    measure: str
    base: float | None
    other: float | None
    ratio: float | None = None
    """other / base over the prompts of both."""
    low: float | None = None
    high: float | None = None
    """The ratio's 95 % interval; None for too few prompts."""
    prompts: int = 0
    more_is_better: bool = True

    @property
    def outcome(self) -> str:
        """better or worse if the interval is on one side of 1, unclear if it contains 1."""
        if self.ratio is None or self.low is None or self.high is None:
            return "too few prompts" if self.prompts else "not measured"
        if self.low <= 1 <= self.high:
            return "unclear"
        return "better" if (self.ratio > 1) == self.more_is_better else "worse"


@dataclass(frozen=True)
class Pair:
    """One row in both reports."""

    name: str
    base: Row
    other: Row
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Against:
    """One report against the base."""

    name: str
    report: Report
    pairs: tuple[Pair, ...]
    unmatched: tuple[str, ...]
    """Rows that only one of the two has."""
    differing: dict[str, tuple[Any, Any]]
    """Differing entries of the fingerprint, and the target: (base's, the other's)."""


@dataclass(frozen=True)
class Comparison:
    """Several reports against the first one."""

    name: str
    base: Report
    others: tuple[Against, ...]

    @classmethod
    def of(cls, reports: Sequence[tuple[str, Report]]) -> Comparison:
        """Compare (name, report) pairs with the first one.  DataError if nothing can be compared."""
        if len(reports) < 2:
            raise DataError(f"a comparison needs two or more reports, got {len(reports)}; give another one")
        (name, base), rest = reports[0], reports[1:]
        others = tuple(_against(base, other, report) for other, report in rest)
        for other in others:
            if not other.pairs:
                raise DataError(
                    f"{name} and {other.name} have no row in common: {'; '.join(other.unmatched) or 'both are empty'}; "
                    "compare reports of the same drafter, task and temperature"
                )
        return cls(name, base, others)

    def headline(self) -> str:
        """What changed, in one sentence per report."""
        return " ".join(_sentence(self.name, other) for other in self.others)

    def warnings(self) -> list[str]:
        """What weakens the comparison."""
        warnings = []
        for other in self.others:
            if other.differing:
                parts = [f"{key} {plain(a)} / {plain(b)}" for key, (a, b) in other.differing.items()]
                warnings.append(
                    f"{self.name} and {other.name} were not measured under the same conditions: {', '.join(parts)}. "
                    "Their tokens per second can't be compared; their tokens per step can, and their speed-ups with "
                    "care."
                )
            if not self.base.fingerprint or not other.report.fingerprint:
                warnings.append(
                    f"{self.name} or {other.name} has no fingerprint: they may have run on different machines."
                )
            if any(pair.base.noise != pair.other.noise for pair in other.pairs):
                warnings.append(
                    f"Above temperature 0, drafts of one of {self.name} and {other.name} drew from the target's noise, "
                    "which accepts fewer: their acceptance can't be compared there."
                )
            if other.unmatched:
                warnings.append(f"In only one of {self.name} and {other.name}: {'; '.join(other.unmatched)}.")
        return warnings

    def values(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "base": self.name,
            "others": [
                {
                    "name": other.name, "unmatched": list(other.unmatched),
                    "differing": {key: list(values) for key, values in other.differing.items()},
                    "rows": [
                        {
                            "row": pair.name,
                            "changes": [asdict(change) | {"outcome": change.outcome} for change in pair.changes],
                        }
                        for pair in other.pairs
                    ],
                }
                for other in self.others
            ],
        }  # fmt: skip

    def table(self) -> Table:
        """Every change, for a terminal."""
        table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        heads = ("row", "measure", self.name, "other", "ratio", "95 %", "of", "")
        for i, head in enumerate(heads):
            table.add_column(
                head, justify="left" if i in (0, 1, 7) else "right", overflow="fold", no_wrap=i in (1, 4, 5)
            )
        for other in self.others:
            for pair in other.pairs:
                for i, change in enumerate(pair.changes):
                    label = f"{pair.name}{f' ({other.name})' if len(self.others) > 1 else ''}" if i == 0 else ""
                    table.add_row(Text(label), *(Text(cell) for cell in cells_of(change)))
        return table


def by_occurrence(prompts: Iterable[PromptResult]) -> dict[tuple[str, int], PromptResult]:
    """Prompts by id and occurrence of the id, for pairing the prompts of two reports."""
    counts: Counter[str] = Counter()
    by_key = {}
    for prompt in prompts:
        by_key[prompt.id, counts[prompt.id]] = prompt
        counts[prompt.id] += 1
    return by_key


def paired(base: Iterable[PromptResult], other: Iterable[PromptResult]) -> list[tuple[PromptResult, PromptResult]]:
    """The prompts that both have."""
    others = by_occurrence(other)
    return [(prompt, others[key]) for key, prompt in by_occurrence(base).items() if key in others]


def _lost(row: Row, reference: Row) -> float | None:
    """How many tokens per step `row` loses relative to `reference`, the same row at the precision used in training."""
    alike = ("drafter", "task", "temperature", "rule", "policy", "verification")
    is_same = all(getattr(row, name) == getattr(reference, name) for name in alike)
    if not is_same or not row.crosses_precisions or not row.is_trained_on(reference.precision):
        return None
    pairs = [(a, b) for a, b in paired(row.per_prompt, reference.per_prompt) if a.steps and b.steps]
    if not pairs:
        return None
    here, there = (
        sum(p.tokens or 0 for p in side) / sum(p.steps or 0 for p in side) for side in zip(*pairs, strict=True)
    )
    return there - here


def with_losses(report: Report, other: Report) -> Report:
    """The report with `tokens_per_step_lost` if `other` has the same drafter at the precision it was trained on.

    The loss is computed over the prompts they share.
    """
    rows = []
    for row in report.rows:
        lost = next((loss for same in other.rows if (loss := _lost(row, same)) is not None), None)
        rows.append(row if lost is None else row.model_copy(update={"tokens_per_step_lost": lost}))
    return report.model_copy(update={"rows": tuple(rows)})


def names(paths: Sequence[Path]) -> list[str]:
    """A short name for each path: the folder of a report.json, the stem of other files; longer if two are equal."""
    paths_of = [path.absolute().parent if path.name == "report.json" else path.absolute() for path in paths]
    parts = [(*place.parts[:-1], place.name if place.is_dir() else place.stem) for place in paths_of]
    for length in range(1, max(len(part) for part in parts) + 1):
        shortened = ["/".join(part[-length:]) for part in parts]
        if len(set(shortened)) == len(shortened):
            return shortened
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def _against(base: Report, name: str, other: Report) -> Against:
    matched, unmatched = _matched(base.rows, other.rows)
    pairs = tuple(Pair(_pair_name(a, b), a, b, _changes(a, b)) for a, b in matched)
    keys = dict.fromkeys([*base.fingerprint, *other.fingerprint]) if base.fingerprint and other.fingerprint else {}
    values = {"target": (base.target, other.target)} | {
        k: (base.fingerprint.get(k), other.fingerprint.get(k)) for k in keys
    }
    differing = {key: (before, now) for key, (before, now) in values.items() if before != now}
    return Against(name, other, pairs, unmatched, differing)


def _matched(base: Sequence[Row], other: Sequence[Row]) -> tuple[list[tuple[Row, Row]], tuple[str, ...]]:
    """Rows of the same drafter, task, temperature and rule; then rows that are the only ones with their task and
    temperature."""
    left = list(base)
    right = list(other)
    matched = []
    for key in (lambda row: (row.drafter, *_place(row)), _place):
        for row in list(left):
            candidates = [candidate for candidate in right if key(candidate) == key(row)]
            alone = sum(key(candidate) == key(row) for candidate in left) == 1 and len(candidates) == 1
            if alone:
                matched.append((row, candidates[0]))
                left.remove(row)
                right.remove(candidates[0])
    return matched, tuple(named(row) for row in [*left, *right])


def _place(row: Row) -> tuple[Any, ...]:
    return row.task, row.temperature, row.rule, row.policy or "fixed", row.verification or "standard", row.batch


def _pair_name(base: Row, other: Row) -> str:
    return named(base) if base.drafter == other.drafter else f"{named(base)} against {other.drafter}"


def _changes(base: Row, other: Row) -> tuple[Change, ...]:
    """The measures that both rows have, the most robust first."""
    pairs = paired(base.per_prompt, other.per_prompt)
    counts = [(b.tokens, b.steps, a.tokens, a.steps) for a, b in pairs if a.tokens and a.steps and b.tokens and b.steps]

    def of_means(
        measure: str, before: float | None, now: float | None, name: str, more_is_better: bool = True
    ) -> Change:
        """Geometric mean of the prompts' own ratios."""
        logs = [math.log(there / here) for a, b in pairs if (here := getattr(a, name)) and (there := getattr(b, name))]
        mean: Statistic = lambda table: table.mean(axis=-1)
        return _change(Change(measure, before, now, more_is_better=more_is_better), logs, mean, math.exp)

    return (
        _change(Change("tokens per step", base.tokens_per_step, other.tokens_per_step), counts, rate_ratio, float),
        of_means("speed-up", base.speedup, other.speedup, "speedup"),
        of_means("tokens/s", base.tokens_per_s, other.tokens_per_s, "tokens_per_s"),
        of_means("ms per token", base.tpot_ms.p50, other.tpot_ms.p50, "tpot_ms", more_is_better=False),
    )


def _change(change: Change, values: Sequence[Any], statistic: Statistic, scale: Callable[[float], float]) -> Change:
    """The change with its ratio over prompts and 95 % interval, widened for few prompts, whose draws vary too little.

    values: one per prompt; scale: from the statistic to the ratio.
    """
    if not values:
        return change
    center = float(statistic(np.asarray(values, dtype=np.float64)))
    change = replace(change, ratio=scale(center), prompts=len(values))
    if len(values) < MIN_PROMPTS:
        return change
    _, low, high = estimate_of(center, resampled(values, statistic), len(values)).interval(0.025)
    return replace(change, low=scale(low), high=scale(high))


def _sentence(base: str, other: Against) -> str:
    """How many rows got better or worse, by speed-up if measured, otherwise by tokens per step."""
    changes = [pair.changes[1] if pair.changes[1].ratio is not None else pair.changes[0] for pair in other.pairs]
    if len(changes) == 1:
        change = changes[0]
        ends = "" if change.low is None else f" ({change.low:.2f} to {change.high:.2f})"
        ratio = "was not timed in both" if change.ratio is None else f"is {change.ratio:.2f} times {base}'s{ends}"
        return f"{other.pairs[0].name}: {other.name}'s {change.measure} {ratio}, {change.outcome}."
    counts = Counter(change.outcome for change in changes)
    parts = [
        f"{counts[v]} {v}" for v in ("better", "worse", "unclear", "too few prompts", "not measured") if v in counts
    ]
    return f"Of {many(len(changes), 'row')}, {other.name} against {base}: {', '.join(parts)}."


def cells_of(change: Change) -> tuple[str, ...]:
    """A change as a row of a table."""
    spec = ".2f" if change.measure in ("tokens per step", "speed-up") else ".1f"
    ends = "–" if change.low is None else f"{change.low:.2f} to {change.high:.2f}"
    return (
        change.measure, say(change.base, spec), say(change.other, spec), say(change.ratio, ".3f", missing="–"), ends,
        f"{change.prompts:,}", change.outcome,
    )  # fmt: skip


def plain(value: Any) -> str:
    """A value of a fingerprint as text."""
    return "–" if value is None else str(value)


def differences(a: Mapping[str, Fact], b: Mapping[str, Fact]) -> list[str]:
    """Differences between two fingerprints, such as `torch 2.9.0 against 2.13.0`.

    An empty fingerprint equals no other, since nothing is known about it.
    """
    missing = [name for name, facts in (("first", a), ("second", b)) if not facts]
    if missing:
        return [f"the {name} report has no fingerprint" for name in missing]
    return [
        f"{name.replace('_', ' ')} {_fact(a, name)} against {_fact(b, name)}"
        for name in sorted(
            a.keys() | b.keys(), key=lambda name: (name not in a, list(a).index(name) if name in a else 0, name)
        )
        if a.get(name) != b.get(name)
    ]


def _fact(facts: Mapping[str, Fact], name: str) -> str:
    value = facts.get(name)
    return "unknown" if value is None else ("yes" if value else "no") if isinstance(value, bool) else str(value)
