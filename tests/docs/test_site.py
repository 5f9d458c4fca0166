"""The site of the docs: one path through all pages, pages of methods from their files, nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import site_methods, site_pages

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
WHOLE = {**site_pages.generated(), **{path.name: path.read_text() for path in DOCS.glob("*.md")}}
"""Every page of the site before it is rendered."""


def places(nav: list[Any]) -> list[str]:
    found = []
    for entry in nav:
        inner = list(entry.values()) if isinstance(entry, dict) else []
        found += [place for one in inner for place in places(one if isinstance(one, list) else [one])]
        found += [entry] if isinstance(entry, str) else []
    return found


def test_the_path_names_every_page_once_and_nothing_else() -> None:
    """Catches a page that was written and that no reader finds, and one that is gone."""
    named = places(site_pages.expanded(CONFIG["nav"]))
    assert sorted(named) == sorted(WHOLE)


def test_the_first_page_goes_the_same_way_as_the_path() -> None:
    """Catches a page that is in the site's path and not on its door, where readers of the repository look."""
    told = re.findall(r"^\| \[[^\]]+\]\(([\w.-]+)\)", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert told == [place for place in places(CONFIG["nav"]) if place not in ("index.md", *site_pages.FOLDERS)]


SCREENS = 120
"""Lines of two screens."""
LONG = {
    "settings.md": "a reference that is written from the code: readers search it",
    "log.md": "a diary: readers read its beginning",
}
"""Pages of docs/ that may be longer, and why."""


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_a_page_is_two_screens_at_most(page: str) -> None:
    """Catches a page that grows by what has a page of its own, or should have one."""
    lines = len(WHOLE[page].splitlines())
    assert lines <= SCREENS or page in LONG, f"{page} has {lines} lines: move what is looked up to a page of its own"


@pytest.mark.parametrize("place", sorted(WHOLE))
def test_links_of_the_site_lead_to_its_pages(place: str) -> None:
    """Catches a link that is right in the repository and not in the site."""
    text = site_pages.rendered(WHOLE[place], place)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", site_pages.FENCE.sub("", text)):
        if "://" not in link:
            there = os.path.normpath(os.path.join(os.path.dirname(place), link))
            assert there in WHOLE, f"{place} links to {link}"


@pytest.mark.parametrize("kind", site_methods.kinds())
def test_a_method_has_its_paper_when_to_take_it_and_its_settings(kind: str) -> None:
    """Catches a drafter whose docstring leaves out what its page needs."""
    one, page = site_methods.method(kind), WHOLE[f"methods/{kind}.md"]
    assert re.search(r"\d{4}\.\d{4,5}|\(Saxena|\(Released", " ".join([one.idea, *one.body])), "no source is named"
    assert "## What differs from the paper" in page and "## When to take it" in page
    assert "| `" in page.partition("## Settings")[2]
    assert len(page.splitlines()) <= 120


def test_a_method_that_does_not_say_when_to_take_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repeat.py").write_text('"""Repeat: what followed last time.  (arXiv 2601.00001.)"""\n')
    monkeypatch.setattr(site_methods, "DRAFTERS", tmp_path)
    with pytest.raises(ValueError, match=r"repeat\.py must have a paragraph 'Take it where"):
        site_methods.method("repeat")


def test_a_figure_on_a_methods_page_is_the_results_own() -> None:
    """Catches a page that takes another method's row, or another column."""
    [row] = [
        row for row in site_methods.result("methods")["rows"]
        if (row["method"], row["column"]) == ("hydra", "steps")
    ]  # fmt: skip
    cold, hot = row["temperature_0"], row["temperature_1"]
    line = (
        f"| hydra | 160 steps | {cold['tokens_per_step']:.2f} | {cold['speedup']:.2f} | {hot['tokens_per_step']:.2f} |"
    )
    assert line in WHOLE["methods/medusa.md"]
    assert "hydra" not in WHOLE["methods/dspark.md"]


def test_the_page_of_a_hundred_lines_has_all_of_them() -> None:
    """Catches a function of the example that the page forgot; the order is the file's."""
    page = site_pages.rendered(WHOLE["hundred-lines.md"], "hundred-lines.md")
    shown = [
        line
        for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    lines = (ROOT / "examples" / "speculative_decoding.py").read_text().splitlines()
    assert [line for line in shown if line] == [line for line in lines if line]


def test_an_include_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="includes .*:prune, but .* has Transformer"):
        site_pages.included("docs/hundred-lines.md", "../examples/speculative_decoding.py:prune")


def test_a_link_to_a_file_that_is_no_page_names_the_file() -> None:
    shown = site_pages.rendered("[engines](../benchmarks/engines/README.md)", "export.md")
    assert shown == "engines (`benchmarks/engines/README.md`)"
    with pytest.raises(ValueError, match="which is not there"):
        site_pages.rendered("[gone](../gone.md)", "export.md")


def builder() -> str | None:
    """A Python that has mkdocs and its theme: this one, or the one of `make site`."""
    for python in (sys.executable, str(ROOT / "build" / "site-venv" / "bin" / "python")):
        if (
            Path(python).exists()
            and not subprocess.run([python, "-c", "import material"], capture_output=True).returncode
        ):
            return python
    return None


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Catches a broken link, a page outside the path, and a font, script or picture of another server."""
    python = builder()
    if python is None:
        pytest.skip("mkdocs-material is not installed; `make site` installs it beside this environment")
    words = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    built = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html"))
    assert built == sorted(["404.html", *(place.replace(".md", ".html") for place in WHOLE)])
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*?src=["'](?:https?:)?//|<link[^>]*?href=["'](?:https?:)?//|url\(["']?(?:https?:)?//"""
    )
    for path in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        assert not loaded.search(path.read_text()), path
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
    assert not (tmp_path / "inventory.txt").exists()
