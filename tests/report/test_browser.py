"""The page as a reader's browser sees it: nothing breaks, nothing leaves, everything is drawn and can be read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.report.compare import Comparison
from outrider.report.page import render, render_comparison
from outrider.report.page.cost import costs, texts
from outrider.report.schema import Report
from tests.report.examples import full_report, hostile_report, null_report, row

playwright = pytest.importorskip("playwright.sync_api", reason="playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser: chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def compared() -> Comparison:
    other = full_report(rows=[row("dspark", "chat"), row("dspark", "code")], fingerprint={"device": "cpu"})
    return Comparison.of([("before", full_report()), ("after", other)])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One window for the whole file, with a profile of its own."""
    with playwright.sync_playwright() as play:
        profile = tmp_path_factory.mktemp("profile")
        context = play.chromium.launch_persistent_context(profile, executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield context
        context.close()


MADE = {
    "full": full_report, "null": null_report, "hostile": hostile_report,
    "empty": lambda: Report(target="tiny"), "compared": compared,
}  # fmt: skip


class Pages(dict[str, Path]):
    """Files by the name of what they show, each written when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        shown = MADE[name]()
        self[name] = self.folder / f"{name}.html"
        self[name].write_text(
            render_comparison(shown) if isinstance(shown, Comparison) else render(shown), encoding="utf-8"
        )
        return self[name]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("pages"))


class Opened:
    """A page that is open, and what it complained of or asked for meanwhile."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.page = browser.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console",
            lambda message: self.faults.append(message.text) if message.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()


@pytest.mark.parametrize("name", MADE)
def test_the_page_opens_without_a_fault_and_asks_for_nothing_else(browser, pages, name):
    """Catches a script that throws, a style or script that its own policy refuses, and anything that is fetched."""
    with Opened(browser, pages[name]) as opened:
        assert opened.faults == []
        assert opened.asked == [pages[name].as_uri()]


def test_a_script_that_is_not_ours_does_not_run(browser, pages, tmp_path):
    """Catches a policy that lets inline scripts in as such: the second lock behind the escaping."""
    evil = tmp_path / "evil.html"
    html = pages["full"].read_text(encoding="utf-8")
    evil.write_text(
        html.replace("</main>", "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'></main>")
    )
    with Opened(browser, evil) as opened:
        assert opened.page.evaluate("window.ran") is None
        assert opened.faults


GIVEN = [(2.5, 10.0, 0.0), (5.0, 10.0, 0.0), (0.37, 1234.5, 999.0), (0.0, 1.0, 0.0), (98.32, 0.001, 1e6)]
SHOWN = """() => [...document.querySelectorAll('tr[data-plain]')].map(line =>
  Object.fromEntries([...line.querySelectorAll('[data-cell]')].map(cell => [cell.dataset.cell, cell.textContent])))"""


def test_the_costs_follow_the_inputs_as_python_reckons_them(browser, pages):
    """Two programs hold the same sums: catches the day one of them changes, or rounds another way."""
    report = full_report()
    with Opened(browser, pages["full"]) as opened:
        for given in GIVEN:
            for name, value in zip(("price", "tokens", "other"), given, strict=True):
                opened.page.fill(f"[data-setting={name}]", repr(value))
            wanted = []
            for line in report.rows:
                training = report.training.get(line.drafter)
                trained = training.seconds if training else None
                wanted.append(texts(costs(line.plain_tokens_per_s, line.tokens_per_s, trained, *given)))
            assert opened.page.evaluate(SHOWN) == wanted
        for wrong in ("", "-1"):  # no price gives no figure: no NaN, no negative saving
            opened.page.fill("[data-setting=price]", wrong)
            assert set(opened.page.locator("[data-cell]").all_inner_texts()) == {"–"}


FAINT = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true }), known = {};
  const rgba = text => known[text] ??= (canvas.clearRect(0, 0, 1, 1), canvas.fillStyle = text,
    canvas.fillRect(0, 0, 1, 1),
    [...canvas.getImageData(0, 0, 1, 1).data].map((v, i) => i < 3 ? v : v / 255));
  const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const ground = node => {
    const layers = [];
    for (let n = node; n; n = n.parentElement) layers.push(rgba(getComputedStyle(n).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ['SCRIPT', 'STYLE', 'TITLE'].includes(node.tagName.toUpperCase())) continue;
    if (!node.checkVisibility()) continue;
    const style = getComputedStyle(node), drawn = node instanceof SVGElement;
    let under = ground(node);
    const before = node.previousElementSibling;
    if (drawn && /^in-/.test(node.className.baseVal)) under = over(rgba(getComputedStyle(before).fill), under);
    const ink = over(rgba(drawn ? style.fill : style.color), under);
    const [a, b] = [light(ink), light(under)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    if (ratio < 4.5)
      found.add(`${node.tagName}.${drawn ? node.className.baseVal : node.className} ${ratio.toFixed(2)}`);
  }
  return [...found];
}"""
"""Text without enough contrast, of the playground's page (`tests/serve/test_page.py`)."""
