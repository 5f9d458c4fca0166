"""The page: a report as one HTML file that a reader opens anywhere and that asks the network for nothing.

`page.html` holds the words that never change, `page.css` the looks, `page.js` the little that moves; every figure is a
function of the report in a file beside this one, and reads without the script.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from outrider.report.page import acceptance, answers, cost, numbers, speed, text
from outrider.report.page.charts import many, say, tag
from outrider.report.page.figure import LISTED, NOT_EXACT, by_drafter

if TYPE_CHECKING:
    from outrider.report.schema import Report

FIGURES = (
    speed.speed, text.observed, acceptance.acceptance, acceptance.predicted, acceptance.rejections, acceptance.patterns,
    acceptance.histogram, speed.latency, speed.spent, speed.prompts, answers.scores, answers.clean, cost.cost, numbers.training,
)  # fmt: skip


def render(report: Report) -> str:
    """The whole page.  Every string from the report is escaped."""
    colours = {name: i for i, name in enumerate(dict.fromkeys([*by_drafter(report), *report.training]))}
    parts = [figure(report, colours) for figure in FIGURES]
    parts += [numbers.numbers(report), numbers.scope(report), numbers.fingerprint(report), numbers.provenance(report)]
    made = f"measured {report.made.replace('T', ' ')} by Outrider" if report.made else "measured by Outrider"
    source = "report.json beside this file"
    return assemble(
        report.target, made, report.headline(alarms=False), _alarms(report), _tiles(report), "\n".join(parts), source
    )


def assemble(title: str, made: str, headline: str, alarms: str, tiles: str, body: str, source: str) -> str:
    """The page around its parts.  title, made, headline and source are text, the rest is markup."""
    folder = Path(__file__).parent
    template, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return Template(template).substitute(
        title=escape(title), made=escape(made), headline=escape(headline), alarms=alarms, tiles=tiles, body=body,
        contents=_contents(body), source=escape(source), style=style, script=script,
        style_hash=_hash(style), script_hash=_hash(script),
    )  # fmt: skip


def _hash(text: str) -> str:
    """What the page's policy lets in: this text and no other."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _contents(body: str) -> str:
    """A link to every part that has something to show."""
    found = re.findall(r'<(?:figure|section class="part") id="([a-z]+)">(?:<figcaption>)?<h2>(.*?)</h2>', body)
    links = "".join(tag("a", title, href=f"#{name}") for name, title in found)
    return tag("nav", links, aria_label="Contents") if links else ""


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
    skews = [row.skew for row in report.rows if row.skew]
    if skews:
        rest = f" {many(len(skews) - 1, 'more row')} likewise; see what was expected in training." if len(skews) > 1 else ""
        parts.append(f'<div class="warning">{escape(skews[0] + rest)}</div>')
    return "".join(parts)


def _tiles(report: Report) -> str:
    """Five numbers of the row the headline speaks of."""
    row = report.lead
    if row is None:
        return ""
    compared = numbers.compared(row)
    drawn = f"drawn at temperature {row.temperature:g}" if row.temperature > 0 else ""
    detail = drawn if compared is None else f"{many(compared, 'token')} compared"
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
        inside = tag("b", escape(value)) + tag("span", escape(name)) + tag("small", escape(detail))
        body += tag("div", inside, class_="bad" if value == NOT_EXACT.lower() else "")
    return f'<section class="tiles" aria-label="{escape(row.drafter)} in numbers">{body}</section>'
