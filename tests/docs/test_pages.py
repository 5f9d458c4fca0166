"""Every Python block in README and docs runs, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_in_the_docs_runs(block: str) -> None:
    """Catches an example that a change of names or behaviour left behind."""
    if "outrider.Grammar" in block:
        pytest.importorskip("llguidance")
    exec(compile(block, "a block in the docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Catches a page that was renamed or never written."""
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
