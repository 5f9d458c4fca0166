"""What a comparison's page draws: a forest of ratios, acceptance by depth in both, machines side by side."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.report.compare import Comparison, cells_of, plain
from outrider.report.page.acceptance import by_depth
from outrider.report.page.charts import Axis, Grid, Line, Panel, spread, spreads
from outrider.report.schema import Report
from outrider.report.summary import conditions


def ratios(found: Comparison) -> list[Panel]:
    """A forest of ratios: one chart a measure."""
    panels = []
    for place in range(4):
        shown = [
            (pair, change, other.name, number)
            for number, other in enumerate(found.others)
            for pair in other.pairs
            if (change := pair.changes[place]).ratio is not None
        ]
        if not shown:
            continue
        ends = [value for _, change, _, _ in shown for value in (change.low, change.ratio, change.high) if value is not None]
        low, high = min([*ends, 1.0]), max([*ends, 1.0])
        pad = 0.04 * (high - low) or 0.05
        axis = Axis(f"{found.name} = 1", low - pad, high + pad, lambda value: f"{value:.3g}")
        items = [
            spread(
                pair.name, name, number, (change.low, change.ratio, change.high), f"{change.ratio:.3f}  {change.verdict}",
                is_hollow=change.verdict not in ("better", "worse"),
            )
            for pair, change, name, number in shown
        ]  # fmt: skip
        change = shown[0][1]
        better = "right of the line is better" if change.more_is_better else "left of the line is better"
        panels.append(Panel(spreads(items, axis, 1.0, found.name), f"{change.measure}, {better}"))
    return panels


def numbers(found: Comparison) -> Grid:
    heads = ("", "measure", found.name, "other", "ratio", "95 %", "prompts", "")
    rows = [
        (f"{pair.name} · {other.name}", *cells_of(change))
        for other in found.others
        for pair in other.pairs
        for change in pair.changes
    ]
    return Grid(heads, rows)


def depths(found: Comparison) -> list[Panel]:
    panels = []
    for number, other in enumerate(found.others):
        for pair in other.pairs:
            series = [
                Line(found.name, None, list(enumerate(pair.base.accepted_by_depth, 1))),
                Line(other.name, number, list(enumerate(pair.other.accepted_by_depth, 1))),
            ]
            drawing = by_depth(series)
            panels += [Panel(drawing, pair.name, conditions(pair.other))] if drawing else []
    return panels


def machines(reports: Sequence[tuple[str, Report]]) -> Grid | None:
    """The fingerprints beside one another; ≠ marks what differs."""
    keys = dict.fromkeys(key for _, report in reports for key in report.fingerprint)
    if not keys:
        return None
    rows = [("target", *(report.target for _, report in reports))]
    rows += [(key, *(plain(report.fingerprint.get(key)) for _, report in reports)) for key in keys]
    rows = [(f"≠ {key}" if len(set(values)) > 1 else key, *values) for key, *values in rows]
    return Grid(("", *(name for name, _ in reports)), rows)
