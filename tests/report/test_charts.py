"""Charts draw what they are given: every number as text or tip, nothing that is no number, no string as markup."""

from __future__ import annotations

import re

import pytest

from outrider.report.page import charts
from outrider.report.page.charts import Axis, Bar, Cell, Dot, Line, Rung, Spread, Strip

BAD = "<script>alert(1)</script>\"'&"
UNIT = Axis("share", 0, 1)


def drawings(name: str = "a", value: float | None = 0.5) -> dict[str, str]:
    """Every chart with one named value."""
    cell = Cell(value, name, name)
    return {
        "bars": charts.bars([Bar(name, name, 0, value, name, name, value, (0.4, 0.5, 0.6))], UNIT, 1.0, name),
        "lines": charts.lines([Line(name, 0, [(1, value), (2, None), (3, 0.4)], dashed=True)], Axis(name, 1, 3), UNIT),
        "ladder": charts.ladder([Rung(name, [(name, 0, value, name), (name, 1, None, name)])], UNIT),
        "spreads": charts.spreads([Spread(name, name, 0, 0.2, value, 0.8, name, 0.6)], UNIT, 1.0, name),
        "heat": charts.heat(name, [name], [(name, name, [cell, Cell(None, "–")])], 0, 1),
        "strips": charts.strips([Strip(name, name, 0, [Dot(0.5, name), Dot(0.6, name, True)], name)], UNIT, 1.0, name),
        "columns": charts.columns([3, 1], 3, 0, name, name),
        "shares": charts.shares([charts.Shares(name, name, [("draft", value), ("verify", 0.5)], name)]),
    }


@pytest.mark.parametrize("name", drawings())
def test_a_name_from_data_is_never_markup(name):
    """One forgotten escape, and a task's name runs in the reader's browser."""
    drawn = drawings(BAD)[name]
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn
    # what is left of a quote inside an attribute would end it
    assert not re.search(r'="[^"]*<', drawn)


@pytest.mark.parametrize("name", drawings())
def test_what_is_not_measured_is_drawn_as_no_number(name):
    """None slips into a format as `None`, or into a scale as 0."""
    drawn = drawings(value=None)[name]
    for wrong in ("None", "nan", "inf"):
        assert not re.search(rf"\b{wrong}\b", drawn)


def test_charts_of_nothing_are_nothing():
    """An axis without a mark looks like a measurement that found none."""
    assert charts.lines([Line("a", 0, [(1, None)])], UNIT, UNIT) == ""
    assert charts.ladder([Rung("a", [("b", 0, None, "")])], UNIT) == ""
    assert charts.spreads([Spread("a", "", 0, None, None, None, "")], UNIT) == ""
    assert charts.columns([], 1, 0, "depth", "steps") == ""


def places(drawn: str, class_: str) -> list[float]:
    """Where the marks of a class stand, from the left."""
    return [float(x) for x in re.findall(rf'<circle cx="([\d.]+)"[^>]*class="{class_}', drawn)]


def test_a_larger_value_stands_further_right():
    """Catches a scale turned round, or one that forgets where its axis begins."""
    found = [places(charts.spreads([Spread("a", "", 0, 0.1, v, 0.9, "")], UNIT), "mark")[0] for v in (0.1, 0.4, 0.7)]
    assert found == sorted(set(found))
    rungs = [places(charts.ladder([Rung("a", [("b", 0, v, "")])], UNIT), "mark")[0] for v in (0.0, 0.5, 1.0)]
    assert rungs[1] - rungs[0] == pytest.approx(rungs[2] - rungs[1], abs=0.2)


def test_heat_rises_with_the_value_and_every_cell_says_its_number():
    """Catches a colour scale that is all that a reader has, or that runs backwards."""
    values = [0.0, 0.2, 0.5, 0.8, 1.0]
    drawn = charts.heat("", [""] * 5, [("a", "", [Cell(v, f"{v:.0%}") for v in values])], 0, 1)
    steps = [int(step) for step in re.findall(r'class="h(\d)"', drawn)]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 9)
    assert all(f"{v:.0%}" in drawn for v in values)


def test_equal_values_do_not_divide_by_nothing():
    """A heat table of one value, and an axis of no length."""
    assert 'class="h0"' in charts.heat("", [""], [("a", "", [Cell(0.5, "x")])], 0.5, 0.5)
    assert charts.spreads([Spread("a", "", 1, 1, 1, 1, "")], Axis("x", 1, 1))


def test_a_crowd_of_dots_loses_its_tips_but_no_dot_and_no_alarm():
    """Thousands of tips are most of a large page; an alarm must keep its own."""
    few = charts.strips([Strip("a", "", 0, [Dot(0.5, "tip")] * 10, "")], UNIT, 1.0, "")
    assert few.count("<title>tip</title>") == 10
    many = [Dot(i / 3000, "tip") for i in range(charts.TOLD + 1)] + [Dot(0.5, "wrong", True)]
    crowd = charts.strips([Strip("a", "", 0, many, "")], UNIT, 1.0, "")
    assert "<title>tip</title>" not in crowd
    assert crowd.count("h0M") + 1 == charts.TOLD + 1
    assert "<title>wrong</title>" in crowd
