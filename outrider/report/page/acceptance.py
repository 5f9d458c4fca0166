"""What the target keeps: by depth, by task, beside what training expected, by sort of proposal; and if answers stay right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.report.page import charts
from outrider.report.page.charts import Grid, Heat, Item, Line, Lines, Mark, Panel
from outrider.report.page.groups import CROWD, Colours, by_drafter, counted, grouped, matrix
from outrider.report.schema import Clean, Pattern, Rejections, Report, Row
from outrider.report.summary import MISSING, conditions, many, named, say

LISTED = 20
"""Most prompts named in a list; the rest is counted."""
SORTS: tuple[tuple[str, str, Callable[[Rejections], Sequence[Pattern]]], ...] = (
    ("By what was proposed", "numbers, words, punctuation and so on", lambda found: found.by_kind),
    ("By the target's entropy there", "how undecided the target was, in nats", lambda found: found.by_entropy),
    ("By rank under the target", "1 is the token it liked best", lambda found: found.by_rank),
)


def acceptance(report: Report, colours: Colours) -> list[Panel]:
    """Curves by depth for every group of rows, then heat tables by task."""
    panels, crowd = [], len(report.rows) > CROWD
    for name, rows in grouped(report).items():
        for title, pick in (
            ("All tokens up to this depth kept", lambda row: row.accepted_by_depth),
            ("Kept, given that all before it were", lambda row: row.conditional_acceptance),
        )[: 1 if crowd else 2]:
            series = [Line(row.drafter, colours[row.drafter], list(enumerate(pick(row), 1))) for row in rows]
            drawing = by_depth(series, charts.THIRD if crowd else charts.HALF)
            panels += [Panel(drawing, name if crowd else title, "" if crowd else name)] if drawing else []
    return panels + matrix(report, "Tokens per step by task", lambda row: row.tokens_per_step) + _by_task(report)


def by_depth(series: Sequence[Line], width: int = charts.HALF) -> Lines | None:
    deepest = max((len(line.points) for line in series), default=0)
    depths = range(1, deepest + 1, 1 + deepest // 12)
    return charts.lines(series, charts.Axis("depth", 1, max(deepest, 2), at=depths), charts.PERCENT, width)


def _by_task(report: Report) -> list[Panel]:
    """A heat table a drafter: tasks down, depths across."""
    panels: list[Panel] = []
    for drafter, rows in by_drafter(report).items() if len(grouped(report)) > 1 else ():
        deepest = max(len(row.accepted_by_depth) for row in rows)
        table = []
        for row in rows:
            found = charts.cells(row.accepted_by_depth, deepest)
            told = [
                cell._replace(tip=f"{drafter}, {conditions(row)}: depth {i} kept {say(cell.value, '.1%')}")
                for i, cell in enumerate(found, 1)
            ]
            table.append((row.task, f"T {row.temperature:g}", told))
        heat = Heat("task", [str(i) for i in range(1, deepest + 1)], table, 0, 1)
        panels += [Panel(heat, f"{drafter}: drafts whole up to depth, % of those that long")] if deepest else []
    return panels


def predicted(report: Report, colours: Colours) -> list[Panel]:
    """What training expected beside what was served; where rows are many, what is missing by depth, a line a row."""
    found = [row for row in report.rows if row.predicted_by_depth]
    if len(found) > CROWD:
        deepest = max(len(_gaps(row)) for row in found)
        table = [
            (row.drafter, conditions(row), charts.cells([None if gap is None else -gap for gap in _gaps(row)], deepest))
            for row in found
        ]
        return [Panel(Heat("depth", [str(depth) for depth in range(1, deepest + 1)], table, 0, 0.4))]
    panels = []
    for row in found:
        colour = colours[row.drafter]
        series = [
            Line("served", colour, list(enumerate(row.accepted_by_depth, 1))),
            Line("expected", colour, list(enumerate(row.predicted_by_depth, 1)), dashed=True),
        ]
        drawing = by_depth(series)
        panels += [Panel(drawing, row.drafter, f"{conditions(row)}. {_gap(row)}")] if drawing else []
    return panels


def _gaps(row: Row) -> list[float | None]:
    """[k]: what was served above what was expected."""
    pairs = zip(row.accepted_by_depth, row.predicted_by_depth, strict=False)
    return [None if served is None or expected is None else served - expected for served, expected in pairs]


def _gap(row: Row) -> str:
    found = [(gap, depth) for depth, gap in enumerate(_gaps(row), 1) if gap is not None]
    if not found:
        return ""
    gap, depth = max(found, key=lambda pair: abs(pair[0]))
    return (
        f"Furthest apart at depth {depth}, {abs(gap) * 100:.0f} points {'above' if gap > 0 else 'beneath'} what was expected."
    )


def rejections(report: Report, colours: Colours) -> list[Panel]:
    """The depth at which the target first said no, on one scale for all."""
    shown = [(row, row.rejections_by_depth) for row in report.rows if row.rejections_by_depth]
    if len(shown) > CROWD:
        return counted(shown, "depth", 1)
    panels, most = [], max((count for _, counts in shown for count in counts), default=1)
    for row, counts in shown:
        note = many(sum(counts), "rejection") + (f" in {many(row.steps, 'step')}" if row.steps else "")
        drawing = charts.columns(counts, most, colours[row.drafter], "depth", "rejections")
        panels.append(Panel(drawing, row.drafter, f"By depth. {conditions(row)}. {note}"))
    return panels


def histogram(report: Report, colours: Colours) -> list[Panel]:
    """How many drafted tokens a step kept."""
    shown = [(row, _kept(row)) for row in report.rows if row.accepted_histogram]
    if len(shown) > CROWD:
        return counted(shown, "drafted tokens kept", 0)
    panels = []
    for row, counts in shown:
        mean = sum(kept * count for kept, count in enumerate(counts)) / (sum(counts) or 1)
        drawing = charts.columns(counts, max(counts), colours[row.drafter], "drafted tokens kept", "steps", first=0)
        note = f"By drafted tokens kept. {conditions(row)}. {mean:.2f} kept on average, besides the target's own."
        panels.append(Panel(drawing, row.drafter, note))
    return panels


def _kept(row: Row) -> list[int]:
    """Steps by how many drafted tokens they kept, over all depths drafted."""
    width = max((len(line) for line in row.accepted_histogram), default=0)
    return [sum(line[kept] for line in row.accepted_histogram if kept < len(line)) for kept in range(width)]


def patterns(report: Report, colours: Colours) -> list[Panel]:
    """Kept share by sort of proposal, over all rows of a drafter: read along for one sort, down for one drafter."""
    found = {
        drafter: [row.rejections for row in rows if row.rejections is not None]
        for drafter, rows in by_drafter(report).items()
    }  # fmt: skip
    panels = []
    for title, note, pick in SORTS:
        names = list(dict.fromkeys(pattern.name for parts in found.values() for part in parts for pattern in pick(part)))
        items = []
        for name in names:
            marks = []
            for drafter, parts in found.items():
                own = [pattern for part in parts for pattern in pick(part) if pattern.name == name]
                tested, colour = sum(pattern.tested for pattern in own), colours[drafter]
                if tested:
                    share = sum(pattern.kept for pattern in own) / tested
                    tip = f"{drafter}, {name}: {share:.0%} of {tested:,} kept"
                    marks.append(Mark(share, f"mark {charts.hue(colour)}", tip, charts.shape_of(colour), 5.5))
            items.append(Item(name, marks=marks, span=charts.Span(0, 1, "rung")))
        axis = charts.PERCENT._replace(at=(0, 0.5, 1))
        drawing = charts.Rows("marks", items, axis, row=30, width=charts.THIRD, left=112, right=14)
        panels += [Panel(drawing, title, note)] if any(item.marks for item in items) else []
    return panels


def scores(report: Report, colours: Colours) -> list[Panel]:
    """Scores with the drafter (filled mark) and of the target alone (stroke)."""
    items = []
    for row in report.rows:
        score = row.score
        if score is None or (score.drafted is None and score.plain is None):
            continue
        ends = [value for value in (score.drafted, score.plain) if value is not None]
        text = f"{say(score.drafted, '.1f', '%', scale=100)}, alone {say(score.plain, '.1f', '%', scale=100)}"
        text += f", of {score.prompts:,}" if score.prompts else ""
        context = " · ".join(part for part in (row.task, f"T {row.temperature:g}", score.measure) if part)
        whole = (min(ends), score.drafted, max(ends))
        items.append(charts.spread(row.drafter, context, colours[row.drafter], whole, text, score.plain))
    drawing = charts.spreads(items, charts.PERCENT._replace(label="share of the answers that are right"))
    return [Panel(drawing)] if drawing else []


def clean(report: Report) -> list[Panel]:
    """All prompts beside those that the drafter can't have seen."""
    found = [(row, row.clean) for row in report.rows if row.clean is not None]
    if not found:
        return []
    heads = ("", "overlapping", "tokens per step: all", "clean", "speed-up: all", "clean", "right: all", "clean")
    # drafters that learned from the same data overlap with the same prompts
    owners: dict[tuple[str, ...], list[str]] = {}
    for row, part in found:
        if part.overlapping:
            owners.setdefault(part.overlapping, []).append(row.drafter)
    rules = sorted({part.rule for _, part in found if part.rule})
    notes = [f"{', '.join(dict.fromkeys(drafters))}: {listed(ids)}." for ids, drafters in owners.items()]
    note = " ".join([f"Overlap is {', or '.join(rules)}." if rules else "", *notes]).strip()
    return [Panel(Grid(heads, [_clean_line(row, part) for row, part in found]), note=note)]


def _clean_line(row: Row, part: Clean) -> tuple[str, ...]:
    unknown = f", {row.prompts - part.checked} not known" if part.checked < row.prompts else ""
    overlap = f"{len(part.overlapping)} of {row.prompts}{unknown}" if part.checked else MISSING
    right, still = (None if score is None else score.drafted for score in (row.score, part.score))
    return (
        named(row), overlap, say(row.tokens_per_step), say(part.tokens_per_step), say(row.speedup, ".2f", "×"),
        say(part.speedup, ".2f", "×"), say(right, ".1f", "%", scale=100), say(still, ".1f", "%", scale=100),
    )  # fmt: skip


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
