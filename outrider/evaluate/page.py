"""The page: a report as one HTML file that a reader opens anywhere and that asks the network for nothing.

`page.html` holds the style sheet and the words that never change; here the report's figures are put into it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from outrider.config import flatten
from outrider.evaluate.charts import (
    HALF,
    MISSING,
    WIDE,
    Axis,
    Bar,
    Dot,
    Line,
    Shares,
    Strip,
    bars,
    columns,
    lines,
    many,
    panel,
    say,
    shares,
    strips,
    tag,
)  # fmt: skip

if TYPE_CHECKING:
    from outrider.evaluate.report import Percentiles, Report, Row

Colours = dict[str, int]
"""Drafter → its colour, the same in every chart."""
LISTED = 20
"""Most prompts named in a list; the rest is counted."""
ABREAST = 5
"""Most runs side by side in a table."""
NOT_EXACT = "NOT EXACT"


def render(report: Report) -> str:
    """The whole page.  Every string from the report is escaped."""
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    colours = {name: i for i, name in enumerate(dict.fromkeys([*(row.drafter for row in report.rows), *report.training]))}
    figures = (_speed, _acceptance, _latency, _time, _rejections, _prompts, _training)
    return template.substitute(
        title=escape(report.target),
        made=escape(f"measured {report.made.replace('T', ' ')} by Outrider" if report.made else "measured by Outrider"),
        headline=escape(report.headline(alarms=False)),
        alarms=_alarms(report),
        tiles=_tiles(report),
        figures="\n".join(figure(report, colours) for figure in figures),
        table=_table(report),
        scope=_scope(report),
        provenance=_provenance(report),
    )


def _figure(name: str, title: str, says: str, *panels: str, across: int = 1) -> str:
    caption = f"<figcaption><h2>{escape(title)}</h2><p>{escape(says)}</p></figcaption>"
    return f'<figure id="{name}">{caption}<div class="panels across-{across}">{"".join(panels) or panel("", "")}</div></figure>'


def _groups(report: Report) -> dict[str, list[Row]]:
    """Rows that can be compared: those of one task and temperature, under the words for both."""
    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(row.conditions, []).append(row)
    return groups


def _speed(report: Report, colours: Colours) -> str:
    items = [_bar(row, colours[row.drafter]) for row in report.rows]
    high = max([value for item in items for value in (item.value, item.also) if value is not None] + [1.2])
    says = "Tokens per second over the same prompts, divided by those of the target alone. Longer is faster."
    if any(item.also is not None for item in items):
        says += " The hollow diamond is transformers' own generate with the target alone."
    axis = Axis("times as fast as the target alone", 0, high * 1.02, lambda value: f"{value:.3g}×")
    return _figure("speedup", "Speed-up", says, panel("", bars(items, axis, 1.0, "target alone") if items else ""))


def _bar(row: Row, colour: int) -> Bar:
    text, generate = MISSING, None
    if row.speedup is not None:
        text = f"{row.speedup:.2f}× {say(row.tokens_per_s, '.1f')} tokens/s, plain {say(row.plain_tokens_per_s, '.1f')}"
    if row.generate_tokens_per_s and row.plain_tokens_per_s:
        generate = row.generate_tokens_per_s / row.plain_tokens_per_s
    return Bar(row.drafter, row.conditions, colour, row.speedup, text, NOT_EXACT if row.is_inexact else "", generate)


def _acceptance(report: Report, colours: Colours) -> str:
    panels = []
    for name, rows in _groups(report).items():
        for title, pick in (
            ("All tokens up to this depth kept", lambda row: row.accepted_by_depth),
            ("Kept, given that all before it were", lambda row: row.conditional_acceptance),
        ):
            series = [Line(row.drafter, colours[row.drafter], list(enumerate(pick(row), 1))) for row in rows]
            panels.append(panel(title, _by_depth(series), name))
    says = (
        "How often the target keeps what the drafter proposed. On the left the chance that a draft survives whole up to a "
        "depth; on the right the chance of each further token, once the ones before it stand."
    )
    return _figure("acceptance", "Acceptance by depth", says, *panels, across=2)


def _by_depth(series: Sequence[Line]) -> str:
    deepest = max((len(line.points) for line in series), default=0)
    depths = range(1, deepest + 1, 1 + deepest // 12)
    percent = Axis("kept", 0, 1, lambda value: f"{value:.0%}", (0, 0.25, 0.5, 0.75, 1))
    return lines(series, Axis("depth", 1, max(deepest, 2), at=depths), percent)


def _latency(report: Report, colours: Colours) -> str:
    panels, groups = [], _groups(report)
    for name, rows in groups.items():
        series = [Line(row.drafter, colours[row.drafter], _percentiles(row.itl_curve_ms)) for row in rows]
        plain = next((row.plain_itl_curve_ms for row in rows if row.plain_itl_curve_ms), ())
        series.append(Line("target alone", None, _percentiles(plain)))
        slowest = [f"{line.name} {last:,.0f} ms" for line in series if line.points and (last := line.points[-1][1]) is not None]
        cut = [Line(line.name, line.colour, [point for point in line.points if point[0] <= 99]) for line in series]
        top = max((value for line in cut for _, value in line.points if value is not None), default=1.0)
        x = Axis("percent of the gaps that are shorter", 0, 99, at=(0, 25, 50, 75, 95))
        width, height = (WIDE, 330) if len(groups) == 1 else (HALF, 290)
        drawing = lines(cut, x, Axis("ms between steps", 0, top * 1.05), width=width, height=height, marks=(50, 95, 99))
        panels.append(panel("", drawing, f"{name}. Slowest gap: {', '.join(slowest)}." if slowest else name))
    says = (
        "The gap between one step's tokens and the next, as a reader sees them, from the shortest to the longest. A step with "
        "a drafter takes longer and brings more tokens. Marked: half, 95 in 100 and 99 in 100 of all gaps; the slowest one in "
        "100 is left off."
    )
    return _figure("latency", "Latency", says, *panels, across=1 if len(groups) == 1 else 2)


def _percentiles(curve: Sequence[float | None]) -> list[tuple[float, float | None]]:
    return [(i * 100 / max(len(curve) - 1, 1), value) for i, value in enumerate(curve)]


def _time(report: Report, colours: Colours) -> str:
    items = [
        Shares(
            row.drafter, row.conditions, [("draft", row.share.draft), ("verify", row.share.verify), ("other", row.share.other)],
            f"loop overhead {say(row.loop_overhead, '.1f', '%', scale=100)}",
        )
        for row in report.rows
    ]  # fmt: skip
    says = "What a step's time is spent on: the drafter proposing, the target verifying, and all the rest."
    key = "".join(f'<span class="key"><i class="part-{part}"></i>{part}</span>' for part in ("draft", "verify", "other"))
    return _figure("time", "Where the time goes", says, panel("", f'<p class="keys">{key}</p>{shares(items)}' if items else ""))


def _rejections(report: Report, colours: Colours) -> str:
    panels, most = [], max((count for row in report.rows for count in row.rejections_by_depth), default=1)
    for row in report.rows:
        total = sum(row.rejections_by_depth)
        note = f"{row.conditions}. {many(total, 'rejection')}" + (f" in {many(row.steps, 'step')}" if row.steps else "")
        drawing = columns(row.rejections_by_depth, most, colours[row.drafter], "depth", "rejections")
        panels.append(panel(row.drafter, drawing, note if drawing else row.conditions))
    says = "The depth at which the target first said no, on one scale for all. A rejection costs time, never a word of text."
    return _figure("rejections", "Rejections by depth", says, *panels, across=2 if len(panels) in (2, 4) else 3)


def _prompts(report: Report, colours: Colours) -> str:
    items = []
    for row in report.rows:
        dots = [Dot(p.speedup, _tip(p), p.exact is False) for p in row.per_prompt if p.speedup is not None]
        text = many(len(dots), "prompt") + (f", {len(row.different)} differ" if row.different else "")
        items.append(Strip(row.drafter, row.conditions, colours[row.drafter], dots, text))
    values = [dot.value for item in items for dot in item.dots] or [1.0]
    low, high = min([*values, 1.0]), max([*values, 1.0])
    pad = (high - low) * 0.04 or 0.1
    axis = Axis("times as fast as the target alone", low - pad, high + pad, lambda value: f"{value:.2f}×")
    says = "Every dot is one prompt; the tick is their median. A red cross is a text that is not the target's own."
    drawing = strips(items, axis, 1.0, "target alone") if items else ""
    return _figure("prompts", "Speed-up, prompt by prompt", says, panel("", drawing))


def _tip(prompt: Any) -> str:
    said = {True: "text identical", False: "TEXT DIFFERS", None: "text not compared"}[prompt.exact]
    at = "" if prompt.first_difference is None else f" after {many(prompt.first_difference, 'token')}"
    tokens = "" if prompt.tokens is None else f", {many(prompt.tokens, 'token')}"
    return f"{prompt.id}: {prompt.speedup:.2f}×{tokens}, {said}{at}"


def _training(report: Report, colours: Colours) -> str:
    panels = []
    for name, training in report.training.items():
        curve = training.loss_curve[:: 1 + len(training.loss_curve) // 400]
        values = [loss for _, loss in curve if loss is not None]
        x = Axis("training step", 0, max((step for step, _ in curve), default=1), lambda value: f"{value:,.0f}")
        y = Axis("loss", min([0.0, *values]), max([*values, 0.1]) * 1.03)
        drawing = lines([Line(say(values[-1] if values else None, ".3g"), colours[name], curve)], x, y, marks=())
        spent = [many(training.steps, "step") if training.steps is not None else "", _duration(training.seconds)]
        spent.append(many(training.tokens, "token") if training.tokens is not None else "")
        panels.append(panel(name, drawing, ", ".join(filter(None, spent))))
    says = "The loss while each drafter learned. Losses of different methods are not on one scale."
    return _figure("training", "Training", says, *panels, across=2) if panels else ""


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _alarms(report: Report) -> str:
    """What must not be missed: texts that differ, then drafters that broke their promise, then the notes."""
    parts = []
    for row, sentence in report.alarms():
        named = [
            p.id + ("" if p.first_difference is None else f" (after {many(p.first_difference, 'token')})")
            for p in row.different
        ]
        rest = f" and {len(named) - LISTED} more" if len(named) > LISTED else ""
        listed = f"<p>Texts that differ: {escape(', '.join(named[:LISTED]))}{rest}.</p>" if named else ""
        parts.append(f'<div class="alarm" role="alert"><strong>{escape(sentence)}</strong>{listed}</div>')
    for row in report.rows:
        if row.plain_exact is False:
            what = f"{row.conditions}: the target alone, through this loop, does not write what transformers' generate does."
            parts.append(f'<div class="warning">{escape(what)}</div>')
        if row.loss:
            parts.append(f'<div class="warning">{escape(f"{row.drafter}, {row.conditions}: {row.loss}.")}</div>')
        if row.unlawful:
            what = f"{row.drafter}, {row.conditions}: {many(row.unlawful, 'drafted token')} came with an id or a distribution "
            what += "that can't be; they were verified as if certain, so the output stands."
            parts.append(f'<div class="warning">{escape(what)}</div>')
    return "".join(parts)


def _tiles(report: Report) -> str:
    """Five numbers of the row the headline speaks of."""
    row = report.lead
    if row is None:
        return ""
    compared = _compared(row)
    detail = f"drawn at temperature {row.temperature:g}" if compared is None else f"{many(compared, 'token')} compared"
    exact = NOT_EXACT.lower() if row.is_inexact else "exact" if row.exact else "not compared"
    plain = say(row.plain_tokens_per_s, ".1f")
    cells = [
        (say(row.speedup, ".2f", "×"), "speed-up", f"{say(row.tokens_per_s, '.1f')} tokens/s, plain {plain}"),
        (say(row.tokens_per_step, ".2f"), "tokens per step", f"over {many(row.steps, 'step')}" if row.steps else ""),
        (exact, "target's own text", detail),
        (say(row.itl_ms.p50, ".0f", " ms"), "median gap", f"target alone {say(row.plain_itl_ms.p50, '.0f', ' ms')}"),
        (say(row.ttft_ms.p50, ".0f", " ms"), "to the first token", f"target alone {say(row.plain_ttft_ms.p50, '.0f', ' ms')}"),
    ]
    body = ""
    for value, name, detail in cells:
        text = tag("b", escape(value)) + tag("span", escape(name)) + tag("small", escape(detail))
        body += tag("div", text, class_="bad" if value == NOT_EXACT.lower() else "")
    return f'<section class="tiles" aria-label="{escape(row.drafter)} in numbers">{body}</section>'


def _compared(row: Row) -> int | None:
    return None if row.exact is None and not row.is_inexact else row.compared_tokens


def _three(found: Percentiles) -> str:
    values = (found.p50, found.p95, found.p99)
    return MISSING if values == (None, None, None) else " / ".join(say(value, ".1f", missing="–") for value in values)


def _percents(values: Sequence[float | None]) -> str:
    return " ".join(say(value, ".0f", scale=100, missing="–") for value in values) or MISSING


def _measures() -> list[tuple[str, Callable[[Row], str]]]:
    """The lines of the table: a name, and what is said of a row."""
    return [
        ("task", lambda row: row.task or MISSING),
        ("temperature", lambda row: f"{row.temperature:g}"),
        ("prompts", lambda row: f"{row.prompts:,}"),
        ("tokens written", lambda row: say(row.tokens, "d")),
        ("device", lambda row: row.device or MISSING),
        ("number type", lambda row: row.precision or row.dtype or MISSING),
        ("batch", lambda row: say(row.batch, "d")),
        ("tokens per step", lambda row: say(row.tokens_per_step)),
        ("accepted at depth 1, 2, … (%)", lambda row: _percents(row.accepted_by_depth)),
        ("the same, given all before (%)", lambda row: _percents(row.conditional_acceptance)),
        ("speed-up", lambda row: say(row.speedup, ".2f", "×")),
        ("tokens/s", lambda row: say(row.tokens_per_s, ".1f")),
        ("tokens/s, target alone", lambda row: say(row.plain_tokens_per_s, ".1f")),
        ("tokens/s, transformers' generate", lambda row: say(row.generate_tokens_per_s, ".1f")),
        ("exact", lambda row: NOT_EXACT if row.is_inexact else "yes" if row.exact else "not compared"),
        ("from the exact law, per token", lambda row: row.loss or say(row.distance, ".3g")),
        ("tokens compared", lambda row: say(_compared(row), "d")),
        ("draft / verify / other (%)", lambda row: " / ".join(
            say(v, ".0f", scale=100, missing="–") for v in (row.share.draft, row.share.verify, row.share.other))),
        ("loop overhead", lambda row: say(row.loop_overhead, ".1f", "%", scale=100)),
        ("loop overhead, target alone", lambda row: say(row.plain_loop_overhead, ".1f", "%", scale=100)),
        ("TTFT p50 / p95 / p99 (ms)", lambda row: _three(row.ttft_ms)),
        ("TTFT, target alone (ms)", lambda row: _three(row.plain_ttft_ms)),
        ("ITL p50 / p95 / p99 (ms)", lambda row: _three(row.itl_ms)),
        ("ITL, target alone (ms)", lambda row: _three(row.plain_itl_ms)),
        ("TPOT p50 / p95 / p99 (ms)", lambda row: _three(row.tpot_ms)),
        ("unlawful drafted tokens", lambda row: say(row.unlawful, "d")),
    ]  # fmt: skip


def _table(report: Report) -> str:
    """Runs of one condition side by side, one measure a line: read down for one run, across to compare."""
    parts, groups = [], _groups(report)
    for name, rows in groups.items():
        for first in range(0, len(rows), ABREAST):
            parts.append(panel(name if len(groups) > 1 else "", _columns(rows[first : first + ABREAST])))
    return "".join(parts) or panel("", "")


def _columns(rows: Sequence[Row]) -> str:
    heads = "".join(tag("th", escape(row.drafter), scope="col") for row in rows)
    body = ""
    for name, said in _measures():
        cells = ""
        for row in rows:
            text = said(row)
            kind = "bad" if text == NOT_EXACT else "missing" if text == MISSING else "list" if name.endswith("(%)") else ""
            cells += tag("td", escape(text), class_=kind)
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    return f'<div class="scroll"><table><thead><tr><td></td>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _scope(report: Report) -> str:
    """What was left out, and what the measurement says of itself."""
    said = [f"<p>{escape(note)}</p>" for note in report.notes]
    if report.left_out:
        share = "" if report.share_left_out is None else f" ({report.share_left_out:.0%} of all)"
        named = [f"{out.id} ({say(out.fresh_share, '.0f', '%', scale=100)} fresh)" for out in report.left_out]
        rest = f" and {len(named) - LISTED} more" if len(named) > LISTED else ""
        text = f"Left out: {many(len(named), 'prompt')}{share}, because the target's own text goes in circles there: "
        said.append(f"<p>{escape(text + ', '.join(named[:LISTED]) + rest)}.</p>")
    elif report.share_left_out is not None:
        said.append("<p>No prompt was left out.</p>")
    return f'<section id="scope"><h2>What to know</h2>{"".join(said)}</section>' if said else ""


def _provenance(report: Report) -> str:
    if not report.provenance:
        return panel("", "")
    lines = ""
    for key, value in flatten(report.provenance).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        lines += f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>"
    return f"<dl>{lines}</dl>"
