"""How rows of a report stand together on the page, and numbers of all of them in one heat table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.report.page.charts import Axis, Heat, Panel
from outrider.report.schema import Range, Report, Row
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


def matrix(report: Report, title: str, pick: Callable[[Row], float | None], unit: str = "") -> list[Panel]:
    """A number of every row as a heat table: tasks down, drafters across; none where there is one task, or no number."""
    groups, drafters = grouped(report), list(by_drafter(report))
    values = [value for row in report.rows if (value := pick(row)) is not None]
    if len(groups) < 2 or not values:
        return []
    lines = []
    for name, rows in groups.items():
        of = {row.drafter: pick(row) for row in rows}
        task, _, context = name.partition(" · ")
        lines.append((task, context, [(of.get(drafter), f"{drafter}, {name}") for drafter in drafters]))
    axis = Axis("task", min(values), max(values), lambda value: f"{value:,.2f}{unit}")
    return [Panel(Heat(axis, drafters, lines), title, is_wide=True)]


def numbered(axis: Axis, lines: Sequence[tuple[str, str, Sequence[tuple[float | None, str]]]], first: int = 1) -> Heat:
    """A heat table whose columns are numbered from `first`."""
    width = max((len(cells) for *_, cells in lines), default=0)
    return Heat(axis, [str(i + first) for i in range(width)], lines)


def counted(rows: Sequence[tuple[Row, Sequence[int]]], corner: str, first: int) -> list[Panel]:
    """Counts of every row as shares of its total, in one heat table; columns are numbered from `first`."""
    lines = []
    for row, counts in rows:
        total = sum(counts)
        lines.append((row.drafter, conditions(row), [(n / (total or 1), f"{n:,} of {total or 1:,}") for n in counts]))
    most = max((share for *_, cells in lines for share, _ in cells), default=0.0)
    return [Panel(numbered(Axis(corner, 0, most, lambda share: f"{share:.0%}"), lines, first))]


def ranged(found: Range | None, unit: str = "×") -> str:
    """A figure and its interval in words."""
    if found is None or found.center is None:
        return MISSING
    ends = "" if found.low is None or found.high is None else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.center:.2f}{unit}{ends}"
