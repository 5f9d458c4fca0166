"""Charts draw nothing that is no number, and no string as markup."""

import re
from typing import Any

from outrider.report import page
from outrider.report.page import acceptance_charts, charts
from outrider.report.page.charts import Axis, Dot, Line, Rows
from outrider.report.schema import Row

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
    return macro(
        "charts.html", "rungs", acceptance_charts.ladder([name]), {name: {name: [tested, accepted]}}, {name: 0}
    )


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
