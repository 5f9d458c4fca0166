"""Charts of speed: speed-up with intervals, prompt by prompt, latency, training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.report.page import charts
from outrider.report.page.charts import Axis, Dot, Line, Lines, Panel, Rows
from outrider.report.page.groups import Colours, grouped
from outrider.report.parts import Percentiles, PromptResult
from outrider.report.schema import Report, Row
from outrider.report.summary import many, say

TIMES = "times as fast as the target alone"


def speedup(report: Report, *, is_narrow: bool = False) -> Rows:
    """A bar per row.  is_narrow: for a phone, with names above the bars."""
    axis = Axis(TIMES, 0, max([1.2, *map(reach, report.rows)]) * 1.02, lambda value: f"{value:.3g}×")
    chart = Rows("bars", report.rows, axis, 1.0, "target alone")
    return replace(chart, row=62, width=charts.PHONE, left=10, right=8) if is_narrow else chart


def generate_speedup(row: Row) -> float | None:
    """transformers' generate relative to plain decoding."""
    return (
        row.generate_tokens_per_s / row.plain_tokens_per_s
        if row.generate_tokens_per_s and row.plain_tokens_per_s
        else None
    )


def whisker(row: Row) -> tuple[float, float] | None:
    """The ends of the interval, drawn over the end of the bar."""
    ends = row.speedup_range
    return None if ends is None or ends.low is None or ends.high is None else (ends.low, ends.high)


def reach(row: Row) -> float:
    """The highest speed-up drawn for a row."""
    return 0.0 if row.speedup is None else max(row.speedup, generate_speedup(row) or 0.0, *(whisker(row) or ()))


def prompts(report: Report) -> Rows | None:
    """A dot per prompt; None if none was timed."""
    rows = []
    for row in report.rows:
        timed = [(prompt.speedup, prompt) for prompt in row.per_prompt if prompt.speedup is not None]
        rows.append((row, [Dot(speedup, _tip(prompt), prompt.exact is False) for speedup, prompt in timed]))
    values = [dot.value for _, dots in rows for dot in dots]
    if not values:
        return None
    low, high = min(*values, 1.0), max(*values, 1.0)
    pad = (high - low) * 0.04 or 0.1
    return charts.strips(rows, Axis(TIMES, low - pad, high + pad, lambda value: f"{value:.2f}×"), 1.0, "alone")


def _tip(prompt: PromptResult) -> str:
    comparison = {True: "text identical", False: "TEXT DIFFERS", None: "text not compared"}[prompt.exact]
    at = "" if prompt.first_difference is None else f" after {many(prompt.first_difference, 'token')}"
    tokens = "" if prompt.tokens is None else f", {many(prompt.tokens, 'token')}"
    return f"{prompt.id}: {prompt.speedup:.2f}×{tokens}, {comparison}{at}"


def latency(report: Report, colours: Colours) -> list[Panel]:
    """Time per token, then gaps between steps, both next to the target alone."""
    panels, groups = [], grouped(report)
    for name, rows in groups.items():
        tpot = _curves(rows, "tpot_curve_ms", colours, "prompts", "ms per token")
        gaps = _curves(rows, "itl_curve_ms", colours, "gaps", "ms between steps", tpot is None and len(groups) == 1)
        panels.append(Panel(tpot, "Time per token, prompt by prompt", name))
        panels.append(
            Panel(gaps, "Gaps between pieces of text", _slowest(name, rows), is_wide=tpot is None and len(groups) == 1)
        )
    return panels


def _curves(
    rows: Sequence[Row], field: str, colours: Colours, what: str, label: str, is_wide: bool = False
) -> Lines | None:
    """A curve of percentiles per drafter, and one for the target alone."""
    series = [Line(row.drafter, colours[row.drafter], _percentiles(getattr(row, field))) for row in rows]
    plain = next((curve for row in rows if (curve := getattr(row, f"plain_{field}"))), ())
    series.append(Line("target alone", None, _percentiles(plain)))
    top = max((value for line in series for _, value in line.points if value is not None), default=1.0)
    x = Axis(f"percent of the {what} that are shorter", 0, 99, at=(0, 25, 50, 75, 95))
    width, height = (charts.WIDE, 330) if is_wide else (charts.HALF, 290)
    return charts.lines(series, x, Axis(label, 0, (top * 1.05) or 1.0), width, height, marks=(50, 95, 99))


def _slowest(name: str, rows: Sequence[Row]) -> str:
    ends = [(row.drafter, row.itl_curve_ms[-1]) for row in rows if row.itl_curve_ms]
    slowest = [f"{drafter} {last:,.0f} ms" for drafter, last in ends if last is not None]
    return f"{name}. Slowest gap: {', '.join(slowest)}." if slowest else name


def _percentiles(curve: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """(percent, value) up to 99; below 90, where curves are straight, every fifth."""
    points = [(i * 100 / max(len(curve) - 1, 1), value) for i, value in enumerate(curve)]
    return [
        point for i, point in enumerate(points) if point[0] <= 99 and (len(points) < 101 or i % 5 == 0 or point[0] > 90)
    ]


def first_tokens(report: Report) -> Rows | None:
    """(drafter, conditions, percentiles) of every row; the drafter is None for the target alone, once per task."""
    waits: list[tuple[str | None, str, Percentiles]] = []
    for name, rows in grouped(report).items():
        waits += [(row.drafter, name, row.ttft_ms) for row in rows]
        waits += [(None, name, row.plain_ttft_ms) for row in rows if row.plain_ttft_ms.p50 is not None][:1]
    highs = [value for *_, wait in waits for value in (wait.p50, wait.p99) if value is not None]
    axis = Axis(
        "ms to the first token: median, 95th (stroke) and 99th percentile of the prompts",
        0,
        max(highs, default=1.0) * 1.04,
    )
    return Rows("marks", waits, axis, row=40) if any(wait.p50 is not None for *_, wait in waits) else None


def training(report: Report, colours: Colours) -> list[Panel]:
    """The training loss of each drafter."""
    panels = []
    for name, training in report.training.items():
        if training.seconds == 0:  # nothing to train
            continue
        curve = training.loss_curve[:: 1 + len(training.loss_curve) // 400]
        values = [loss for _, loss in curve if loss is not None]
        x = Axis("training step", 0, max((step for step, _ in curve), default=1), lambda value: f"{value:,.0f}")
        y = Axis("loss", min([0.0, *values]), max([*values, 0.1]) * 1.03)
        drawing = charts.lines([Line(say(values[-1] if values else None, ".3g"), colours[name], curve)], x, y, marks=())
        counts = ((training.steps, "step"), (training.tokens, "token"))
        steps, tokens = ("" if count is None else many(count, noun) for count, noun in counts)
        panels.append(Panel(drawing, name, ", ".join(filter(None, (steps, _duration(training.seconds), tokens)))))
    return panels


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
