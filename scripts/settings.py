"""Write the schema of run files (outrider/runs/schema.json) and the settings page (docs/settings.md) from the Configs.

python scripts/settings.py
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.show import page
from outrider.drafters import own
from outrider.runs import settings
from outrider.runs.schema import make

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"


def main() -> None:
    settings.SCHEMA.write_text(json.dumps(make(own()), indent=1) + "\n", encoding="utf-8")
    settings.schema.cache_clear()
    PAGE.write_text(page(settings.sections(own())), encoding="utf-8")


if __name__ == "__main__":
    main()
