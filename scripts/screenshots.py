"""Screenshots of the report page, for visual checks: `python scripts/screenshots.py [REPORT] [--out runs/screenshots]`.

REPORT is a report.json or its folder; without it, the page shows made-up numbers that fill every part.  Needs Chromium
and Playwright's Python package.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("report", nargs="?", type=Path)
    options.add_argument("--html", type=Path, help="a page that is there already")
    options.add_argument("--out", type=Path, default=ROOT / "runs" / "screenshots")
    options.add_argument("--chromium", default="/usr/bin/chromium")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    page_file = given.html or given.out / "report.html"
    if given.html is None:
        page_file.write_text(_html(given.report), encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as play:
        browser = play.chromium.launch_persistent_context(
            profile, executable_path=given.chromium, headless=True, args=FLAGS
        )
        for scheme in ("light", "dark"):
            for width in (1400, 800, 360):
                page = browser.new_page()
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 1000})
                page.goto(page_file.absolute().as_uri())
                place = given.out / f"{scheme}-{width}.png"
                page.screenshot(path=place, full_page=True)
                page.close()
                print(place)
        page = browser.new_page()
        page.goto(page_file.absolute().as_uri())
        page.pdf(path=given.out / "print.pdf", prefer_css_page_size=True)
        print(given.out / "print.pdf")
        browser.close()


def _html(report: Path | None) -> str:
    from outrider.report.page import render
    from outrider.report.schema import Report

    if report is not None:
        return render(Report.load(report))
    sys.path.insert(0, str(ROOT))
    from tests.report.examples import full_report

    return render(full_report())


if __name__ == "__main__":
    main()
