"""The first figures of the page: speed, quality, cost and latency of the drafter in the headline."""

from __future__ import annotations

from typing import NamedTuple

from outrider.report.page.cost import CostLine, cost_line
from outrider.report.parts import Percentiles
from outrider.report.schema import Report, Row
from outrider.report.summary import MISSING, UNDER_LOAD, compared, interval, many, say


class Tile(NamedTuple):
    """One figure."""

    name: str
    value: str
    detail: str
    is_bad: bool = False
    cost: CostLine | None = None
    """Set if the figure depends on the reader's price."""


def tiles(report: Report) -> list[Tile]:
    """The tiles of the leading row; empty for a report without rows."""
    row = report.lead
    if row is None:
        return []
    cost = cost_line(report, row)
    return [
        Tile(
            f"Speed-up of {row.drafter}", say(row.speedup, ".2f", "×"), _speed_detail(row), row.under_load is not None
        ),
        Tile("Equal texts", _equal(row), _quality_detail(row), row.is_inexact),
        Tile("Cost of a million tokens", MISSING if cost is None else cost.texts["after"], "", cost=cost),
        Tile("Time per token, median", say(row.tpot_ms.p50, ".1f", " ms"), _alone(row.plain_tpot_ms, ".1f")),
        Tile("First token, median", say(row.ttft_ms.p50, ".0f", " ms"), _alone(row.plain_ttft_ms, ".0f")),
    ]


def _speed_detail(row: Row) -> str:
    if row.under_load is not None:
        return UNDER_LOAD
    if row.speedup is None:
        return ""
    ends = interval(row.speedup_range)
    return f"95 % interval {ends}" if ends else f"{many(row.prompts, 'prompt')}, too few for an interval"


def _equal(row: Row) -> str:
    if row.exact is None and not row.is_inexact:
        return "not compared"
    count = len(row.different) or (row.prompts if row.is_inexact else 0)
    return f"{row.prompts - count} of {row.prompts}"


def _quality_detail(row: Row) -> str:
    tokens = compared(row)
    parts = [f"drawn at temperature {row.temperature:g}" if row.temperature > 0 else ""]
    parts = [many(tokens, "token") + " compared"] if tokens is not None else parts
    return "; ".join(filter(None, parts))


def _alone(percentiles: Percentiles, spec: str) -> str:
    return f"alone {say(percentiles.p50, spec, ' ms')}"
