"""Groups of a report's rows on the page."""

from __future__ import annotations

from collections.abc import Callable

from outrider.report.parts import Range
from outrider.report.schema import Report, Row
from outrider.report.summary import MISSING, conditions, interval

Colours = dict[str, int]
"""Colour by drafter, the same in every chart."""
CROWD = 9
"""Maximum number of rows that have a chart each; more share a heat table or small charts."""


def grouped(report: Report, key: Callable[[Row], str] = conditions) -> dict[str, list[Row]]:
    """Rows by a key; by default comparable rows (same task and temperature), keyed by a description of both."""
    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_drafter(report: Report) -> dict[str, list[Row]]:
    """Every drafter's rows, over all tasks and temperatures."""
    return grouped(report, lambda row: row.drafter)


def ranged(figure: Range | None, unit: str = "×") -> str:
    """A figure and its interval in words."""
    if figure is None or figure.center is None:
        return MISSING
    ends = interval(figure)
    return f"{figure.center:.2f}{unit}{f' ({ends})' if ends else ''}"
