"""Four kinds of chart: bars, lines, rows of marks, heat.  What they show and where it stands; `charts.html` draws them.

The field's habit here is plotly.  It would make every report 4 MB of script that does not print; these few shapes are
20 kB, stand still, and carry their numbers as text and as tooltips.
A colour is a number from 0, in the order the drafters appear; None is the grey of the target alone.  The page's style
sheet gives both a value, so light, dark and print share one drawing.  A value of None is "not measured", never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from outrider.report.summary import say

COLOURS = 7
WIDE, HALF, THIRD = 960, 470, 306
GUTTER = 218
"""Left of bars and rows of marks: room for a name and the conditions under it."""
TOLD = 1200
"""Most dots that carry a tooltip each: tooltips are most of a large page's size."""
SHAPES = ("circle", "square", "diamond", "triangle")


def hue(colour: int | None) -> str:
    """The class that gives an element its colour."""
    return "plain" if colour is None else f"c{colour % COLOURS}"


def shape_of(colour: int | None) -> str:
    return "circle" if colour is None else SHAPES[colour % len(SHAPES)]


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

    def place(self, value: float, start: float, end: float) -> float:
        """From a value to pixels between start and end; what lies outside the axis lands on its edge."""
        return start + (end - start) * min(max((value - self.low) / ((self.high - self.low) or 1.0), 0.0), 1.0)


