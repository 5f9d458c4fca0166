"""Put the table of a report into README, between its marks: `python scripts/readme_table.py runs/demo`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from outrider.report.schema import Report
from outrider.report.tables import markdown

README = Path(__file__).resolve().parent.parent / "README.md"


def main(folder: str) -> None:
    text = README.read_text(encoding="utf-8")
    table = f"<!-- table -->\n{markdown(Report.load(folder))}\n<!-- /table -->"
    README.write_text(
        re.sub(r"<!-- table -->.*?<!-- /table -->", lambda _: table, text, flags=re.DOTALL), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
