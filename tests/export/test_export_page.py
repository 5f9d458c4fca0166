"""The page on formats says what the code does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engines.names import rows
from outrider.export import gguf
from outrider.export.formats import find

ROOT = Path(__file__).resolve().parents[2]
FORMATS = (ROOT / "docs" / "export-formats.md").read_text(encoding="utf-8")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("export", "gguf"))


@pytest.fixture(scope="module")
def script() -> Any:
    found = importlib.util.spec_from_file_location("formats_page", ROOT / "scripts" / "formats_page.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_table_on_the_page_is_that_of_the_code(script):
    """Catches a format or a method that came or went without its line: python scripts/formats_page.py writes it."""
    assert script.replaced(FORMATS, script.table(rows())) == FORMATS
    missing = script.table(rows()[1:])
    assert script.replaced(FORMATS, missing) != FORMATS


def test_the_page_names_every_precision():
    """Catches a choice that the page does not know."""
    assert all(f"`{name}`" in PAGE for name in gguf.PRECISIONS) and find("gguf").precisions == tuple(gguf.PRECISIONS)


@pytest.mark.parametrize("name", ["llama_cpp", "assisted"])
def test_what_the_page_says_was_run_is_what_was_found(name):
    """Catches figures on the page that a new run has made untrue."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if row["drafted"]] if name == "llama_cpp" else [found["assisted"]]
    for row in rows:
        assert f"{row['kept']:,} of {row['drafted']:,}" in PAGE
        assert f"{row['tokens_per_step']:.3f}" in PAGE
