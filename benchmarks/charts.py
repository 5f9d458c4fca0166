"""The results as charts: benchmarks/charts/*.svg, written by tables.py from the files of results/.

Drawn with the report page's own chart code, at the width of a phone.  Each chart contains its light and dark colours.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outrider.report import page
from outrider.report.page.charts import Axis, Line, Lines, Rows, hue, lines, shape_of

HERE = Path(__file__).resolve().parent
WIDTH = 380
"""Width of a chart in its own pixels: a phone shows it without shrinking it."""
KINDS = ("mtp", "eagle", "dspark", "domino", "dflash", "eagle3", "medusa")
"""Methods whose acceptance is drawn by depth; one colour each."""
CLASSES = ("name", "axis", "value-small", "reference", "reference-text", "line", "mark", "end", "leader", "bar")
"""Variables of the style sheet that these charts use."""


class Bar(NamedTuple):
    name: str
    value: float
    colour: int | None = 0
    ends: tuple[float, float] | None = None
    """Start and end of its spread."""


def charts(found: Mapping[str, Any]) -> dict[str, str]:
    """SVG of each chart by name.  found: the results by file name."""
    drawn = {
        "methods": methods(found["methods"]),
        "depth": depth(found["methods"]),
        "untrained": untrained(found["retrieval"]),
    }
    return {name: svg(chart) for name, chart in drawn.items()}


def methods(found: Mapping[str, Any]) -> Rows:
    """Tokens per step of every trained kind, after the same minutes."""
    rows = [row for row in found["rows"] if row["column"] == "minutes" and "," not in row["method"]]
    sides = sorted(
        ((row["method"], row["temperature_0"]) for row in rows if row["method"] != "tenth"),
        key=lambda one: -one[1]["tokens_per_step"],
    )
    return bars([
        Bar(name, side["tokens_per_step"], 0,
            (side["tokens_per_step"] - side["spread"], side["tokens_per_step"] + side["spread"]))
        for name, side in sides
    ], "tokens per step, temperature 0", 3.0)  # fmt: skip


def untrained(found: Mapping[str, Any]) -> Rows:
    """Tokens per step of the drafters that need no training, on new text."""
    named = [row for row in found["rows"] if row["task"] == "new" and "dspark" not in row["name"]]
    rows = [row for row in named if row["name"] != "plain"]
    return bars(
        [Bar(row["name"], row["tokens_per_step"], 2) for row in sorted(rows, key=lambda row: -row["tokens_per_step"])],
        "tokens per step",
        3.0,
    )


def bars(items: Sequence[Bar], label: str, high: float) -> Rows:
    return Rows("bars", items, Axis(label, 0, high), 1.0, "target alone", row=40, width=WIDTH, left=4, right=16)


def depth(found: Mapping[str, Any]) -> Lines:
    """Share of steps that accept at least this deep, among those whose draft was that deep."""
    rows = {row["method"]: row["temperature_0"] for row in found["rows"] if row["column"] == "minutes"}
    series = [
        Line(kind, colour, [(float(at), share) for at, share in enumerate(rows[kind]["accepted_by_depth"], 1)])
        for colour, kind in enumerate(KINDS)
    ]
    deepest = max(len(line.points) for line in series)
    places = Axis("depth of the drafted token", 1, deepest, at=range(1, deepest + 1))
    return drawn(series, places, Axis("accepted", 0, 1, lambda value: f"{value:.0%}"))


def drawn(series: Sequence[Line], x: Axis, y: Axis) -> Lines:
    found = lines(series, x, y, WIDTH, 320)
    assert found is not None  # these files have points
    return found


# ── SVG ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def svg(chart: Rows | Lines) -> str:
    """A chart as a standalone file."""
    markup = _environment().get_template("charts.svg.html").render(chart=chart, is_bars=isinstance(chart, Rows))
    markup = re.sub(r"\n\s*(?=\n)", "", markup.strip())
    head, _, rest = markup.partition(">")
    ground = '<rect class="ground" x="-12" y="-12" width="200%" height="200%"></rect>'
    wide, high = (float(size) + 24 for size in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)[0])
    box = re.sub(r'viewBox="[^"]*" width="[^"]*"', f'viewBox="-12 -12 {wide:g} {high:g}" width="{wide:g}"', head)
    return f'{box} class="drawing" xmlns="http://www.w3.org/2000/svg">\n<style>\n{style()}\n</style>\n{ground}{rest}\n'


@functools.cache
def style() -> str:
    """The report page's style rules for charts, scoped to the inside of one."""
    sheet = (page.FOLDER / "page.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)[:2]
    told = re.finditer(r"^svg (?:text|[^{]*\.([\w-]+)) \{[^}]*\}", sheet, re.MULTILINE)
    rules = [one[0].replace("svg ", ".drawing ") for one in told if one[1] in (None, *CLASSES)]
    hues = re.findall(r"(?<!\w)\.(?:plain|c\d) \{.*?\}", sheet)
    own = [
        ".drawing .ground { fill: var(--paper); }",
        ".drawing .whisker { stroke: var(--ink); stroke-width: 1.6; }",
        ".drawing .grid { stroke: var(--grid); } .drawing .base { stroke: var(--faint); }",
        '.drawing { font-family: system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }',
    ]
    night = f"@media (prefers-color-scheme: dark) {{ .drawing {{{colours(dark)}}} }}"
    return "\n".join([
        f".drawing {{{colours(light)}}}", night, *own, *rules, *(f".drawing {hue}" for hue in dict.fromkeys(hues)),
    ])  # fmt: skip


def colours(block: str) -> str:
    """The colours that result charts use, from a block of the style sheet."""
    return " ".join(re.findall(r"--(?:paper|ink|soft|faint|rule|grid|c\d): [^;]+;", block))


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=ChoiceLoader([FileSystemLoader(HERE), FileSystemLoader(page.FOLDER)]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["px"] = lambda value: f"{value:.1f}".removesuffix(".0")
    short: Callable[[str, int], str] = lambda text, length: text if len(text) <= length else text[: length - 1] + "…"
    found.globals |= {"hue": hue, "shape_of": shape_of, "short": short, "Markup": Markup}
    return found
