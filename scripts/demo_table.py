"""Put the demo's table into benchmarks/pages/real-model.md: `python scripts/demo_table.py runs/demo`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from outrider.report.schema import Report
from outrider.report.tables import markdown

PAGE = Path(__file__).resolve().parent.parent / "benchmarks" / "pages" / "real-model.md"


def main(folder: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = f"<!-- table -->\n{markdown(Report.load(folder))}\n<!-- /table -->"
    PAGE.write_text(
        re.sub(r"<!-- table -->.*?<!-- /table -->", lambda _: table, text, flags=re.DOTALL), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
