"""The drawings of results are drawn from the results."""

import json
from pathlib import Path

from benchmarks import charts

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_drawings_are_those_of_the_results() -> None:
    """Catches a result that was measured again and is drawn as it was: python benchmarks/tables.py draws it."""
    names = ("methods", "retrieval")
    drawn = charts.charts({name: json.loads((BENCHMARKS / "results" / f"{name}.json").read_text()) for name in names})
    assert {path.stem: path.read_text() for path in (BENCHMARKS / "charts").glob("*.svg")} == drawn
