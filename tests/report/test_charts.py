"""Charts draw what they are given: every number as text or tip, nothing that is no number, no string as markup."""

import re
from typing import Any

import pytest

from outrider.report import page
from outrider.report.page import acceptance, charts
from outrider.report.page.charts import Axis, Dot, Line, Rows
from outrider.report.schema import Row
from tests.report.examples import full_report
from tests.report.examples import row as report_row

PROMISED = [
    "tokens_per_step", "accepted_by_depth", "tokens_per_s", "plain_tokens_per_s", "speedup", "exact", "compared_tokens",
    "share", "ttft_ms", "itl_ms",
]  # fmt: skip
BAD = "<script>alert(1)</script>\"'&"
UNIT = Axis("share", 0, 1)


def macro(template: str, name: str, *given: Any) -> str:
    """What a template's macro makes of something."""
    return str(getattr(page._environment().get_template(template).make_module(), name)(*given))


def line(name: str = "a", **measured: Any) -> Row:
    needed = {"drafter": name, "task": name, "prompts": 1, "temperature": 0} | dict.fromkeys(PROMISED)
    return Row.model_validate(needed | measured)


def strips(dots: list[Dot], name: str = "a") -> str:
    chart = charts.strips([(line(name), dots)], UNIT, 1.0, name)
    return macro("charts.html", "strips", chart, {name: 0}, len(dots) <= charts.MAX_TIPS)


def spread(axis: Axis, ends: tuple[float, float | None, float], name: str = "a") -> str:
    return macro("charts.html", "spread", Rows("marks", [], axis, row=40), 0, name, name, 0, ends, name, 0.6)


def rungs(tested: int, accepted: int, name: str = "a") -> str:
    return macro("charts.html", "rungs", acceptance.ladder([name]), {name: {name: [tested, accepted]}}, {name: 0})


def drawings(name: str = "a", value: float | None = 0.5) -> dict[str, str]:
    """Every chart with one named value."""
    row = line(name, speedup=value, exact=False, speedup_range={"center": 0.5, "low": 0.4, "high": value})
    curves = charts.lines([Line(name, 0, [(1, value), (2, None), (3, 0.4)], dashed=True)], Axis(name, 1, 3), UNIT)
    return {
        "lines": macro("charts.html", "lines", curves),
        "strips": strips([Dot(0.5, name), Dot(0.6, name, True)], name),
        "bars": macro("charts.html", "bars", Rows("bars", [row], UNIT, 1.0, name), {name: 0}),
        "stacked_bars": macro("charts.html", "stacked_bars", Rows("bars", [row], UNIT, 1.0, name), {name: 0}),
        "spread": spread(UNIT, (0.2, value, 0.8), name),
        "rungs": rungs(2 if value else 0, 1 if value else 0, name),
        "ruled": macro("charts.html", "bars", Rows("bars", [], Axis(name, 0, 1), 1.0, name), {}),
        "cut": macro("charts.html", "cut", row, {"draft": value, "verify": 0.5}, name),
        "columns": macro("charts.html", "columns", [3, 1], 3, 0, name, name),
        "heat": macro("heat.html", "numbered", name, [(row, [(value, name, name), (None, "", "")])], 1),
        "line": macro("charts.html", "line", name, [name]),
    }


def test_a_name_from_data_is_never_markup():
    """One forgotten escape, and a task's name runs in the reader's browser."""
    for chart, drawn in drawings(BAD).items():
        assert "<script" not in drawn, chart
        assert "&lt;script&gt;" in drawn, chart
        # what is left of a quote inside an attribute would end it
        assert not re.search(r'="[^"]*<', drawn), chart


def test_what_is_not_measured_is_drawn_as_no_number():
    """None slips into a format as `None`, or into a scale as 0."""
    for chart, drawn in drawings(value=None).items():
        assert not re.search(r"\b(None|nan|inf)\b", drawn), chart


def places(svg: str) -> list[float]:
    """Where the marks stand, from the left."""
    return [float(x) for x in re.findall(r'<circle cx="([\d.]+)"[^>]*class="mark', svg)]


def test_a_larger_value_stands_further_right():
    """Catches a scale turned round, or one that forgets where its axis begins."""
    found = [places(spread(UNIT, (0.1, v, 0.9)))[0] for v in (0.1, 0.4, 0.7)]
    assert found == sorted(set(found))
    shares = [places(rungs(2, accepted))[0] for accepted in (0, 1, 2)]
    assert shares[1] - shares[0] == pytest.approx(shares[2] - shares[1], abs=0.2)


def test_heat_rises_with_the_value_and_every_cell_says_its_number():
    """Catches a colour scale that is all that a reader has, or that runs backwards."""
    values = [0.0, 0.2, 0.5, 0.8, 1.0]
    html = "".join(macro("heat.html", "shade", v, 0, 1, f"{v:.0%}") for v in values)
    steps = [int(step) for step in re.findall(r'class="h(\d)"', html)]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 9)
    assert all(f"{v:.0%}" in html for v in values)


def test_equal_values_do_not_divide_by_nothing():
    """A heat table of one value, and an axis of no length."""
    assert 'class="h0"' in macro("heat.html", "shade", 0.5, 0.5, 0.5, "x")
    assert places(spread(Axis("x", 1, 1), (1, 1, 1)))


def test_a_crowd_of_dots_loses_its_tips_but_no_dot_and_no_alarm():
    """Thousands of tips are most of a large page; an alarm must keep its own."""
    assert strips([Dot(0.5, "tip")] * 10).count("<title>tip</title>") == 10
    many = [Dot(i / 3000, "tip") for i in range(charts.MAX_TIPS + 1)] + [Dot(0.5, "wrong", True)]
    crowd = strips(many)
    assert "<title>tip</title>" not in crowd
    assert crowd.count("h0M") + 1 == charts.MAX_TIPS + 1
    assert "<title>wrong</title>" in crowd
    for count, is_crowd in ((charts.MAX_TIPS, False), (charts.MAX_TIPS + 1, True)):
        whole = page.render(full_report(rows=[report_row("dspark", "chat", count)]))
        assert ("There are too many to name each" in whole, 'class="specks' in whole) == (is_crowd, is_crowd)
