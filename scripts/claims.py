"""Claims about speed: every speed-up stands beside tokens/s, and every figure of speed in a result.

    python scripts/claims.py [PAGE ...] [--stale]

Reads README, docs and the pages of results (and PAGE, such as a demo's report.html).  A section that names a speed-up
must have tokens/s too.  A figure outside the generated tables must stand, rounded alike, in a result of a page that its
section or page links to.  docs/decisions.md is a record of dated measurements and is left out.  Exits with 1 on a
complaint.  --stale lists each result with the number of later commits that changed code which it measures.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
RECORDS = {"decisions.md", "settings.md"}
GENERATED = re.compile(r"<!-- (\w[\w-]*) -->.*?<!-- /\1 -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ ", re.MULTILINE)
LINK = re.compile(r"pages/([\w-]+\.md)|\]\(([\w-]+\.md)[)#]")
NUMBERS = r"\d+\.\d+(?:(?:, | to | and | or )\d+\.\d+)*"
NO_SPEED = r"(?! (?:as (?:long|large|many|often)|the (?:time|size|memory|bytes|bound)|what|of|one|that|this) ?)"
"""What follows ratios of other things."""
SPEED_UP = re.compile(rf"({NUMBERS}) times\b{NO_SPEED}|\bspeed-ups? (?:of |is )?({NUMBERS})|({NUMBERS})×")
RATE = re.compile(r"(\d[\d,]*(?:\.\d+)?(?:(?:, | to | and )\d[\d,]*(?:\.\d+)?)*) (?:tokens/s|tokens per second)")
MENTION = re.compile(r"tokens/s|tokens per second|tok/s")
SPEED_HEAD = re.compile(r"^\|.*speed-up.*\|\n\| ?:?---", re.MULTILINE)
MEASURED = ("decoding", "sampling", "policies", "kernels", "targets", "retrieval", "nn", "fast", "drafters", "serve")
"""Packages whose code decides how fast text is generated."""


class Complaint(NamedTuple):
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def pages() -> list[Path]:
    docs = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in RECORDS]
    return [ROOT / "README.md", *docs, BENCHMARKS / "RESULTS.md", *sorted((BENCHMARKS / "pages").glob("*.md"))]


def complaints(page: Path) -> Iterator[Complaint]:
    """What this page claims without evidence."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".html":
        text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL))
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    of_page = results_of(page, text)
    for section in HEADING.split(CODE.sub("", text)):
        title = section.partition("\n")[0].strip()
        prose = " ".join(GENERATED.sub("", section).split())
        speed_ups = list(SPEED_UP.finditer(prose))
        if (speed_ups or SPEED_HEAD.search(section)) and not MENTION.search(section):
            what = speed_ups[0].group() if speed_ups else "a column of speed-ups"
            yield Complaint(name, f"“{title}” has {what}, but no tokens/s beside it")
        if page.suffix == ".html":
            continue
        sources = results_of(page, section) | of_page
        for match in [*speed_ups, *RATE.finditer(prose)]:
            for figure in re.findall(r"\d[\d,]*(?:\.\d+)?", next(each for each in match.groups() if each)):
                if not any(stands(figure, source) for source in sources):
                    where = ", ".join(sorted(sources)) or "no result, since it links to no page of results"
                    yield Complaint(name, f"“{title}”: {figure} in “{match.group()}” does not stand in {where}")


def results_of(page: Path, text: str) -> set[str]:
    """Results of the pages of results that a text links to, and of its own tables."""
    linked = {BENCHMARKS / "pages" / (one or other) for one, other in LINK.findall(text)}
    texts = [text, *(each.read_text(encoding="utf-8") for each in linked if each.is_file())]
    names = {name for each in texts for name in re.findall(r"<!-- (\w[\w-]*) -->", each)}
    return {name for name in names if (BENCHMARKS / "results" / f"{name}.json").is_file() or name == "table"}


@cache
def numbers(source: str) -> frozenset[float]:
    """Every number of a result; of `table`, which pages hold themselves, those in its cells."""
    if source == "table":
        blocks = (GENERATED.finditer(page.read_text(encoding="utf-8")) for page in (BENCHMARKS / "pages").glob("*.md"))
        cells = " ".join(block.group() for each in blocks for block in each if block.group(1) == "table")
        return frozenset(float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", cells))
    return frozenset(flat(json.loads((BENCHMARKS / "results" / f"{source}.json").read_text(encoding="utf-8"))))


def flat(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from flat(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def stands(figure: str, source: str) -> bool:
    """Whether a result has a number that is this figure when rounded alike."""
    plain = figure.replace(",", "")
    decimals = len(plain.partition(".")[2])
    return any(abs(each - float(plain)) <= 0.5000001 * 10**-decimals for each in numbers(source))


def stale() -> Iterator[str]:
    """Each result whose code has changed, as a line; nothing outside a clone."""
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.split()
    for path in sorted((BENCHMARKS / "results").glob("*.json")):
        commit = (
            json.loads(path.read_text(encoding="utf-8")).get("commit")
            or (git("log", "-1", "--format=%h", "--", str(path)) or [""])[0]
        )
        later = git("rev-list", f"{commit}..HEAD", "--", *(f"outrider/{name}" for name in MEASURED)) if commit else []
        if later:
            yield f"{path.stem}: of {commit}; {len(later)} later commits changed what it measures"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--stale", action="store_true")
    options = parser.parse_args()
    found = [each for page in [*pages(), *options.pages] for each in complaints(page)]
    print(*found, *(stale() if options.stale else ()), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
