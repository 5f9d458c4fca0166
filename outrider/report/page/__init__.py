"""A report or a comparison as one self-contained HTML file that needs no network.

`page.html` is the frame of every page, `report.html` and `comparison.html` have the text and tables of each,
`charts.html` the charts, `heat.html` heat tables, `page.css` the style, `page.js` the interaction.  The page is
readable without the script.  The templates escape every string from the data.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import statistics
from base64 import b64encode
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outrider.config import flatten
from outrider.report import summary
from outrider.report.compare import Comparison, cells_of
from outrider.report.page import acceptance_charts, charts, comparison, cost, groups, speed, text
from outrider.report.page.tiles import tiles
from outrider.report.schema import Report, write_whole

FOLDER = Path(__file__).parent
ABREAST = 5
"""Maximum number of runs side by side in a table."""


def save(report: Report, folder: str | Path) -> Path:
    """Write report.json and report.html; each is either complete or unchanged.  Returns the folder."""
    folder = Path(folder)
    write_whole({folder / "report.html": render(report), folder / "report.json": report.json_text()})
    return folder


def render(report: Report) -> str:
    """The page of a report."""
    colours = {name: i for i, name in enumerate(dict.fromkeys([*groups.by_drafter(report), *report.training]))}
    grouped = groups.grouped(report)
    tables = [(name, rows[i : i + ABREAST]) for name, rows in grouped.items() for i in range(0, len(rows), ABREAST)]
    shown, hidden = text.samples(report)
    body = _environment().get_template("report.html").render(
        report=report, drafters=groups.by_drafter(report), colours=colours, groups=grouped, tables=tables,
        samples=shown, hidden=hidden, costs=cost.cost_lines(report), provenance=flatten(report.provenance),
        crowds=acceptance_charts.crowds(report),
    )  # fmt: skip
    made = f"measured {_moment(report.made)} by Outrider" if report.made else "measured by Outrider"
    headline = summary.headline(report, with_alarms=False)
    return _whole(body, report.target, made, headline, "report.json next to this file")


def _moment(iso: str) -> str:
    """An ISO time to the minute; other texts unchanged."""
    try:
        made = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{made:%Y-%m-%d %H:%M} {made.tzname() or ''}".strip()


def render_comparison(compared: Comparison) -> str:
    """The page of a comparison."""
    names = " and ".join([compared.name, *(other.name for other in compared.others)])
    reports = [(compared.name, compared.base), *((other.name, other.report) for other in compared.others)]
    body = _environment().get_template("comparison.html").render(
        comparison=compared, reports=reports, machines=comparison.machines([report for _, report in reports])
    )  # fmt: skip
    return _whole(body, compared.base.target, f"{names} compared by Outrider", compared.headline(), names)


def _whole(body: str, title: str, made: str, headline: str, source: str) -> str:
    """The frame of every page around its body, with links to all figures that are not empty."""
    top, _, main = body.partition("<!-- main -->")
    contents = re.findall(r'<(?:figure|section class="part") id="([a-z]+)">\s*(?:<figcaption>)?<h2>(.*?)</h2>', main)
    style, script = ((FOLDER / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return _environment().get_template("page.html").render(
        title=title, made=made, headline=headline, source=source, top=Markup(top), main=Markup(main),
        contents=[(name, Markup(head)) for name, head in contents], style=Markup(style), script=Markup(script),
        style_hash=_hash(style), script_hash=_hash(script),
    )  # fmt: skip


def _hash(text: str) -> str:
    """The hash that the page's content security policy allows."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = lambda value: f"{value:.1f}".removesuffix(".0")
    for function in (
        summary.say, summary.many, summary.conditions, summary.named, summary.group_name, summary.alarms, summary.loss,
        summary.range_name, summary.long_rows,
        summary.skews, summary.compared, summary.interval, summary.distrust,
        summary.busy, summary.differing, summary.cut_sentence, summary.left_out_because, summary.left_out_names,
        cells_of, tiles, acceptance_charts.listed, acceptance_charts.contamination, acceptance_charts.acceptance,
        acceptance_charts.predicted, acceptance_charts.accepted_per_step, acceptance_charts.patterns,
        acceptance_charts.ladder,
        speed.speedup, speed.generate_speedup, speed.whisker, speed.reach, speed.latency, speed.first_tokens,
        speed.prompts, speed.training, comparison.ratios, comparison.depths,
        groups.ranged, charts.hue, charts.shape_of, charts.shade_of, text.tip, text.class_of, text.printable,
        _short, _plainly,
    ):  # fmt: skip
        environment.globals[function.__name__.lstrip("_")] = function
    environment.globals |= {
        "median": statistics.median, "max_tips": charts.MAX_TIPS, "sorts": acceptance_charts.SORTS,
        "missing": summary.MISSING, "not_exact": summary.NOT_EXACT, "under_load": summary.UNDER_LOAD,
        "max_tokens": text.MAX_TOKENS, "crowd": groups.CROWD,
        "settings": cost.SETTINGS, "newline": Markup('<i class="nl">⏎</i>\n'), "nothing": Markup('<i class="nl">∅</i>'),
    }  # fmt: skip
    return environment


def _short(text: str, length: int) -> str:
    """A text, truncated with an ellipsis if it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _plainly(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
