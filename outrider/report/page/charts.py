"""Charts as plain SVG text: bars, lines, shares, columns, strips, spreads, ladders, heat.  Knows no report and no torch.

The field's habit here is plotly.  It would make every report 4 MB of script that does not print; these few shapes are
20 kB, stand still, and carry their numbers as text and as tooltips.  Every string from data is escaped here.
A colour is a number from 0, in the order the drafters appear; None is the grey of the target alone.  The page's style
sheet gives both a value, so light, dark and print share one drawing.  A value of None is "not measured", never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape
from statistics import median
from typing import Any, NamedTuple

COLOURS = 7
WIDE, HALF, THIRD = 960, 470, 306
GUTTER = 218
"""Left of bars, shares and strips: room for a name and the conditions under it."""
TOLD = 1200
"""Most dots that carry a tooltip each: tooltips are most of a large page's size."""
MISSING = "not measured"
SHAPES = ("circle", "square", "diamond", "triangle")


class Axis(NamedTuple):
    """Where a scale starts and ends, and how its values are said."""

    label: str
    low: float
    high: float
    say: Callable[[float], str] = lambda value: f"{value:g}"
    at: Sequence[float] | None = None
    """Ticks, where round numbers won't do."""

    @property
    def ticks(self) -> Sequence[float]:
        return round_ticks(self.low, self.high) if self.at is None else self.at


class Line(NamedTuple):
    """A named curve; a point whose second value is None leaves a gap."""

    name: str
    colour: int | None
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


class Bar(NamedTuple):
    """One horizontal bar."""

    name: str
    context: str
    colour: int | None
    value: float | None
    text: str
    alarm: str = ""
    """Where given, the bar is an outline in the colour of alarm and says this."""
    also: float | None = None
    """A second value, drawn as a hollow diamond."""
    spread: tuple[float, float, float] | None = None
    """Low, center and high of an interval, drawn as a whisker over the bar."""


class Shares(NamedTuple):
    """One bar cut into named fractions; what is left of 1 stays empty."""

    name: str
    context: str
    parts: Sequence[tuple[str, float | None]]
    text: str


class Dot(NamedTuple):
    """One sample of a strip."""

    value: float
    tip: str
    alarm: bool = False


class Strip(NamedTuple):
    """A row of dots over one scale."""

    name: str
    context: str
    colour: int | None
    dots: Sequence[Dot]
    text: str


class Spread(NamedTuple):
    """A mark on a line from low to high."""

    name: str
    context: str
    colour: int | None
    low: float | None
    center: float | None
    high: float | None
    text: str
    tick: float | None = None
    """A fourth value between them, drawn as a small stroke."""
    hollow: bool = False


class Rung(NamedTuple):
    """One line of a ladder: a value a series."""

    name: str
    values: Sequence[tuple[str, int | None, float | None, str]]
    """(series, colour, value, tip)"""


class Cell(NamedTuple):
    """One cell of a heat table."""

    value: float | None
    text: str
    tip: str = ""


def tag(kind: str, body: str = "", tip: str = "", **attributes: Any) -> str:
    """One element.  Attributes and the tip are escaped, `body` is markup; floats are rounded to a tenth of a pixel."""
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{f"{v:.1f}" if isinstance(v, float) else escape(str(v))}"'
        for name, v in attributes.items()
        if v != ""
    )
    return f"<{kind}{said}>{f'<title>{escape(tip)}</title>' if tip else ''}{body}</{kind}>"


