"""How rows of a report are grouped on the page."""

from __future__ import annotations

from collections.abc import Callable

from outrider.report.parts import Range
from outrider.report.schema import Report, Row
from outrider.report.summary import MISSING, conditions

Colours = dict[str, int]
"""Drafter → its colour, the same in every chart."""
CROWD = 9
"""Most rows that have a drawing each; more share a heat table, or small drawings."""


def grouped(report: Report, key: Callable[[Row], str] = conditions) -> dict[str, list[Row]]:
    """Rows by a key; by default those that can be compared, of one task and temperature, under the words for both."""
    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_drafter(report: Report) -> dict[str, list[Row]]:
    """Every drafter's rows, over all tasks and temperatures."""
    return grouped(report, lambda row: row.drafter)


def ranged(found: Range | None, unit: str = "×") -> str:
    """A figure and its interval in words."""
    if found is None or found.center is None:
        return MISSING
    ends = "" if found.low is None or found.high is None else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.center:.2f}{unit}{ends}"
