"""Match two reports: rows by drafter, task and temperature, prompts by id.  Judges nothing.  No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import DataError
from outrider.report.compare import by_occurrence, differences
from outrider.report.parts import PromptResult
from outrider.report.schema import Report, Row


class RowPair(NamedTuple):
    """A row of the candidate, the matching row of the baseline, and the prompts of both."""

    new: Row
    old: Row
    prompts: tuple[tuple[PromptResult, PromptResult], ...]


@dataclass(frozen=True, slots=True)
class DrafterRows:
    """The rows of one drafter at one temperature, by task."""

    name: str
    """Distinguishes it from others in the report; empty if it is the only one."""
    pairs: Mapping[str, RowPair]

    def named(self, where: str) -> str:
        """`where`, such as a task, with this name before it."""
        return " ".join(filter(None, (self.name, where)))


@dataclass(frozen=True, slots=True)
class MatchedReports:
    """Two reports, matched."""

    new: Report
    old: Report
    groups: tuple[DrafterRows, ...]
    notes: tuple[str, ...]
    differences: tuple[str, ...]
    """Between their machines and settings; empty if a report has no fingerprint."""


def compare(new: Report, old: Report, shared: float = 0.8) -> MatchedReports:
    """Match rows by drafter, task and temperature, prompts by id.  shared: smallest share of prompts that both must
    have.

    DataError if the targets or the prompts of a row differ.
    """
    if bare_name(new.target) != bare_name(old.target):
        raise DataError(
            f"the candidate has target {new.target}, the baseline {old.target}; measure both on the same target"
        )
    names, notes = _names(new, old)
    new_rows, old_rows = _by_key(new, "candidate"), _by_key(old, "baseline")
    pairs_of: dict[tuple[str, float], dict[str, RowPair]] = defaultdict(dict)
    for (drafter, task, temperature), old_row in old_rows.items():
        if drafter not in names:
            continue
        where = f"{task or 'prompts'} at temperature {temperature:g}"
        new_row = new_rows.get((names[drafter], task, temperature))
        if new_row is None:
            raise DataError(
                f"the candidate lacks the baseline's row of {names[drafter]} on {where}; measure that task too"
            )
        if temperature > 0 and new_row.noise != old_row.noise:
            raise DataError(
                f"{where}, the drafts of one report used their own noise and those of the other the target's, which "
                "accepts fewer tokens; measure the older one again"
            )
        pairs_of[drafter, temperature][task] = RowPair(new_row, old_row, _shared(new_row, old_row, where, shared))
    matched = {(names[d], task, t) for (d, t), pairs in pairs_of.items() for task in pairs}
    lost = [f"{d} on {task} at temperature {t:g}" for d, task, t in new_rows if (d, task, t) not in matched]
    notes += [f"Not in the baseline, so only checked for exactness: {', '.join(lost)}."] if lost else []
    if not pairs_of:
        raise DataError(
            "no row of the candidate matches one of the baseline; measure the same drafter on the same tasks"
        )
    several = len(names) > 1
    temperatures = len({t for _, t in pairs_of}) > 1
    groups = [
        DrafterRows(" ".join(filter(None, (names[d] if several else "", f"T {t:g}" if temperatures else ""))), pairs)
        for (d, t), pairs in pairs_of.items()
    ]
    differing = differences(old.fingerprint, new.fingerprint) if old.fingerprint and new.fingerprint else []
    return MatchedReports(new, old, tuple(groups), tuple(notes), tuple(differing))


def bare_name(target: str) -> str:
    """A target's name without the folders before it."""
    return target.rstrip("/").rsplit("/", 1)[-1]


def _names(new: Report, old: Report) -> tuple[dict[str, str], list[str]]:
    """Drafters of the baseline mapped to those of the candidate, by name; a single replaced one maps to its
    successor."""
    new_names, old_names = (list(dict.fromkeys(row.drafter for row in report.rows)) for report in (new, old))
    names = {name: name for name in old_names if name in new_names}
    added = [n for n in new_names if n not in names]
    gone = [n for n in old_names if n not in names]
    if len(added) == len(gone) == 1:
        return names | {gone[0]: added[0]}, [f"{added[0]} replaces {gone[0]}."]
    return names, [
        f"Drafters of the baseline that the candidate lacks, not compared: {', '.join(gone)}."
    ] if gone else []


def _by_key(report: Report, which: str) -> dict[tuple[str, str, float], Row]:
    rows: dict[tuple[str, str, float], Row] = {}
    for row in report.rows:
        key = (row.drafter, row.task, row.temperature)
        if key in rows:
            raise DataError(
                f"{which} has two rows of {row.drafter} on {row.task} at temperature {row.temperature:g}; delete one "
                "of them"
            )
        rows[key] = row
    return rows


def _shared(new: Row, old: Row, where: str, minimum: float) -> tuple[tuple[PromptResult, PromptResult], ...]:
    """Prompts of both, matched by id and by occurrence of the id; () if a row does not list them."""
    if not new.per_prompt or not old.per_prompt:
        return ()
    new_prompts, old_prompts = by_occurrence(new.per_prompt), by_occurrence(old.per_prompt)
    pairs = tuple((new_prompts[key], old_prompts[key]) for key in old_prompts if key in new_prompts)
    # equal greedy texts have equal lengths, unless the limit or the target differs
    same = tuple((a, b) for a, b in pairs if not (a.exact and b.exact and a.tokens != b.tokens))
    most = max(len(new_prompts), len(old_prompts))
    if len(same) < minimum * most:
        why = f", of {len(pairs) - len(same)} the length differs" if len(same) < len(pairs) else ""
        raise DataError(
            f"{where}: candidate and baseline share {len(same)} of {most} prompts{why}, but need {minimum:.0%}; "
            "measure both on the same prompts with the same limits"
        )
    return same
