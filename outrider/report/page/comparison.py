"""Charts of a comparison: a forest plot of ratios, acceptance by depth in both, machines side by side."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.report.compare import Comparison, plain
from outrider.report.page.acceptance_charts import by_depth
from outrider.report.page.charts import Axis, Line, Panel, Rows
from outrider.report.schema import Report
from outrider.report.summary import conditions


def ratios(comparison: Comparison) -> list[tuple[str, Rows]]:
    """Forest plots of ratios, one per measure: the title, and (number and name of the report, pair, change) by row."""
    charts = []
    pairs = [(number, other.name, pair) for number, other in enumerate(comparison.others) for pair in other.pairs]
    for index, first in enumerate(pairs[0][2].changes):
        changes = [(number, name, pair, pair.changes[index]) for number, name, pair in pairs]
        items = [item for item in changes if item[3].ratio is not None]
        ends = [end for _, _, _, change in items for end in (change.low, change.ratio, change.high) if end is not None]
        low, high = min([*ends, 1.0]), max([*ends, 1.0])
        pad = 0.04 * (high - low) or 0.05
        axis = Axis(f"{comparison.name} = 1", low - pad, high + pad, lambda value: f"{value:.3g}")
        side = "right" if first.more_is_better else "left"
        charts.append(
            (f"{first.measure}, {side} of the line is better", Rows("marks", items, axis, 1.0, comparison.name, row=40))
        )
    return [(title, chart) for title, chart in charts if chart.items]


def depths(comparison: Comparison) -> list[Panel]:
    panels = []
    for number, other in enumerate(comparison.others):
        for pair in other.pairs:
            base = Line(comparison.name, None, list(enumerate(pair.base.accepted_by_depth, 1)))
            line = Line(other.name, number, list(enumerate(pair.other.accepted_by_depth, 1)))
            panels.append(Panel(by_depth([base, line]), pair.name, conditions(pair.other)))
    return panels


def machines(reports: Sequence[Report]) -> list[list[str]]:
    """The fingerprints side by side, a line per entry; ≠ marks differences."""
    keys = dict.fromkeys(key for report in reports for key in report.fingerprint)
    lines = [["target", *(report.target for report in reports)]] if keys else []
    lines += [[key, *(plain(report.fingerprint.get(key)) for report in reports)] for key in keys]
    return [[f"≠ {key}" if len(set(values)) > 1 else key, *values] for key, *values in lines]
