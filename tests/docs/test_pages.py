"""Every Python block in README and docs runs, as a reader would run it."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r'^```python(?: title="(\w+)\.py")?\n(.*?)^```', flags=re.DOTALL | re.MULTILINE)
"""A block's title, where it is a file, and its text."""
FAST = ("README.md", "write-a-drafter.md")
BLOCKS = [
    pytest.param(page, number, id=f"{page.name}-{number}", marks=() if page.name in FAST else pytest.mark.slow)
    for page in PAGES
    for number in range(len(FENCED.findall(page.read_text())))
]


@pytest.mark.parametrize(("page", "number"), BLOCKS)
def test_a_python_block_in_the_docs_runs(page, number, tmp_path, monkeypatch):
    """Catches an example that a change of names or behaviour left behind. Other blocks of a page can import its
    files."""
    found = FENCED.findall(page.read_text())
    title, block = found[number]
    block = block.replace('"smollm2"', '"demo"')  # `make wheel` runs it on the real model
    if "outrider.Grammar" in block:
        pytest.importorskip("llguidance")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, text in found:
        if name:
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.setitem(sys.modules, name, ModuleType(name))  # taken back afterwards
            del sys.modules[name]
    if title:
        importlib.import_module(title)
    else:
        exec(compile(block, "a block in the docs", "exec"), {"__name__": "docs"})


def test_links_between_pages_lead_somewhere() -> None:
    """Catches a page that was renamed or never written."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name} links to {link}"
