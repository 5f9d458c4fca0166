"""Write the table of formats into docs/export-formats.md, between its two markers; a test checks that the page is up to
date.

python scripts/formats_page.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "export-formats.md"
BEGIN, END = "<!-- formats -->", "<!-- /formats -->"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown of `outrider formats`: one row per format and method."""
    lines = ["| format | method | export | import | engines | layer numbers |", "|---|---|---|---|---|---|"]
    for row in rows:
        ways = ["yes" if row[way] else "–" for way in ("export", "import")]
        counted = f"ours + {row['shift']}" if row["shift"] else "as ours"
        engines = ", ".join(row["engines"]) or "–"
        lines.append(f"| {row['format']} | {row['kind']} | {' | '.join(ways)} | {engines} | {counted} |")
    return "\n".join(lines)


def replaced(page: str, text: str) -> str:
    """The page with `text` between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main() -> None:
    from outrider.engines.names import rows

    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), table(rows())), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
