"""The page on formats says what the code does."""

import importlib.util
from pathlib import Path

from outrider.engines.names import rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_on_the_page_is_that_of_the_code():
    """Catches a format or a method that came or went without its line: python scripts/formats_page.py writes it."""
    found = importlib.util.spec_from_file_location("formats_page", ROOT / "scripts" / "formats_page.py")
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    page = (ROOT / "docs" / "export-formats.md").read_text(encoding="utf-8")
    assert script.replaced(page, script.table(rows())) == page
    assert script.replaced(page, script.table(rows()[1:])) != page