def write(text: str, x: float, y: float, class_: str = "", anchor: str = "start", tip: str = "") -> str:
    """A line of text in a drawing."""
    anchor = "" if anchor == "start" else anchor
    return tag("text", escape(text), tip, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def say(value: float | None, spec: str = ".2f", unit: str = "", *, scale: float = 1, missing: str = MISSING) -> str:
    """A number with its unit; None is said, not hidden."""
    return missing if value is None else f"{value * scale:,{spec}}{unit}"


def many(count: int, noun: str) -> str:
    """`count` with its noun, in the plural where there is not one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def hue(colour: int | None) -> str:
    """The class that gives an element its colour."""
    return "plain" if colour is None else f"c{colour % COLOURS}"


def short(text: str, length: int) -> str:
    """`text`, cut with an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def panel(title: str, drawing: str, note: str = "") -> str:
    """A drawing under its own small heading; the place of an empty drawing says that nothing was measured."""
    head = f"<h3>{escape(title)}</h3>" if title else ""
    foot = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<div class="panel">{head}{drawing or tag("p", MISSING, class_="missing")}{foot}</div>'


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers from low to high."""
    span = max(high - low, 1e-12)
    unit = 10.0 ** math.floor(math.log10(span / wanted))
    step = next((unit * m for m in (1, 2, 2.5, 5, 10) if span / (unit * m) <= wanted + 0.5), unit * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def bars(items: Sequence[Bar], axis: Axis, line: float, line_text: str) -> str:
    """Horizontal bars from 0, with a line to compare them with."""
    right, row, top = 256, 46, 30
    scale = _scale(axis, GUTTER, WIDE - right)
    bottom = top + row * len(items)
    body = _across(axis, scale, top - 6, bottom)
    for i, item in enumerate(items):
        y = top + row * i
        body += _name(item.name, item.context, y + 17)
        if item.value is None:
            body += write(item.text, GUTTER, y + 24, "missing")
            continue
        shape = {"x": GUTTER, "y": y + 8, "width": max(scale(item.value) - GUTTER, 1.0), "height": 22, "rx": 2}
        tip = f"{item.name}, {item.context}: {item.text}{'; ' + item.alarm if item.alarm else ''}"
        body += tag("rect", "", tip, class_="bar alarmed" if item.alarm else f"bar {hue(item.colour)}", **shape)
        x = scale(max(item.value, item.also or 0, line, item.spread[2] if item.spread else 0)) + 12
        if item.also is not None:
            tip = f"{item.name}: {item.also:.2f}×, transformers' generate"
            body += _mark("diamond", scale(item.also), y + 19, 7, "also", tip)
        if item.spread is not None:
            body += _whisker(item, scale, y + 19)
        number, _, rest = item.text.partition(" ")
        body += write(number, x, y + 25, "value")
        body += write(item.alarm, x + 66, y + 17, "shout") if item.alarm else ""
        body += write(rest, x + 66, y + (32 if item.alarm else 24), "context")
    body += _reference(scale(line), top, bottom, line_text)
    return _svg(WIDE, bottom + 38, "bars: " + axis.label, body)


def lines(
    series: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    width: int = HALF,
    height: int = 290,
    marks: Collection[float] | None = None,
) -> str:
    """Curves, each named at its end.  A marker and its tooltip stand at every point, or at the x values in `marks`."""
    series = [line for line in series if any(value is not None for _, value in line.points)]
    if not series:
        return ""
    left, right, top, bottom = 46, 108, 26, 42
    across, up = _scale(x, left, width - right), _scale(y, height - bottom, top)
    body = write(y.label, 0, 10, "axis")
    for value in y.ticks:
        body += tag("line", x1=left, x2=width - right, y1=up(value), y2=up(value), class_="grid" if value > y.low else "base")
        body += write(y.say(value), left - 8, up(value) + 4, "tick", "end")
    for value in x.ticks:
        body += write(x.say(value), across(value), height - bottom + 18, "tick", "middle")
    body += write(x.label, (left + width - right) / 2, height - 5, "axis", "middle")
    ends = []
    for line in series:
        found = [(a, b) for a, b in line.points if b is not None]
        class_ = f"line {hue(line.colour)}{' dashed' if line.dashed else ''}"
        body += tag("path", d=_path(line.points, across, up), class_=class_)
        for a, b in found:
            if marks is None or a in marks:
                tip = f"{line.name}, {x.label} {x.say(a)}: {y.say(b)}"
                body += _mark(_shape(line.colour), across(a), up(b), 4, f"mark {hue(line.colour)}", tip)
        ends.append((line, across(found[-1][0]), up(found[-1][1])))
    return _svg(width, height, f"{y.label} by {x.label}", body + _end_names(ends, height - bottom))


def shares(items: Sequence[Shares]) -> str:
    """Bars of one length, each cut into its parts; a part wide enough says its share."""
    right, row, top = 190, 46, 6
    across = _scale(Axis("", 0, 1), GUTTER, WIDE - right)
    body = ""
    for i, item in enumerate(items):
        y, start = top + row * i, 0.0
        body += _name(item.name, item.context, y + 17)
        if all(part is None for _, part in item.parts):
            body += write(MISSING, GUTTER, y + 24, "missing")
            continue
        for name, part in item.parts:
            part = part or 0.0
            width = across(start + part) - across(start)
            tip = f"{item.name}, {item.context}: {name} {part:.1%}"
            shape = {"x": across(start), "y": y + 8, "width": max(width - 1.5, 0.0), "height": 22}
            body += tag("rect", "", tip, class_=f"part-{name}", **shape)
            if width > 34:
                body += write(f"{part:.0%}", across(start) + width / 2, y + 24, f"in-{name}", "middle")
            start += part
        body += write(item.text, WIDE - right + 14, y + 24, "context")
    return _svg(WIDE, top + row * len(items), "shares of a step", body)


def columns(values: Sequence[float], most: float, colour: int | None, x_label: str, what: str, first: int = 1) -> str:
    """Counts by depth, or by what else is counted from `first`, on a scale that ends at `most`."""
    if not values:
        return ""
    width, height, top, bottom, total = THIRD, 190, 24, 42, sum(values)
    up = _scale(Axis("", 0, most or 1), height - bottom, top)
    pitch = min(width / len(values), 64.0)
    body = tag("line", x1=0, x2=width, y1=height - bottom, y2=height - bottom, class_="base")
    for i, value in enumerate(values):
        x, tip = pitch * (i + 0.5), f"{value:,} {what}, {x_label} {i + first}, {value / total if total else 0:.0%} of {total:,}"
        shape = {"x": x - pitch * 0.36, "y": up(value), "width": pitch * 0.72, "height": height - bottom - up(value)}
        body += tag("rect", "", tip, class_=f"bar {hue(colour)}", **shape)
        body += write(f"{value:,}" if pitch > 36 else _brief(value), x, up(value) - 6, "count", "middle")
        body += write(str(i + first), x, height - bottom + 18, "tick", "middle")
    body += write(x_label, pitch * len(values) / 2, height - 5, "axis", "middle")
    return _svg(width, height, f"{what} by {x_label}", body)


def ladder(rungs: Sequence[Rung], axis: Axis, width: int = THIRD, gutter: int = 112) -> str:
    """A line for each name with every series' mark on it: read along for one name, down for one series."""
    if not any(value is not None for rung in rungs for _, _, value, _ in rung.values):
        return ""
    row, top, right = 30, 8, 14
    scale, bottom = _scale(axis, gutter, width - right), top + row * len(rungs)
    body = _across(axis, scale, top, bottom)
    for i, rung in enumerate(rungs):
        y = top + row * (i + 0.5)
        body += write(short(rung.name, 18), gutter - 14, y + 4, "", "end", rung.name)
        body += tag("line", x1=gutter, x2=width - right, y1=y, y2=y, class_="rung")
        for name, colour, value, tip in rung.values:
            if value is not None:
                mark = f"mark {hue(colour)}"
                body += _mark(_shape(colour), scale(value), y, 5.5, mark, f"{name}, {rung.name}: {axis.say(value)}{tip}")
    return _svg(width, bottom + 38, f"{axis.label} by sort", body)


def spreads(items: Sequence[Spread], axis: Axis, line: float | None = None, line_text: str = "") -> str:
    """A mark and the line it lies on, one a row."""
    if not any(item.center is not None for item in items):
        return ""
    right, row, top = 256, 40, 30 if line is not None else 8
    scale, bottom = _scale(axis, GUTTER, WIDE - right), top + row * len(items)
    body = _across(axis, scale, top - 6, bottom)
    body += "" if line is None else _reference(scale(line), top, bottom, line_text)
    for i, item in enumerate(items):
        y = top + row * i + row / 2
        body += _name(item.name, item.context, y - 3)
        if item.center is None:
            body += write(MISSING, GUTTER + 8, y + 4, "missing")
            continue
        low, high = (item.center if end is None else end for end in (item.low, item.high))
        tip, colour = f"{item.name}, {item.context}: {item.text}", hue(item.colour)
        body += tag("line", "", tip, x1=scale(low), x2=scale(high), y1=y, y2=y, class_=f"span {colour}")
        if item.tick is not None:
            body += tag("line", x1=scale(item.tick), x2=scale(item.tick), y1=y - 6, y2=y + 6, class_=f"span {colour}")
        kind = "hollow" if item.hollow else "mark"
        body += _mark(_shape(item.colour), scale(item.center), y, 6, f"{kind} {colour}", tip)
        body += write(item.text, WIDE - right + 14, y + 4, "context")
    return _svg(WIDE, bottom + 38, axis.label, body)


def heat(corner: str, heads: Sequence[str], rows: Sequence[tuple[str, str, Sequence[Cell]]], low: float, high: float) -> str:
    """A table whose cells darken from low to high.  rows: (name, context, cells); every cell says its own number."""
    top = "".join(tag("th", escape(head), scope="col") for head in heads)
    body = ""
    for name, context, cells in rows:
        small = tag("small", escape(context)) if context else ""
        line = tag("th", escape(name) + small, scope="row")
        for cell in cells:
            step = None if cell.value is None else round(9 * min(max((cell.value - low) / ((high - low) or 1), 0), 1))
            class_ = "missing" if step is None else f"h{step}"
            line += tag("td", escape(cell.text), title=cell.tip, class_=class_)
        body += tag("tr", line)
    head = tag("thead", tag("tr", tag("th", escape(corner), scope="col") + top))
    return tag("div", tag("table", head + tag("tbody", body), class_="heat"), class_="scroll", tabindex="0")


def strips(items: Sequence[Strip], axis: Axis, line: float, line_text: str) -> str:
    """Every sample as a dot, one strip a row, the median as a tick; alarming dots are large crosses."""
    right, row, top = 190, 62, 30
    scale = _scale(axis, GUTTER, WIDE - right)
    bottom = top + row * len(items)
    body = _across(axis, scale, top - 6, bottom)
    body += _reference(scale(line), top, bottom, line_text)
    told = sum(len(item.dots) for item in items) <= TOLD
    for i, item in enumerate(items):
        y = top + row * i + row / 2
        body += _name(item.name, item.context, y - 3)
        if not item.dots:
            body += write(MISSING, GUTTER, y + 4, "missing")
            continue
        placed = _swarm(item.dots, scale)
        if not told:  # one path of round specks: a fifth of the size
            specks = "".join(f"M{scale(dot.value):.0f} {y + lift:.0f}h0" for dot, lift in placed if not dot.alarm)
            body += tag("path", d=specks, class_=f"specks {hue(item.colour)}") if specks else ""
            placed = [pair for pair in placed if pair[0].alarm]
        for dot, lift in placed:
            shape, r, class_ = ("cross", 8, "dot alarmed") if dot.alarm else ("circle", 4.5, f"dot {hue(item.colour)}")
            body += _mark(shape, scale(dot.value), y + lift, r, class_, dot.tip)
        middle = median(dot.value for dot in item.dots)
        x = scale(middle)
        body += tag("line", "", f"median {middle:.2f}", x1=x, x2=x, y1=y - 24, y2=y + 24, class_="median")
        body += write(f"median {axis.say(middle)}", WIDE - right + 14, y - 3, "value-small")
        body += write(item.text, WIDE - right + 14, y + 14, "context")
    return _svg(WIDE, bottom + 38, "one dot a prompt: " + axis.label, body)


def _svg(width: int, height: float, label: str, body: str) -> str:
    return tag("svg", body, viewBox=f"0 0 {width} {height:g}", width=width, role="img", aria_label=label)


def _scale(axis: Axis, start: float, end: float) -> Callable[[float], float]:
    """Values to pixels; what lies outside the axis lands on its edge."""
    span = (axis.high - axis.low) or 1.0
    return lambda value: float(start + (end - start) * min(max((value - axis.low) / span, 0.0), 1.0))


def _across(axis: Axis, scale: Callable[[float], float], top: float, bottom: float) -> str:
    """The vertical grid of a chart of rows, and its numbers beneath."""
    body = write(axis.label, (scale(axis.low) + scale(axis.high)) / 2, bottom + 34, "axis", "middle")
    for value in axis.ticks:
        body += tag("line", x1=scale(value), x2=scale(value), y1=top, y2=bottom, class_="grid" if value else "base")
        body += write(axis.say(value), scale(value), bottom + 16, "tick", "middle")
    return body


def _reference(x: float, top: float, bottom: float, text: str) -> str:
    line = tag("line", x1=x, x2=x, y1=top - 6, y2=bottom, class_="reference")
    return line + write(text, x, top - 14, "reference-text", "middle")


def _name(name: str, context: str, y: float) -> str:
    return write(short(name, 26), 0, y, "name", tip=name) + write(short(context, 34), 0, y + 16, "context", tip=context)


def _whisker(item: Bar, scale: Callable[[float], float], y: float) -> str:
    """An interval over the end of a bar, on a casing that parts it from the bar."""
    low, center, high = item.spread or (0.0, 0.0, 0.0)
    ends = f"M{scale(low):.1f} {y - 5:.1f}v10m0-5H{scale(high):.1f}m0-5v10"
    tip = f"{item.name}: geometric mean over prompts {center:.2f}×, 95 % interval {low:.2f}× to {high:.2f}×"
    body = tag("path", d=ends, class_="casing") + tag("path", "", tip, d=ends, class_="whisker")
    return body + tag("circle", "", tip, cx=scale(center), cy=y, r=3.5, class_="whisker-center")


def _shape(colour: int | None) -> str:
    return "circle" if colour is None else SHAPES[colour % len(SHAPES)]


def _mark(shape: str, x: float, y: float, r: float, class_: str, tip: str) -> str:
    if shape == "circle":
        return tag("circle", "", tip, cx=x, cy=y, r=float(r), class_=class_)
    corners = {
        "square": "M-.9-.9H.9V.9H-.9Z",
        "diamond": "M0-1.25L1.25 0L0 1.25L-1.25 0Z",
        "triangle": "M0-1.2L1.15.9H-1.15Z",
        "cross": "M-.9-.9L.9.9M-.9.9L.9-.9",
    }[shape]
    # vector-effect: the outline keeps its width although the unit shape is scaled
    place = f"translate({x:.1f} {y:.1f}) scale({r})"
    return tag("path", "", tip, d=corners, transform=place, class_=class_, vector_effect="non-scaling-stroke")


def _path(points: Iterable[tuple[float, float | None]], across: Callable[[float], float], up: Callable[[float], float]) -> str:
    found, move = [], "M"
    for x, y in points:
        if y is None:
            move = "M"
            continue
        found.append(f"{move}{across(x):.1f} {up(y):.1f}")
        move = "L"
    return "".join(found)


def _end_names(ends: Sequence[tuple[Line, float, float]], lowest: float) -> str:
    """Each line's name beside its end; a name that had to move is tied to its line."""
    body, ends = "", sorted(ends, key=lambda end: end[2])
    for (line, x, y), place in zip(ends, _apart([y for _, _, y in ends], 15.0, lowest - 6), strict=True):
        moved = abs(place - y) > 3
        if moved:
            body += tag("line", x1=x + 6, x2=x + 12, y1=y, y2=place, class_=f"leader {hue(line.colour)}")
        body += write(short(line.name, 14), x + 14, place + 4, f"end {hue(line.colour)}", tip=line.name)
    return body


def _apart(wanted: Sequence[float], gap: float, lowest: float) -> list[float]:
    """The sorted heights `wanted`, moved until they are a gap apart and none lies beneath `lowest`."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + gap) if places else y)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], lowest)
        lowest = places[i] - gap
    return places


def _swarm(dots: Sequence[Dot], scale: Callable[[float], float], pitch: float = 9.5) -> list[tuple[Dot, float]]:
    """Dots with a vertical shift each, so that neighbours don't hide one another while there is room."""
    last = dict.fromkeys((0.0, -pitch, pitch, -2 * pitch, 2 * pitch), -math.inf)
    placed = []
    for dot in sorted(dots, key=lambda dot: dot.value):
        x = scale(dot.value)
        lift = next((lift for lift, end in last.items() if x - end >= pitch), min(last, key=last.__getitem__))
        last[lift] = x
        placed.append((dot, lift))
    return sorted(placed, key=lambda pair: pair[0].alarm)  # an alarm is drawn last, over its neighbours


def _brief(value: float) -> str:
    return f"{value:g}" if value < 1000 else f"{value / 1000:.1f}k" if value < 100_000 else f"{value / 1000:.0f}k"
