"""What a comparison's page draws: a forest of ratios, acceptance by depth in both, machines side by side."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.report.compare import Comparison, plain
from outrider.report.page.acceptance import by_depth
from outrider.report.page.charts import Axis, Line, Panel, spread, spreads
from outrider.report.schema import Report
from outrider.report.summary import conditions


def ratios(found: Comparison) -> list[Panel]:
    """A forest of ratios: one chart a measure."""
    panels = []
    pairs = [(number, other.name, pair) for number, other in enumerate(found.others) for pair in other.pairs]
    for place, first in enumerate(pairs[0][2].changes):
        changes = [pair.changes[place] for *_, pair in pairs]
        ends = [end for change in changes for end in (change.low, change.ratio, change.high) if end is not None]
        low, high = min([*ends, 1.0]), max([*ends, 1.0])
        pad = 0.04 * (high - low) or 0.05
        axis = Axis(f"{found.name} = 1", low - pad, high + pad, lambda value: f"{value:.3g}")
        items = [
            spread(
                pair.name, name, number, (change.low, change.ratio, change.high), f"{change.ratio:.3f}  {change.verdict}",
                is_hollow=change.verdict not in ("better", "worse"),
            )
            for (number, name, pair), change in zip(pairs, changes, strict=True)
            if change.ratio is not None
        ]  # fmt: skip
        better = "right of the line is better" if first.more_is_better else "left of the line is better"
        panels.append(Panel(spreads(items, axis, 1.0, found.name), f"{first.measure}, {better}"))
    return panels


def depths(found: Comparison) -> list[Panel]:
    panels = []
    for number, other in enumerate(found.others):
        for pair in other.pairs:
            base = Line(found.name, None, list(enumerate(pair.base.accepted_by_depth, 1)))
            line = Line(other.name, number, list(enumerate(pair.other.accepted_by_depth, 1)))
            panels.append(Panel(by_depth([base, line]), pair.name, conditions(pair.other)))
    return panels


def machines(reports: Sequence[Report]) -> list[list[str]]:
    """The fingerprints beside one another, a line an entry; ≠ marks what differs."""
    keys = dict.fromkeys(key for report in reports for key in report.fingerprint)
    lines = [["target", *(report.target for report in reports)]] if keys else []
    lines += [[key, *(plain(report.fingerprint.get(key)) for report in reports)] for key in keys]
    return [[f"≠ {key}" if len(set(values)) > 1 else key, *values] for key, *values in lines]
