"""How rows of a report stand together on the page, and numbers of all of them in one heat table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.report.page.charts import Cell, Heat, Panel
from outrider.report.schema import Range, Report, Row
from outrider.report.summary import MISSING, conditions, say

Colours = dict[str, int]
"""Drafter → its colour, the same in every chart."""
CROWD = 9
"""Most rows that have a drawing each; more share a heat table, or small drawings."""


def grouped(report: Report) -> dict[str, list[Row]]:
    """Rows that can be compared: those of one task and temperature, under the words for both."""
    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(conditions(row), []).append(row)
    return groups


def by_drafter(report: Report) -> dict[str, list[Row]]:
    """Every drafter's rows, over all tasks and temperatures."""
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        found.setdefault(row.drafter, []).append(row)
    return found


def matrix(report: Report, title: str, pick: Callable[[Row], float | None], unit: str = "") -> list[Panel]:
    """A number of every row as a heat table: tasks down, drafters across; none where there is one task, or no number."""
    groups, drafters = grouped(report), by_drafter(report)
    values = [value for row in report.rows if (value := pick(row)) is not None]
    if len(groups) < 2 or not values:
        return []
    lines = []
    for name, rows in groups.items():
        of = {row.drafter: pick(row) for row in rows}
        task, _, context = name.partition(" · ")
        cells = [
            Cell(of.get(drafter), say(of.get(drafter), ".2f", unit, missing="–"), f"{drafter}, {name}") for drafter in drafters
        ]
        lines.append((task, context, cells))
    return [Panel(Heat("task", list(drafters), lines, min(values), max(values)), title, is_wide=True)]


def counted(rows: Sequence[tuple[Row, Sequence[int]]], corner: str, first: int) -> list[Panel]:
    """Counts of every row as shares of its total, in one heat table; columns are numbered from `first`."""
    width = max((len(counts) for _, counts in rows), default=0)
    lines, most = [], 0.0
    for row, counts in rows:
        total = sum(counts) or 1
        most = max([most, *(count / total for count in counts)])
        cells = [Cell(count / total, f"{count / total:.0%}", f"{count:,} of {total:,}") for count in counts]
        lines.append((row.drafter, conditions(row), [*cells, *[Cell(None, "–")] * (width - len(counts))]))
    return [Panel(Heat(corner, [str(i + first) for i in range(width)], lines, 0, most))]


def ranged(found: Range | None, unit: str = "×") -> str:
    """A figure and its interval in words."""
    if found is None or found.center is None:
        return MISSING
    ends = "" if found.low is None or found.high is None else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.center:.2f}{unit}{ends}"
