"""A training on many GPUs on paper: `benchmarks/sizing.py` counts what is known, and its table is the page's."""

from pathlib import Path

import pytest

from benchmarks import sizing
from benchmarks.sizing import Run, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "many_devices.md"


@pytest.fixture(scope="module")
def run() -> Run:
    return sizing.known("qwen3-8b", "dspark", 512, 768, 8)


def test_the_page_has_the_table_that_the_script_computes(run: Run) -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- sizing -->\n")
    assert rest.partition("\n<!-- /sizing -->")[0] == table(run, [1, 8, 32], "h100")
    assert "## Computed, not measured" in text