PERCENT = Axis("kept", 0, 1, lambda value: f"{value:.0%}", (0, 0.25, 0.5, 0.75, 1))


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers from low to high."""
    span = max(high - low, 1e-12)
    unit = 10.0 ** math.floor(math.log10(span / wanted))
    step = next((unit * m for m in (1, 2, 2.5, 5, 10) if span / (unit * m) <= wanted + 0.5), unit * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


# ── rows: bars and marks ──────────────────────────────────────────────────────────────────────────────────────────────


class Piece(NamedTuple):
    """A part of a bar, from where the one before it ends."""

    class_: str
    value: float
    tip: str
    text: str = ""


class Mark(NamedTuple):
    """One sample on a row."""

    value: float
    class_: str
    tip: str = ""
    shape: str = "circle"
    radius: float = 6
    lift: float = 0
    """Pixels beneath the middle of its row."""


class Stroke(NamedTuple):
    """A small upright line on a row."""

    value: float
    class_: str
    tip: str = ""
    reach: float = 6


class Span(NamedTuple):
    """A line along a row."""

    low: float
    high: float
    class_: str
    tip: str = ""


@dataclass(frozen=True)
class Item:
    """One row: a name and what stands beside it.  A row without pieces, marks and specks was not measured."""

    name: str
    context: str = ""
    pieces: Sequence[Piece] = ()
    marks: Sequence[Mark] = ()
    strokes: Sequence[Stroke] = ()
    span: Span | None = None
    whisker: tuple[float, float, float] | None = None
    """Low, center and high of an interval, drawn over the end of the bar."""
    specks: str = ""
    """Many dots in one path: a fifth of the size."""
    specks_class: str = ""
    value: str = ""
    """What is said first, in bold."""
    text: str = ""
    alarm: str = ""

    @property
    def is_measured(self) -> bool:
        return bool(self.pieces or self.marks or self.specks)


@dataclass(frozen=True)
class Rows:
    """Bars, or marks, one a row over one scale, with a line to compare them with."""

    kind: str
    """`bars` or `marks`."""
    items: Sequence[Item]
    axis: Axis
    line: float | None = None
    line_text: str = ""
    row: int = 46
    width: int = WIDE
    left: int = GUTTER
    right: int = 256
    is_bare: bool = False
    """Without a scale beneath: the pieces say their own share."""

    @property
    def top(self) -> int:
        return 8 if self.line is None else 30

    @property
    def bottom(self) -> int:
        return self.top + self.row * len(self.items)

    def x(self, value: float) -> float:
        return self.axis.place(value, self.left, self.width - self.right)

    def placed(self, item: Item) -> list[tuple[Piece, float, float]]:
        """Every piece with its place and its width."""
        found, start, gap = [], self.axis.low, 1.5 if len(item.pieces) > 1 else 0.0
        for piece in item.pieces:
            begin, end = self.x(start), self.x(start + piece.value)
            found.append((piece, begin, max(end - begin - gap, 0.0 if gap else 1.0)))
            start += piece.value
        return found

    def end(self, item: Item) -> float:
        """Where the words of a bar begin: right of all that is drawn."""
        whisker = item.whisker[2] if item.whisker else 0.0
        return (
            self.x(max(sum(p.value for p in item.pieces), *(m.value for m in item.marks), self.line or 0.0, whisker, 0.0)) + 12
        )


def columns(counts: Sequence[float], most: float, colour: int | None, unit: str, what: str, first: int = 1) -> Rows:
    """Counts by depth, or by what else is counted from `first`, on a scale that ends at `most`."""
    total = sum(counts)
    items = []
    for i, count in enumerate(counts, first):
        tip = f"{count:,} {what}, {unit} {i}, {count / total if total else 0:.0%} of {total:,}"
        piece = Piece(f"bar {hue(colour)}", count, tip)
        items.append(Item(str(i), pieces=[piece], span=Span(0, most or 1, "rung"), text=f"{count:,}"))
    return Rows("bars", items, Axis(unit, 0, most or 1), row=20, width=THIRD, left=30, right=64, is_bare=True)


def spread(
    name: str, context: str, colour: int | None, ends: tuple[float | None, float | None, float | None], text: str,
    tick: float | None = None, is_hollow: bool = False,
) -> Item:  # fmt: skip
    """A row with a mark on the line it lies on.  ends: low, center, high; tick: a fourth value between them."""
    low, center, high = ends
    if center is None:
        return Item(name, context)
    tip, colour_class = f"{name}, {context}: {text}", hue(colour)
    mark = Mark(center, f"{'hollow' if is_hollow else 'mark'} {colour_class}", tip, shape_of(colour))
    strokes = [] if tick is None else [Stroke(tick, f"span {colour_class}")]
    span = Span(center if low is None else low, center if high is None else high, f"span {colour_class}", tip)
    return Item(name, context, marks=[mark], strokes=strokes, span=span, text=text)


def spreads(items: Sequence[Item], axis: Axis, line: float | None = None, line_text: str = "") -> Rows | None:
    """Such rows as a chart; None where no row has anything."""
    return Rows("marks", items, axis, line, line_text, row=40) if any(item.is_measured for item in items) else None


class Dot(NamedTuple):
    """One sample of a strip."""

    value: float
    tip: str
    alarm: bool = False


def strips(rows: Sequence[tuple[Item, int | None, Sequence[Dot]]], axis: Axis, line: float, line_text: str) -> Rows:
    """Every sample as a dot, one strip a row, the median as a tick; alarming dots are large crosses."""
    chart = Rows("marks", [item for item, _, _ in rows], axis, line, line_text, row=62, right=190)
    told = sum(len(dots) for _, _, dots in rows) <= TOLD
    items = []
    for item, colour, dots in rows:
        if not dots:
            items.append(item)
            continue
        placed = _swarm(dots, chart.x)
        marks = [
            Mark(dot.value, "dot alarmed", dot.tip, "cross", 8, lift) if dot.alarm
            else Mark(dot.value, f"dot {hue(colour)}", dot.tip, "circle", 4.5, lift)
            for dot, lift in placed if told or dot.alarm
        ]  # fmt: skip
        path = "" if told else "".join(f"M{chart.x(dot.value):.0f} {lift:.0f}h0" for dot, lift in placed if not dot.alarm)
        middle = median(dot.value for dot in dots)
        stroke = Stroke(middle, "median", f"median {middle:.2f}", 24)
        items.append(replace(
            item, marks=marks, specks=path, specks_class=f"specks {hue(colour)}", strokes=[stroke],
            value=f"median {axis.say(middle)}",
        ))  # fmt: skip
    return replace(chart, items=items)


def _swarm(dots: Sequence[Dot], x: Callable[[float], float], pitch: float = 9.5) -> list[tuple[Dot, float]]:
    """Dots with a vertical shift each, so that neighbours don't hide one another while there is room."""
    last = dict.fromkeys((0.0, -pitch, pitch, -2 * pitch, 2 * pitch), -math.inf)
    placed = []
    for dot in sorted(dots, key=lambda dot: dot.value):
        here = x(dot.value)
        lift = next((lift for lift, end in last.items() if here - end >= pitch), min(last, key=last.__getitem__))
        last[lift] = here
        placed.append((dot, lift))
    return sorted(placed, key=lambda pair: pair[0].alarm)  # an alarm is drawn last, over its neighbours


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Line(NamedTuple):
    """A named curve; a point whose second value is None leaves a gap."""

    name: str
    colour: int | None
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves, each named at its end.  A marker and its tooltip stand at every point, or at the x values in `marks`."""

    series: Sequence[Line]
    x: Axis
    y: Axis
    width: int = HALF
    height: int = 290
    marks: Collection[float] | None = None
    kind = "lines"

    def across(self, value: float) -> float:
        return self.x.place(value, 46, self.width - 108)

    def up(self, value: float) -> float:
        return self.y.place(value, self.height - 42, 26)

    def path(self, line: Line) -> str:
        found, move = [], "M"
        for x, y in line.points:
            if y is not None:
                found.append(f"{move}{self.across(x):.1f} {self.up(y):.1f}")
            move = "M" if y is None else "L"
        return "".join(found)

    def marked(self, line: Line) -> list[tuple[float, float, str]]:
        """Places of the markers, with their tips."""
        return [
            (self.across(x), self.up(y), f"{line.name}, {self.x.label} {self.x.say(x)}: {self.y.say(y)}")
            for x, y in line.points if y is not None and (self.marks is None or x in self.marks)
        ]  # fmt: skip

    def ends(self) -> list[tuple[Line, float, float, float]]:
        """(line, x, y, height of its name): names keep their distance."""
        last = [(line, *[point for point in line.points if point[1] is not None][-1]) for line in self.series]
        ends = sorted(((line, self.across(x), self.up(y or 0.0)) for line, x, y in last), key=lambda end: end[2])
        places = spaced([y for _, _, y in ends], 15.0, self.height - 48)
        return [(*end, place) for end, place in zip(ends, places, strict=True)]


def lines(
    series: Sequence[Line], x: Axis, y: Axis, width: int = HALF, height: int = 290, marks: Collection[float] | None = None
) -> Lines | None:
    """A chart of the curves that have a point; None where there is none."""
    series = [line for line in series if any(value is not None for _, value in line.points)]
    return Lines(series, x, y, width, height, marks) if series else None


def spaced(wanted: Sequence[float], gap: float, lowest: float) -> list[float]:
    """The sorted heights `wanted`, moved until they are a gap apart and none lies beneath `lowest`."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + gap) if places else y)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], lowest)
        lowest = places[i] - gap
    return places


