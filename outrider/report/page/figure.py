"""Figure: the shape that every part of the page has, and the words and groups that several parts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from outrider.report.page.charts import MISSING, Cell, heat, panel, say, tag

if TYPE_CHECKING:
    from outrider.report.schema import Pattern, Percentiles, Range, Report, Row

Colours = dict[str, int]
"""Drafter → its colour, the same in every chart."""
LISTED = 20
"""Most prompts named in a list; the rest is counted."""
CROWD = 9
"""Most rows that have a drawing each; more share a heat table, or small drawings."""
NOT_EXACT = "NOT EXACT"


def figure(name: str, title: str, says: str, *panels: str, across: int = 1) -> str:
    """Panels under a heading.  One that has none is a single line that says so."""
    if not any(panels):
        return f'<figure id="{name}" class="empty"><h2>{escape(title)}</h2>{tag("p", MISSING, class_="missing")}</figure>'
    caption = f"<figcaption><h2>{escape(title)}</h2><p>{escape(says)}</p></figcaption>"
    return f'<figure id="{name}">{caption}<div class="panels across-{across}">{"".join(panels)}</div></figure>'


def whole(name: str, title: str, says: str, body: str) -> str:
    """A part of the page that is text or a table."""
    inside = f"<h2>{escape(title)}</h2><p>{escape(says)}</p>{body}"
    return f'<section class="part" id="{name}">{inside}</section>'


def grouped(report: Report) -> dict[str, list[Row]]:
    """Rows that can be compared: those of one task and temperature, under the words for both."""
    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(row.conditions, []).append(row)
    return groups


def by_drafter(report: Report) -> dict[str, list[Row]]:
    """Every drafter's rows, over all tasks and temperatures."""
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        found.setdefault(row.drafter, []).append(row)
    return found


def matrix(report: Report, pick: Callable[[Row], float | None], spec: str, unit: str = "", scale: float = 1) -> str:
    """A number of every row as a heat table: tasks down, drafters across; empty where there is one task, or no number."""
    groups, drafters = grouped(report), by_drafter(report)
    values = [value for row in report.rows if (value := pick(row)) is not None]
    if len(groups) < 2 or not values:
        return ""
    lines = []
    for name, rows in groups.items():
        of = {row.drafter: pick(row) for row in rows}
        task, _, context = name.partition(" · ")
        cells = [Cell(of.get(d), say(of.get(d), spec, unit, scale=scale, missing="–"), f"{d}, {name}") for d in drafters]
        lines.append((task, context, cells))
    return heat("task", list(drafters), lines, min(values), max(values))


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table; the first column names the line."""
    top = "".join(tag("th", escape(head), scope="col") for head in heads)
    body = ""
    for name, *cells in rows:
        line = tag("th", escape(name), scope="row")
        line += "".join(tag("td", escape(text), class_="missing" if text == MISSING else "") for text in cells)
        body += tag("tr", line)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def kept_share(patterns: Sequence[Pattern]) -> tuple[float | None, int]:
    """Kept over tested, and tested."""
    tested = sum(pattern.tested for pattern in patterns)
    return (sum(pattern.kept for pattern in patterns) / tested if tested else None), tested


def ranged(found: Range | None, spec: str = ".2f", unit: str = "×") -> str:
    """A figure and its interval in words."""
    if found is None or found.center is None:
        return MISSING
    ends = "" if found.low is None or found.high is None else f" ({found.low:{spec}} to {found.high:{spec}})"
    return f"{found.center:{spec}}{unit}{ends}"


def three(found: Percentiles) -> str:
    values = (found.p50, found.p95, found.p99)
    return MISSING if values == (None, None, None) else " / ".join(say(value, ".1f", missing="–") for value in values)


def percents(values: Sequence[float | None]) -> str:
    return " ".join(say(value, ".0f", scale=100, missing="–") for value in values) or MISSING


def named(row: Row) -> str:
    """A row in one line of a table."""
    return " · ".join(part for part in (row.drafter, row.task, f"T {row.temperature:g}") if part)


def counted(rows: Sequence[tuple[Row, Sequence[int]]], corner: str, first: int) -> str:
    """Counts of every row as shares of its total, in one heat table; columns are numbered from `first`."""
    width = max((len(counts) for _, counts in rows), default=0)
    lines, most = [], 0.0
    for row, counts in rows:
        total = sum(counts) or 1
        padded = [*counts, *[None] * (width - len(counts))]
        most = max([most, *(count / total for count in counts)])
        cells = [
            Cell(None, "–") if count is None else Cell(count / total, f"{count / total:.0%}", f"{count:,} of {total:,}")
            for count in padded
        ]
        lines.append((row.drafter, row.conditions, cells))
    return panel("", heat(corner, [str(i + first) for i in range(width)], lines, 0, most))
