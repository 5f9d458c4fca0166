"""Charts of acceptance: by depth, task and kind of proposal, and compared with training; contamination."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.report.page import charts
from outrider.report.page.charts import Axis, Line, Lines, Panel, Rows
from outrider.report.page.groups import CROWD, Colours, by_drafter, grouped
from outrider.report.schema import Report, Row
from outrider.report.summary import conditions, say

LISTED = 20
"""Maximum number of prompts named in a list; the rest are counted."""
SORTS = (
    ("by_kind", "By what was proposed", "numbers, words, punctuation and so on"),
    ("by_entropy", "By the target's entropy there", "how uncertain the target was, in nats"),
    ("by_rank", "By rank under the target", "1 is its most probable token"),
)
CURVES = (
    ("accepted_by_depth", "All tokens up to this depth accepted"),
    ("conditional_acceptance", "Accepted, given that all before it were"),
)


def acceptance(report: Report, colours: Colours) -> list[Panel]:
    """Curves by depth for every group of rows."""
    panels, is_crowd = [], len(report.rows) > CROWD
    for name, rows in grouped(report).items():
        for field, title in CURVES[:1] if is_crowd else CURVES:
            series = [Line(row.drafter, colours[row.drafter], list(enumerate(getattr(row, field), 1))) for row in rows]
            drawing = by_depth(series, charts.THIRD if is_crowd else charts.HALF)
            panels.append(Panel(drawing, name if is_crowd else title, "" if is_crowd else name))
    return panels


def by_depth(series: Sequence[Line], width: int = charts.HALF) -> Lines | None:
    deepest = max((len(line.points) for line in series), default=0)
    depths = range(1, deepest + 1, 1 + deepest // 12)
    return charts.lines(series, Axis("depth", 1, max(deepest, 2), at=depths), charts.PERCENT, width)


Cells = list[tuple[float | None, str, str]]


def crowds(report: Report) -> dict[str, list[tuple[Row, Cells]]]:
    """Figures drawn as one table if more than CROWD rows have them: cells (value, text, tip) by row; otherwise
    empty."""
    gaps = [
        (row, [None if gap is None else -gap for gap in _gaps(row)]) for row in report.rows if row.predicted_by_depth
    ]
    tables: dict[str, list[tuple[Row, Cells]]] = {
        "predicted": [(row, [(gap, say(gap, ".0f", scale=100), "") for gap in values]) for row, values in gaps],
        "rejections": [(row, _shares(row.rejections_by_depth)) for row in report.rows if row.rejections_by_depth],
        "histogram": [(row, _shares(accepted_per_step(row)[0])) for row in report.rows if row.accepted_histogram],
    }
    return {name: lines if len(lines) > CROWD else [] for name, lines in tables.items()}


def _shares(counts: Sequence[int]) -> Cells:
    total = sum(counts) or 1
    return [(count / total, f"{count / total:.0%}", f"{count:,} of {total:,}") for count in counts]


def predicted(report: Report, colours: Colours) -> list[Panel]:
    """Acceptance measured in training and here."""
    panels = []
    for row in (row for row in report.rows if row.predicted_by_depth):
        colour = colours[row.drafter]
        series = [
            Line("here", colour, list(enumerate(row.accepted_by_depth, 1))),
            Line("in training", colour, list(enumerate(row.predicted_by_depth, 1)), dashed=True),
        ]
        panels.append(Panel(by_depth(series), row.drafter, f"{conditions(row)}. {_gap(row)}"))
    return panels


def _gaps(row: Row) -> list[float | None]:
    """[k]: acceptance here minus that measured in training."""
    pairs = zip(row.accepted_by_depth, row.predicted_by_depth, strict=False)
    return [None if served is None or expected is None else served - expected for served, expected in pairs]


def _gap(row: Row) -> str:
    gaps = [(gap, depth) for depth, gap in enumerate(_gaps(row), 1) if gap is not None]
    if not gaps:
        return ""
    gap, depth = max(gaps, key=lambda pair: abs(pair[0]))
    points = f"{abs(gap) * 100:.0f} points {'more' if gap > 0 else 'less'}"
    return f"Largest difference at depth {depth}: {points} than in training."


def accepted_per_step(row: Row) -> tuple[list[int], float]:
    """Steps by number of accepted tokens, over all drafted depths; and the average number."""
    width = max(len(line) for line in row.accepted_histogram)
    counts = [sum(line[count] for line in row.accepted_histogram if count < len(line)) for count in range(width)]
    return counts, sum(count * steps for count, steps in enumerate(counts)) / (sum(counts) or 1)


def patterns(report: Report, field: str) -> dict[str, dict[str, list[int]]]:
    """[tested, accepted] by kind of proposal and drafter, over all its rows; empty if nothing was tested."""
    by_sort: dict[str, dict[str, list[int]]] = {}
    for row in (row for rows in by_drafter(report).values() for row in rows):
        for pattern in getattr(row.rejections, field) if row.rejections else ():
            counts = by_sort.setdefault(pattern.name, {}).setdefault(row.drafter, [0, 0])
            counts[:] = counts[0] + pattern.tested, counts[1] + pattern.accepted
    return by_sort if any(tested for counts in by_sort.values() for tested, _ in counts.values()) else {}


def ladder(sorts: Sequence[str]) -> Rows:
    """A narrow chart of shares, one row per kind."""
    axis = charts.PERCENT._replace(at=(0, 0.5, 1))
    return Rows("marks", sorts, axis, row=30, width=charts.THIRD, left=112, right=14)


def contamination(report: Report) -> str:
    """What counts as contamination, and the contaminated prompts; drafters trained on the same data share an entry."""
    cleaned = [(row.drafter, row.clean) for row in report.rows if row.clean is not None]
    owners: dict[tuple[str, ...], list[str]] = {}
    for drafter, part in cleaned:
        if part.contaminated:
            owners.setdefault(part.contaminated, []).append(drafter)
    rules = sorted({part.rule for _, part in cleaned if part.rule})
    notes = [f"{', '.join(dict.fromkeys(drafters))}: {listed(ids)}." for ids, drafters in owners.items()]
    return " ".join([f"Contaminated is what has {', or '.join(rules)}." if rules else "", *notes]).strip()


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