# ── heat ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Cell(NamedTuple):
    """One cell of a heat table."""

    value: float | None
    text: str
    tip: str = ""


@dataclass(frozen=True)
class Heat:
    """A table whose cells darken from low to high.  rows: (name, context, cells); every cell says its own number."""

    corner: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, str, Sequence[Cell]]]
    low: float
    high: float
    kind = "heat"

    def step(self, cell: Cell) -> str:
        """The class of a cell."""
        if cell.value is None:
            return "missing"
        return f"h{round(9 * min(max((cell.value - self.low) / ((self.high - self.low) or 1), 0), 1))}"


@dataclass(frozen=True)
class Grid:
    """A plain table; the first column names the line."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind = "grid"


Chart = Rows | Lines | Heat | Grid


class Panel(NamedTuple):
    """A drawing or a table under its own small heading."""

    body: Chart | None
    title: str = ""
    note: str = ""
    keys: Sequence[str] = ()
    """Names of the parts, where colour tells them."""
    is_wide: bool = False


def cells(values: Sequence[float | None], width: int, spec: str = ".0f", scale: float = 100) -> list[Cell]:
    """Numbers as cells, filled up to a width; those that are missing are dashes."""
    padded = [*values, *[None] * (width - len(values))]
    return [Cell(value, say(value, spec, scale=scale, missing="–")) for value in padded]
