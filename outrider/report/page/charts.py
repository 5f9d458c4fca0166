"""Bars, lines and rows of marks: data and layout; `charts.html` draws them, `heat.html` draws tables.

plotly, the usual choice, would add 4 MB of script that does not print to every report; these shapes take 20 kB, are
static, and include their numbers as text and tooltips.
A colour is a number from 0, in the order of the drafters; None is the grey of the target alone.  The style sheet maps
both to values, so light, dark and print share one drawing.  A value of None is "not measured", never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.report.schema import Row

COLOURS = 7
WIDE, HALF, THIRD, PHONE = 960, 470, 306, 364
GUTTER = 218
"""Width to the left of bars and rows of marks, for a name with the conditions below it."""
MAX_TIPS = 1200
"""Maximum number of dots that have a tooltip each: tooltips dominate the size of a large page."""
SHAPES = ("circle", "square", "diamond", "triangle")


def hue(colour: int | None) -> str:
    """The class that gives an element its colour."""
    return "plain" if colour is None else f"c{colour % COLOURS}"


def shape_of(colour: int | None) -> str:
    return "circle" if colour is None else SHAPES[colour % len(SHAPES)]


class Axis(NamedTuple):
    """The range of a scale and the format of its values."""

    label: str
    low: float
    high: float
    say: Callable[[float], str] = lambda value: f"{value:g}"
    at: Sequence[float] | None = None
    """Ticks; None for round numbers."""

    @property
    def ticks(self) -> Sequence[float]:
        return round_ticks(self.low, self.high) if self.at is None else self.at

    def scaled(self, value: float, start: float, end: float) -> float:
        """The pixel between start and end for a value, clamped to the axis."""
        return start + (end - start) * min(max((value - self.low) / ((self.high - self.low) or 1.0), 0.0), 1.0)


PERCENT = Axis("accepted", 0, 1, lambda value: f"{value:.0%}", (0, 0.25, 0.5, 0.75, 1))


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from low to high."""
    span = max(high - low, 1e-12)
    unit = 10.0 ** math.floor(math.log10(span / count))
    step = next((unit * m for m in (1, 2, 2.5, 5, 10) if span / (unit * m) <= count + 0.5), unit * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


# ── rows: bars and marks ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Rows:
    """Bars or marks, one per row on one scale, with a reference line."""

    kind: str
    """`bars` or `marks`."""
    items: Sequence[Any]
    """What the chart's template draws, one per row."""
    axis: Axis
    line: float | None = None
    line_text: str = ""
    row: int = 46
    width: int = WIDE
    left: int = GUTTER
    right: int = 256

    @property
    def top(self) -> int:
        return 8 if self.line is None else 30

    @property
    def bottom(self) -> int:
        return self.top + self.row * len(self.items)

    def x(self, value: float) -> float:
        return self.axis.scaled(value, self.left, self.width - self.right)


class Dot(NamedTuple):
    """One sample of a strip."""

    value: float
    tip: str
    is_alarm: bool = False
    lift: float = 0
    """Pixels below the middle of its row."""


def strips(rows: Sequence[tuple[Row, Sequence[Dot]]], axis: Axis, line: float, line_text: str) -> Rows:
    """Every sample of a row as a dot."""
    chart = Rows("marks", rows, axis, line, line_text, row=62, right=190)
    return replace(chart, items=[(row, _swarm(dots, chart.x)) for row, dots in rows])


def _swarm(dots: Sequence[Dot], x: Callable[[float], float], pitch: float = 9.5) -> list[Dot]:
    """Dots with vertical shifts, so that neighbours don't overlap as long as there is room."""
    last = dict.fromkeys((0.0, -pitch, pitch, -2 * pitch, 2 * pitch), -math.inf)
    placed = []
    for dot in sorted(dots, key=lambda dot: dot.value):
        here = x(dot.value)
        lift = next((lift for lift, end in last.items() if here - end >= pitch), min(last, key=last.__getitem__))
        last[lift] = here
        placed.append(dot._replace(lift=lift))
    return sorted(placed, key=lambda dot: dot.is_alarm)  # an alarm is drawn last, on top of its neighbours


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Line(NamedTuple):
    """A named curve; a point with the value None leaves a gap."""

    name: str
    colour: int | None
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves, each labelled at its end.  Markers with tooltips are at every point, or only at the x values in
    `marks`."""

    series: Sequence[Line]
    x: Axis
    y: Axis
    width: int = HALF
    height: int = 290
    marks: Collection[float] | None = None

    def across(self, value: float) -> float:
        return self.x.scaled(value, 46, self.width - 108)

    def up(self, value: float) -> float:
        return self.y.scaled(value, self.height - 42, 26)

    def path(self, line: Line) -> str:
        commands, move = [], "M"
        for x, y in line.points:
            if y is not None:
                commands.append(f"{move}{self.across(x):.1f} {self.up(y):.1f}")
            move = "M" if y is None else "L"
        return "".join(commands)

    def marked(self, line: Line) -> list[tuple[float, float, str]]:
        """Positions of the markers with their tips."""
        return [
            (self.across(x), self.up(y), f"{line.name}, {self.x.label} {self.x.say(x)}: {self.y.say(y)}")
            for x, y in line.points if y is not None and (self.marks is None or x in self.marks)
        ]  # fmt: skip

    def ends(self) -> list[tuple[Line, float, float, float]]:
        """(line, x, y, height of its label), with labels kept apart."""
        last = [(line, *[point for point in line.points if point[1] is not None][-1]) for line in self.series]
        ends = sorted(((line, self.across(x), self.up(y or 0.0)) for line, x, y in last), key=lambda end: end[2])
        heights = spaced([y for _, _, y in ends], 15.0, self.height - 48)
        return [(*end, height) for end, height in zip(ends, heights, strict=True)]


def lines(
    series: Sequence[Line],
    x: Axis,
    y: Axis,
    width: int = HALF,
    height: int = 290,
    marks: Collection[float] | None = None,
) -> Lines | None:
    """A chart of the curves that have a point; None without any."""
    series = [line for line in series if any(value is not None for _, value in line.points)]
    return Lines(series, x, y, width, height, marks) if series else None


def spaced(preferred: Sequence[float], gap: float, lowest: float) -> list[float]:
    """The sorted `preferred` heights, moved until they are a gap apart and none is below `lowest`."""
    heights: list[float] = []
    for y in preferred:
        heights.append(max(y, heights[-1] + gap) if heights else y)
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], lowest)
        lowest = heights[i] - gap
    return heights


def shade_of(value: float, low: float, high: float) -> str:
    """The class of a cell that darkens from low to high."""
    return f"h{round(Axis('', low, high).scaled(value, 0, 9))}"


class Panel(NamedTuple):
    """Curves under their own small heading."""

    body: Lines | None
    title: str = ""
    note: str = ""
    is_wide: bool = False
