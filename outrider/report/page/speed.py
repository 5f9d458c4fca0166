"""How fast, and what the time is spent on: speed-up with intervals, prompt by prompt, latency, shares of a step, training."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.report.page import charts
from outrider.report.page.charts import Axis, Item, Line, Lines, Mark, Panel, Rows
from outrider.report.page.groups import Colours, grouped
from outrider.report.schema import Percentiles, PromptResult, Report, Row
from outrider.report.summary import NOT_EXACT, conditions, many, say

TIMES = "times as fast as the target alone"


def speedup(report: Report, colours: Colours) -> list[Panel]:
    """A bar a row."""
    items = [_bar(row, colours[row.drafter]) for row in report.rows]
    axis = Axis(TIMES, 0, max([1.2, *(item.high for item in items)]) * 1.02, lambda value: f"{value:.3g}×")
    return [Panel(Rows("bars", items, axis, 1.0, "target alone") if items else None)]


def _bar(row: Row, colour: int) -> Item:
    if row.speedup is None:
        return Item(row.drafter, conditions(row))
    said, rest = f"{row.speedup:.2f}×", f"{say(row.tokens_per_s, '.1f')} tokens/s, plain {say(row.plain_tokens_per_s, '.1f')}"
    alarm = NOT_EXACT if row.is_inexact else ""
    tip = f"{row.drafter}, {conditions(row)}: {said} {rest}{'; ' + alarm if alarm else ''}"
    marks = []
    if row.generate_tokens_per_s and row.plain_tokens_per_s:
        also = row.generate_tokens_per_s / row.plain_tokens_per_s
        tip_also = f"{row.drafter}: {also:.2f}×, transformers' generate"
        marks.append(Mark(also, "also", tip_also, shape="diamond", radius=7))
    found, whisker = row.speedup_geomean, None
    if found is not None and found.center is not None and found.low is not None and found.high is not None:
        whisker = (found.low, found.center, found.high)
    piece = Mark(row.speedup, "bar alarmed" if alarm else f"bar {charts.hue(colour)}", tip)
    return Item(row.drafter, conditions(row), [piece], marks, whisker=whisker, value=said, text=rest, alarm=alarm)


def prompts(report: Report, colours: Colours) -> list[Panel]:
    """Every prompt a dot."""
    items = []
    for row in report.rows:
        colour, timed = colours[row.drafter], [(p.speedup, p) for p in row.per_prompt if p.speedup is not None]
        dots = [charts.dot(speedup, colour, _tip(prompt), prompt.exact is False) for speedup, prompt in timed]
        text = many(len(dots), "prompt") + (f", {len(row.different)} differ" if row.different else "")
        items.append(Item(row.drafter, conditions(row), marks=dots, text=text, colour=colour))
    values = [dot.value for item in items for dot in item.marks]
    if not values:
        return []
    low, high = min(*values, 1.0), max(*values, 1.0)
    pad = (high - low) * 0.04 or 0.1
    axis = Axis(TIMES, low - pad, high + pad, lambda value: f"{value:.2f}×")
    note = "There are too many to name each; report.json does." if len(values) > charts.TOLD else ""
    return [Panel(charts.strips(items, axis, 1.0, "alone"), note=note)]


def _tip(prompt: PromptResult) -> str:
    said = {True: "text identical", False: "TEXT DIFFERS", None: "text not compared"}[prompt.exact]
    at = "" if prompt.first_difference is None else f" after {many(prompt.first_difference, 'token')}"
    tokens = "" if prompt.tokens is None else f", {many(prompt.tokens, 'token')}"
    return f"{prompt.id}: {prompt.speedup:.2f}×{tokens}, {said}{at}"


def latency(report: Report, colours: Colours) -> list[Panel]:
    """Gaps between steps, time per token, time to the first token."""
    panels, groups = [], grouped(report)
    for name, rows in groups.items():
        series = [Line(row.drafter, colours[row.drafter], _percentiles(row.tpot_curve_ms)) for row in rows]
        tpot = _curves(series, "prompts", "ms per token")
        is_wide = tpot is None and len(groups) == 1
        series = [Line(row.drafter, colours[row.drafter], _percentiles(row.itl_curve_ms)) for row in rows]
        plain = next((row.plain_itl_curve_ms for row in rows if row.plain_itl_curve_ms), ())
        gaps = _curves([*series, Line("target alone", None, _percentiles(plain))], "gaps", "ms between steps", is_wide)
        panels.append(Panel(gaps, "Gaps between steps", _slowest(name, rows), is_wide=is_wide))
        panels.append(Panel(tpot, "Time per token, prompt by prompt", name))
    return [*panels, Panel(_first_tokens(report, colours), "Time to the first token", is_wide=True)]


def _curves(series: Sequence[Line], what: str, label: str, is_wide: bool = False) -> Lines | None:
    top = max((value for line in series for _, value in line.points if value is not None), default=1.0)
    x = Axis(f"percent of the {what} that are shorter", 0, 99, at=(0, 25, 50, 75, 95))
    width, height = (charts.WIDE, 330) if is_wide else (charts.HALF, 290)
    return charts.lines(series, x, Axis(label, 0, (top * 1.05) or 1.0), width, height, marks=(50, 95, 99))


def _slowest(name: str, rows: Sequence[Row]) -> str:
    ends = [(row.drafter, row.itl_curve_ms[-1]) for row in rows if row.itl_curve_ms]
    said = [f"{drafter} {last:,.0f} ms" for drafter, last in ends if last is not None]
    return f"{name}. Slowest gap: {', '.join(said)}." if said else name


def _percentiles(curve: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """(percent, value) up to 99; the straight part below 90 is drawn at every fifth."""
    points = [(i * 100 / max(len(curve) - 1, 1), value) for i, value in enumerate(curve)]
    return [point for i, point in enumerate(points) if point[0] <= 99 and (len(points) < 101 or i % 5 == 0 or point[0] > 90)]


def _first_tokens(report: Report, colours: Colours) -> Rows | None:
    """Half to 99 in 100 of the prompts, with a stroke at 95; the target alone once a task."""
    waits: list[tuple[str, str, int | None, Percentiles]] = []
    for name, rows in grouped(report).items():
        waits += [(row.drafter, name, colours[row.drafter], row.ttft_ms) for row in rows]
        waits += [("target alone", name, None, row.plain_ttft_ms) for row in rows if row.plain_ttft_ms.p50 is not None][:1]
    items = []
    for name, context, colour, found in waits:
        text = " / ".join(say(value, ".0f", missing="–") for value in (found.p50, found.p95, found.p99)) + " ms"
        ends = (found.p50, found.p50, found.p99)
        items.append(charts.spread(name, context, colour, ends, text, found.p95, is_hollow=colour is None))
    highs = [value for *_, found in waits for value in (found.p50, found.p99) if value is not None]
    axis = Axis("ms to the first token: half, 95 in 100 (stroke), 99 in 100 of the prompts", 0, max(highs, default=1.0) * 1.04)
    return charts.spreads(items, axis)


def spent(report: Report) -> list[Panel]:
    """Shares of a step, and of the drafted tokens."""
    steps, waste = [], []
    for row in report.rows:
        kept = None if row.wasted is None else 1 - row.wasted
        overhead = f"loop overhead {say(row.loop_overhead, '.1f', '%', scale=100)}"
        steps.append(_shares(row, {"draft": row.share.draft, "verify": row.share.verify, "other": row.share.other}, overhead))
        on_path = f"{say(row.draft_acceptance, '.0f', '%', scale=100)} of the path kept"
        waste.append(_shares(row, {"kept": kept, "wasted": row.wasted}, on_path))
    note = (
        "Of all drafted tokens that the target verified. Branches of a tree that lost count as wasted; a wasted token costs "
        "computing, never a word of text."
    )
    is_known = any(item.pieces for item in waste)
    return [
        Panel(_whole(steps) if steps else None, keys=("draft", "verify", "other")),
        Panel(_whole(waste) if is_known else None, "Wasted work", note, keys=("kept", "wasted")),
    ]


def _shares(row: Row, parts: dict[str, float | None], text: str) -> Item:
    pieces = [
        Mark(part, f"part-{name}", f"{row.drafter}, {conditions(row)}: {name} {part:.1%}", f"{part:.0%}")
        for name, part in parts.items()
        if part is not None
    ]
    return Item(row.drafter, conditions(row), pieces, text=text if pieces else "")


def _whole(items: Sequence[Item]) -> Rows:
    """Bars of one length, each cut into its parts; a part wide enough says its share."""
    return Rows("bars", items, Axis("share", 0, 1), right=190, is_bare=True)


def training(report: Report, colours: Colours) -> list[Panel]:
    """The loss while each drafter learned."""
    panels = []
    for name, training in report.training.items():
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
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
