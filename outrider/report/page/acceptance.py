"""What the target keeps: by depth, by task, against what training expected, and by sort of proposal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.report.page.charts import (
    HALF,
    THIRD,
    Axis,
    Cell,
    Line,
    Rung,
    columns,
    heat,
    ladder,
    lines,
    many,
    panel,
    say,
    tag,
)  # fmt: skip
from outrider.report.page.figure import CROWD, Colours, by_drafter, counted, figure, grouped, kept_share, matrix

if TYPE_CHECKING:
    from outrider.report.schema import Pattern, Rejections, Report, Row

PERCENT = Axis("kept", 0, 1, lambda value: f"{value:.0%}", (0, 0.25, 0.5, 0.75, 1))
SORTS: tuple[tuple[str, str, Callable[[Rejections], Sequence[Pattern]]], ...] = (
    ("By what was proposed", "numbers, words, punctuation and so on", lambda found: found.by_kind),
    ("By the target's entropy there", "how undecided the target was, in nats", lambda found: found.by_entropy),
    ("By rank under the target", "1 is the token it liked best", lambda found: found.by_rank),
)


def acceptance(report: Report, colours: Colours) -> str:
    panels, crowd = [], len(report.rows) > CROWD
    for name, rows in grouped(report).items():
        for title, pick in (
            ("All tokens up to this depth kept", lambda row: row.accepted_by_depth),
            ("Kept, given that all before it were", lambda row: row.conditional_acceptance),
        )[: 1 if crowd else 2]:
            series = [Line(row.drafter, colours[row.drafter], list(enumerate(pick(row), 1))) for row in rows]
            drawing = by_depth(series, THIRD if crowd else HALF)
            panels += [panel(name if crowd else title, drawing, "" if crowd else name)] if drawing else []
    heats = _by_task(report)
    per_step = matrix(report, lambda row: row.tokens_per_step, ".2f")
    heats = (panel("Tokens per step by task", per_step) if per_step else "") + heats
    panels += [tag("div", heats, class_="full")] if heats else []
    says = "How often the target keeps what the drafter proposed: the chance that a draft survives whole up to a depth."
    if not crowd:
        says = says.replace("proposed: the", "proposed. On the left the")
        says += " On the right the chance of each further token, once the ones before it stand."
    return figure("acceptance", "Acceptance by depth", says, *panels, across=3 if crowd else 2)


def by_depth(series: Sequence[Line], width: int = HALF) -> str:
    deepest = max((len(line.points) for line in series), default=0)
    depths = range(1, deepest + 1, 1 + deepest // 12)
    return lines(series, Axis("depth", 1, max(deepest, 2), at=depths), PERCENT, width=width)


def _by_task(report: Report) -> str:
    """A heat table a drafter: tasks down, depths across."""
    if len(grouped(report)) < 2:
        return ""
    parts = ""
    for drafter, rows in by_drafter(report).items():
        deepest = max(len(row.accepted_by_depth) for row in rows)
        if not deepest:
            continue
        table = []
        for row in rows:
            values = [*row.accepted_by_depth, *[None] * (deepest - len(row.accepted_by_depth))]
            cells = [
                Cell(v, say(v, ".0f", scale=100, missing="–"), f"{drafter}, {row.conditions}: depth {i} kept {say(v, '.1%')}")
                for i, v in enumerate(values, 1)
            ]
            table.append((row.task, f"T {row.temperature:g}", cells))
        heads = [str(i) for i in range(1, deepest + 1)]
        parts += panel(f"{drafter}: drafts whole up to depth, % of those that long", heat("task", heads, table, 0, 1))
    return tag("div", parts, class_="heats") if parts else ""


def predicted(report: Report, colours: Colours) -> str:
    """What training expected beside what was served."""
    found, panels = [row for row in report.rows if row.predicted_by_depth], []
    for row in found[: 0 if len(found) > CROWD else CROWD]:
        colour = colours[row.drafter]
        series = [
            Line("served", colour, list(enumerate(row.accepted_by_depth, 1))),
            Line("expected", colour, list(enumerate(row.predicted_by_depth, 1)), dashed=True),
        ]
        drawing = by_depth(series)
        panels += [panel(row.drafter, drawing, f"{row.conditions}. {_gap(row)}")] if drawing else []
    if len(found) > CROWD:
        says = "Points that fewer drafts were kept whole up to a depth than training expected; below 0 more were kept."
        return figure("predicted", "Expected in training, served here", says, panel("", _short(found)))
    says = (
        "The dashed line is what the drafter's training expected on its own data; the full line is what the target kept here. "
        "Served far beneath expected: the data differ, or the export is wrong. Both lie low: the drafter needs training."
    )
    return figure("predicted", "Expected in training, served here", says, *panels, across=2)


def _gaps(row: Row) -> list[float | None]:
    """[k]: what was served above what was expected."""
    pairs = zip(row.accepted_by_depth, row.predicted_by_depth, strict=False)
    return [None if served is None or expected is None else served - expected for served, expected in pairs]


def _short(rows: Sequence[Row]) -> str:
    """What is missing by depth, a line a row, where there are too many for a drawing each."""
    deepest = max(len(_gaps(row)) for row in rows)
    table = []
    for row in rows:
        missing = [None if gap is None else -gap for gap in _gaps(row)]
        missing += [None] * (deepest - len(missing))
        cells = [Cell(gap, say(gap, ".0f", scale=100, missing="–")) for gap in missing]
        table.append((row.drafter, row.conditions, cells))
    return heat("depth", [str(depth) for depth in range(1, deepest + 1)], table, 0, 0.4)


def _gap(row: Row) -> str:
    found = [(gap, depth) for depth, gap in enumerate(_gaps(row), 1) if gap is not None]
    if not found:
        return ""
    gap, depth = max(found, key=lambda pair: abs(pair[0]))
    side = "above" if gap > 0 else "beneath"
    return f"Furthest apart at depth {depth}, {abs(gap) * 100:.0f} points {side} what was expected."


def rejections(report: Report, colours: Colours) -> str:
    says = "The depth at which the target first said no, on one scale for all. A rejection costs time, never a word of text."
    shown = [(row, row.rejections_by_depth) for row in report.rows if row.rejections_by_depth]
    if len(shown) > CROWD:
        return figure("rejections", "Rejections by depth", says, counted(shown, "depth", 1))
    panels, most = [], max((count for _, counts in shown for count in counts), default=1)
    for row, _ in shown:
        total = sum(row.rejections_by_depth)
        note = f"{row.conditions}. {many(total, 'rejection')}" + (f" in {many(row.steps, 'step')}" if row.steps else "")
        drawing = columns(row.rejections_by_depth, most, colours[row.drafter], "depth", "rejections")
        panels += [panel(row.drafter, drawing, note)] if drawing else []
    return figure("rejections", "Rejections by depth", says, *panels, across=2 if len(panels) in (2, 4) else 3)


def patterns(report: Report, colours: Colours) -> str:
    """Kept share by sort of proposal, over all rows of a drafter."""
    found = {
        drafter: [row.rejections for row in rows if row.rejections is not None]
        for drafter, rows in by_drafter(report).items()
    }  # fmt: skip
    panels = []
    for title, note, pick in SORTS:
        names = list(dict.fromkeys(pattern.name for parts in found.values() for part in parts for pattern in pick(part)))
        rungs = []
        for name in names:
            values: list[tuple[str, int | None, float | None, str]] = []
            for drafter, parts in found.items():
                share, tested = kept_share([pattern for part in parts for pattern in pick(part) if pattern.name == name])
                values.append((drafter, colours[drafter], share, f" of {tested:,} kept"))
            rungs.append(Rung(name, values))
        drawing = ladder(rungs, Axis("kept", 0, 1, lambda value: f"{value:.0%}", (0, 0.5, 1)), THIRD)
        panels += [panel(title, drawing, note)] if drawing else []
    shown = {drafter: colours[drafter] for drafter, parts in found.items() if parts}
    keys = " ".join(tag("span", tag("i", class_=f"c{c % 7} swatch") + _text(name), class_="key") for name, c in shown.items())
    says = "The same drafts by what was proposed. A sort that lies far left is where a better drafter would gain."
    body = figure("patterns", "What is turned down", says, *panels, across=3)
    return body.replace("</figcaption>", f'<p class="keys flush">{keys}</p></figcaption>', 1) if panels else body


def _text(name: str) -> str:
    from html import escape

    return escape(name)


def histogram(report: Report, colours: Colours) -> str:
    """How many drafted tokens a step kept."""
    says = "A step keeps so many drafted tokens, and the target adds one of its own. A tall first column is work for nothing."
    counts = [(row, _kept(row)) for row in report.rows if row.accepted_histogram]
    if len(counts) > CROWD:
        return figure("histogram", "Tokens kept in a step", says, counted(counts, "drafted tokens kept", 0))
    panels = []
    for row, found in counts:
        total = sum(found) or 1
        drawing = columns(found, max(found), colours[row.drafter], "drafted tokens kept", "steps", first=0)
        mean = sum(kept * count for kept, count in enumerate(found)) / total
        panels.append(panel(row.drafter, drawing, f"{row.conditions}. {mean:.2f} kept on average, besides the target's own."))
    return figure("histogram", "Tokens kept in a step", says, *panels, across=2 if len(panels) in (2, 4) else 3)


def _kept(row: Row) -> list[int]:
    """Steps by how many drafted tokens they kept, over all depths drafted."""
    width = max((len(line) for line in row.accepted_histogram), default=0)
    return [sum(line[kept] for line in row.accepted_histogram if kept < len(line)) for kept in range(width)]
