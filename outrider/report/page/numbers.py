"""All numbers in a table, and what they rest on: what was left out, the fingerprint, provenance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from outrider.config import flatten
from outrider.report.page.charts import MISSING, Axis, Line, lines, many, panel, say, tag
from outrider.report.page.figure import LISTED, NOT_EXACT, Colours, figure, grouped, percents, ranged, three, whole

if TYPE_CHECKING:
    from outrider.report.schema import Report, Row

ABREAST = 5
"""Most runs side by side in a table."""


def training(report: Report, colours: Colours) -> str:
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
    return figure("training", "Training", says, *panels, across=2) if panels else ""


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def compared(row: Row) -> int | None:
    return None if row.exact is None and not row.is_inexact else row.compared_tokens


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
        ("accepted at depth 1, 2, … (%)", lambda row: percents(row.accepted_by_depth)),
        ("the same, given all before (%)", lambda row: percents(row.conditional_acceptance)),
        ("of judged tokens, kept", lambda row: say(row.token_acceptance, ".1f", "%", scale=100)),
        ("expected of them: sum of min(p, q)", lambda row: say(row.expected_acceptance, ".1f", "%", scale=100)),
        ("of drafted tokens on the path, kept", lambda row: say(row.draft_acceptance, ".1f", "%", scale=100)),
        ("of all drafted tokens, wasted", lambda row: say(row.wasted, ".1f", "%", scale=100)),
        ("speed-up", lambda row: say(row.speedup, ".2f", "×")),
        ("geometric mean over prompts (95 %)", lambda row: ranged(row.speedup_geomean)),
        ("mean over mean, as Spec-Bench", lambda row: say(row.speedup_of_means, ".2f", "×")),
        ("tokens/s", lambda row: say(row.tokens_per_s, ".1f")),
        ("tokens/s, target alone", lambda row: say(row.plain_tokens_per_s, ".1f")),
        ("tokens/s, transformers' generate", lambda row: say(row.generate_tokens_per_s, ".1f")),
        ("exact", lambda row: NOT_EXACT if row.is_inexact else "yes" if row.exact else "not compared"),
        ("from the exact law, per token", lambda row: row.loss or say(row.distance, ".3g")),
        ("tokens compared", lambda row: say(compared(row), "d")),
        ("draft / verify / other (%)", lambda row: " / ".join(
            say(v, ".0f", scale=100, missing="–") for v in (row.share.draft, row.share.verify, row.share.other))),
        ("loop overhead", lambda row: say(row.loop_overhead, ".1f", "%", scale=100)),
        ("loop overhead, target alone", lambda row: say(row.plain_loop_overhead, ".1f", "%", scale=100)),
        ("TTFT p50 / p95 / p99 (ms)", lambda row: three(row.ttft_ms)),
        ("TTFT, target alone (ms)", lambda row: three(row.plain_ttft_ms)),
        ("ITL p50 / p95 / p99 (ms)", lambda row: three(row.itl_ms)),
        ("ITL, target alone (ms)", lambda row: three(row.plain_itl_ms)),
        ("TPOT p50 / p95 / p99 (ms)", lambda row: three(row.tpot_ms)),
        ("peak memory", lambda row: say(row.memory_peak_bytes, ".2f", " GiB", scale=2**-30)),
        ("unlawful drafted tokens", lambda row: say(row.unlawful, "d")),
    ]  # fmt: skip


def numbers(report: Report) -> str:
    """Runs of one condition side by side, one measure a line: read down for one run, across to compare."""
    parts, groups = [], grouped(report)
    for name, rows in groups.items():
        for first in range(0, len(rows), ABREAST):
            parts.append(panel(name if len(groups) > 1 else "", _columns(rows[first : first + ABREAST])))
    says = "One column a run. Percentiles are over all gaps or prompts of the run."
    return whole("table", "All numbers", says, "".join(parts) or panel("", ""))


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
    table = f"<table><thead><tr><td></td>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return tag("div", table, class_="scroll", tabindex="0")


def scope(report: Report) -> str:
    """What was left out, and what the measurement says of itself."""
    said = [f"<p>{escape(note)}</p>" for note in report.notes]
    if report.left_out:
        share = "" if report.share_left_out is None else f" ({report.share_left_out:.0%} of all)"
        named = [
            f"{out.id} ({'one token' if out.reason == 'short' else say(out.fresh_share, '.0f', '%', scale=100) + ' fresh'})"
            for out in report.left_out
        ]
        rest = f" and {len(named) - LISTED} more" if len(named) > LISTED else ""
        text = f"Left out: {many(len(named), 'prompt')}{share}, {report.left_out_because}: "
        said.append(f"<p>{escape(text + ', '.join(named[:LISTED]) + rest)}.</p>")
    elif report.share_left_out is not None:
        said.append("<p>No prompt was left out.</p>")
    return f'<section id="scope"><h2>What to know</h2>{"".join(said)}</section>' if said else ""


def fingerprint(report: Report) -> str:
    says = "The machine and the versions that times depend on. Times are comparable where all of it agrees."
    return whole("fingerprint", "Fingerprint", says, _list(report.fingerprint)) if report.fingerprint else ""


def provenance(report: Report) -> str:
    says = "What was measured, where, and with which versions."
    return whole("provenance", "Provenance", says, _list(flatten(report.provenance)) if report.provenance else panel("", ""))


def _list(values: Mapping[str, Any]) -> str:
    body = ""
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        body += tag("dt", escape(key)) + tag("dd", escape(text))
    return tag("dl", body)
