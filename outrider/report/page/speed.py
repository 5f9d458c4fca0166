"""How fast, and what the time is spent on: speed-up with intervals, prompt by prompt, latency, shares of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from outrider.report.page.charts import (
    HALF,
    MISSING,
    TOLD,
    WIDE,
    Axis,
    Bar,
    Dot,
    Line,
    Shares,
    Spread,
    Strip,
    bars,
    lines,
    many,
    panel,
    say,
    shares,
    spreads,
    strips,
    tag,
)  # fmt: skip
from outrider.report.page.figure import NOT_EXACT, Colours, figure, grid, grouped, matrix, named, ranged

if TYPE_CHECKING:
    from outrider.report.schema import Percentiles, Report, Row

TIMES = "times as fast as the target alone"


def speed(report: Report, colours: Colours) -> str:
    items = [_bar(row, colours[row.drafter]) for row in report.rows]
    highs = [value for item in items for value in (item.value, item.also, item.spread and item.spread[2]) if value]
    says = "Tokens per second over the same prompts, divided by those of the target alone. Longer is faster."
    if any(item.spread is not None for item in items):
        says += " The whisker is the geometric mean of the prompts' own speed-ups with its 95 % interval."
    if any(item.also is not None for item in items):
        says += " The hollow diamond is transformers' own generate with the target alone."
    axis = Axis(TIMES, 0, max([*highs, 1.2]) * 1.02, lambda value: f"{value:.3g}×")
    panels = [panel("", bars(items, axis, 1.0, "target alone"))] if items else []
    by_task = matrix(report, lambda row: row.speedup, ".2f", "×")
    panels += [panel("Speed-up by task", by_task)] if by_task else []
    if any(row.speedup_geomean is not None or row.speedup_of_means is not None for row in report.rows):
        note = "Ratio of totals weighs every second alike; the geometric mean weighs every prompt alike, and has the interval; "
        note += "mean tokens/s over mean tokens/s is what Spec-Bench prints. Where they disagree, a few prompts decide."
        panels.append(panel("Three ways to average", _averages(report), note))
    return figure("speedup", "Speed-up", says, *panels)


def _bar(row: Row, colour: int) -> Bar:
    text, generate, spread = MISSING, None, None
    if row.speedup is not None:
        text = f"{row.speedup:.2f}× {say(row.tokens_per_s, '.1f')} tokens/s, plain {say(row.plain_tokens_per_s, '.1f')}"
    if row.generate_tokens_per_s and row.plain_tokens_per_s:
        generate = row.generate_tokens_per_s / row.plain_tokens_per_s
    found = row.speedup_geomean
    if found is not None and found.center is not None and found.low is not None and found.high is not None:
        spread = (found.low, found.center, found.high)
    alarm = NOT_EXACT if row.is_inexact else ""
    return Bar(row.drafter, row.conditions, colour, row.speedup, text, alarm, generate, spread)


def _averages(report: Report) -> str:
    heads = ("", "ratio of totals", "geometric mean (95 %)", "Spec-Bench's", "tokens per step (95 %)")
    rows = [
        (named(row), say(row.speedup, ".2f", "×"), ranged(row.speedup_geomean), say(row.speedup_of_means, ".2f", "×"),
         ranged(row.tokens_per_step_range, unit=""))
        for row in report.rows
    ]  # fmt: skip
    return grid(heads, rows)


def prompts(report: Report, colours: Colours) -> str:
    items = []
    for row in report.rows:
        dots = [Dot(p.speedup, _tip(p), p.exact is False) for p in row.per_prompt if p.speedup is not None]
        text = many(len(dots), "prompt") + (f", {len(row.different)} differ" if row.different else "")
        items.append(Strip(row.drafter, row.conditions, colours[row.drafter], dots, text))
    values = [dot.value for item in items for dot in item.dots] or [1.0]
    low, high = min([*values, 1.0]), max([*values, 1.0])
    pad = (high - low) * 0.04 or 0.1
    axis = Axis(TIMES, low - pad, high + pad, lambda value: f"{value:.2f}×")
    says = "Every dot is one prompt; the tick is their median. A red cross is a text that is not the target's own."
    if sum(len(item.dots) for item in items) > TOLD:
        says += " There are too many to name each; report.json does."
    drawn = any(item.dots for item in items)
    return figure("prompts", "Speed-up, prompt by prompt", says, panel("", strips(items, axis, 1.0, "alone")) if drawn else "")


def _tip(prompt: Any) -> str:
    said = {True: "text identical", False: "TEXT DIFFERS", None: "text not compared"}[prompt.exact]
    at = "" if prompt.first_difference is None else f" after {many(prompt.first_difference, 'token')}"
    tokens = "" if prompt.tokens is None else f", {many(prompt.tokens, 'token')}"
    return f"{prompt.id}: {prompt.speedup:.2f}×{tokens}, {said}{at}"


def latency(report: Report, colours: Colours) -> str:
    """Gaps between steps, time per token, time to the first token."""
    panels, groups = [], grouped(report)
    alone = len(groups) == 1
    for name, rows in groups.items():
        plain = next((row.plain_itl_curve_ms for row in rows if row.plain_itl_curve_ms), ())
        gaps = _curves(rows, colours, lambda row: row.itl_curve_ms, "ms between steps", plain)
        tpot = _curves(rows, colours, lambda row: row.tpot_curve_ms, "ms per token")
        both = alone and bool(gaps and tpot)
        for title, drawing, note in (
            ("Gaps between steps", gaps if both or not alone else _curves(
                rows, colours, lambda row: row.itl_curve_ms, "ms between steps", plain, WIDE), _slowest(name, rows)),
            ("Time per token, prompt by prompt", tpot, name),
        ):  # fmt: skip
            panels += [panel(title, drawing, note)] if drawing else []
    first = _first_tokens(report, colours)
    panels += [tag("div", panel("Time to the first token", first), class_="full")] if first else []
    says = (
        "The gap between one step's tokens and the next, as a reader sees them, from the shortest to the longest. A step with "
        "a drafter takes longer and brings more tokens: what a reader waits for in all is the time per token. Marked: half, "
        "95 in 100 and 99 in 100; the slowest one in 100 is left off."
    )
    return figure("latency", "Latency", says, *panels, across=1 if alone and len(panels) < 3 else 2)


def _curves(
    rows: Sequence[Row], colours: Colours, pick: Callable[[Row], Sequence[float | None]], label: str,
    plain: Sequence[float | None] = (), width: int = HALF,
) -> str:  # fmt: skip
    series = [Line(row.drafter, colours[row.drafter], _percentiles(pick(row))) for row in rows]
    series.append(Line("target alone", None, _percentiles(plain)))
    cut = [Line(line.name, line.colour, [point for point in line.points if point[0] <= 99]) for line in series]
    top = max((value for line in cut for _, value in line.points if value is not None), default=1.0)
    what = "gaps" if "steps" in label else "prompts"
    x = Axis(f"percent of the {what} that are shorter", 0, 99, at=(0, 25, 50, 75, 95))
    height = 290 if width == HALF else 330
    return lines(cut, x, Axis(label, 0, (top * 1.05) or 1.0), width=width, height=height, marks=(50, 95, 99))


def _slowest(name: str, rows: Sequence[Row]) -> str:
    ends = [(row.drafter, row.itl_curve_ms[-1]) for row in rows if row.itl_curve_ms]
    said = [f"{drafter} {last:,.0f} ms" for drafter, last in ends if last is not None]
    return f"{name}. Slowest gap: {', '.join(said)}." if said else name


def _percentiles(curve: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """(percent, value); the straight part below 90 is drawn at every fifth."""
    points = [(i * 100 / max(len(curve) - 1, 1), value) for i, value in enumerate(curve)]
    return [point for i, point in enumerate(points) if len(points) < 101 or i % 5 == 0 or point[0] > 90]


def _first_tokens(report: Report, colours: Colours) -> str:
    """Half to 99 in 100 of the prompts, with a stroke at 95; the target alone once a task."""
    items = []
    for rows in grouped(report).values():
        items += [_waited(row.drafter, row.conditions, colours[row.drafter], row.ttft_ms) for row in rows]
        plain = next((row for row in rows if row.plain_ttft_ms.p50 is not None), None)
        items += [_waited("target alone", plain.conditions, None, plain.plain_ttft_ms)] if plain else []
    highs = [value for item in items for value in (item.center, item.high) if value is not None]
    axis = Axis("ms to the first token: half, 95 in 100 (stroke), 99 in 100 of the prompts", 0, max(highs, default=1.0) * 1.04)
    return spreads(items, axis)


def _waited(name: str, context: str, colour: int | None, found: Percentiles) -> Spread:
    text = " / ".join(say(value, ".0f", missing="–") for value in (found.p50, found.p95, found.p99)) + " ms"
    return Spread(name, context, colour, found.p50, found.p50, found.p99, text, found.p95, hollow=colour is None)


def spent(report: Report, colours: Colours) -> str:
    """Shares of a step, and of the drafted tokens."""
    steps = [
        Shares(
            row.drafter, row.conditions, [("draft", row.share.draft), ("verify", row.share.verify), ("other", row.share.other)],
            f"loop overhead {say(row.loop_overhead, '.1f', '%', scale=100)}",
        )
        for row in report.rows
    ]  # fmt: skip
    waste = [
        Shares(
            row.drafter, row.conditions,
            [("kept", None if row.wasted is None else 1 - row.wasted), ("wasted", row.wasted)],
            f"{say(row.draft_acceptance, '.0f', '%', scale=100)} of the path kept",
        )
        for row in report.rows
    ]  # fmt: skip
    says = "What a step's time is spent on: the drafter proposing, the target verifying, and all the rest."
    panels = [panel("", _keys("draft", "verify", "other") + shares(steps))] if steps else []
    if any(row.wasted is not None for row in report.rows):
        note = "Of all drafted tokens that the target verified. Branches of a tree that lost count as wasted; a wasted token "
        note += "costs computing, never a word of text."
        panels.append(panel("Wasted work", _keys("kept", "wasted") + shares(waste), note))
    return figure("time", "Where the time goes", says, *panels)


def _keys(*names: str) -> str:
    return tag("p", " ".join(f'<span class="key"><i class="part-{name}"></i>{name}</span>' for name in names), class_="keys")
