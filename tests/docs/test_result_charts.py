"""The drawings of results: what the results say, readable on a phone, by day and by night."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import charts

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "benchmarks" / "charts"
FOUND = {
    name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for name in ("methods", "retrieval", "peers", "serving")
}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SEEN = """() => {
  const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
  const grey = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 765;
  const ground = grey(getComputedStyle(svg.querySelector(".ground")).fill);
  return [...svg.querySelectorAll("text")].map(text => {
    const own = text.getBoundingClientRect(), style = getComputedStyle(text);
    const inside = own.left >= box.left && own.right <= box.right && own.top >= box.top && own.bottom <= box.bottom;
    return {said: text.textContent, inside, size: parseFloat(style.fontSize) * box.width / svg.viewBox.baseVal.width,
            contrast: Math.abs(grey(style.fill) - ground)};
  });
}"""


def test_drawings_are_those_of_the_results() -> None:
    """Catches a result that was measured again and is drawn as it was: python benchmarks/tables.py draws it."""
    drawn = charts.charts(FOUND)
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(drawn)
    for name, drawing in drawn.items():
        assert (FOLDER / f"{name}.svg").read_text() == drawing, f"{name}.svg; run `python benchmarks/tables.py`"


def test_every_kind_has_a_bar_of_its_own_length() -> None:
    """Catches bars in another order than their names, and a scale that does not begin at 0."""
    drawing = (FOLDER / "methods.svg").read_text()
    names = re.findall(r'class="name">(?:<title>[^<]*</title>)?([\w]+)<', drawing)
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="11"', drawing)]
    rows = {row["method"]: row["temperature_0"] for row in FOUND["methods"]["rows"] if row["column"] == "minutes"}
    steps = [rows[name]["tokens_per_step"] for name in names]
    assert len(names) == len(widths) >= 10
    assert [width / steps[0] for width in steps] == pytest.approx([width / widths[0] for width in widths], abs=0.005)


def test_an_engines_line_is_its_fastest_way() -> None:
    """Catches a line that mixes engines, or takes the last way instead of the fastest."""
    chart = charts.engines(FOUND["peers"]["rows"], "batch", "texts at a time")
    ours = next(line for line in chart.series if line.name == "outrider")
    rows = [row for row in FOUND["peers"]["rows"] if row["way"].startswith("outrider")]
    for at, speed in ours.points:
        assert speed == max(row["tokens_per_s"] for row in rows if row["batch"] == round(2**at))


def test_drawings_can_be_read_on_a_phone_by_day_and_by_night(tmp_path: Path) -> None:
    """Catches names that leave the drawing or are too small at 400 pixels, and ink of the ground's own colour."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as play:
        browser: Any = play.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        page = browser.new_page()
        page.set_viewport_size({"width": 400, "height": 800})
        for path in sorted(FOLDER.glob("*.svg")):
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.set_content(
                    f"<body style='margin:16px'><style>svg{{width:100%;height:auto}}</style>{path.read_text()}"
                )
                for text in page.evaluate(SEEN):
                    assert text["inside"], (path.name, text)
                    assert text["size"] >= 10, (path.name, text)
                    assert text["contrast"] > 0.25, (path.name, scheme, text)
        browser.close()
