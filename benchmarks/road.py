"""What the road promises, against what the small target's demo measured last: `python benchmarks/road.py > road.json`.

That is `outrider run recipes/demo-dflash.yaml`, then `outrider run recipes/demo.yaml name=demo-small`.

Reads runs/demo-small/report.json (one interleaved run), times `outrider --help`, and says of every promise what was
wanted, what was found, and whether it holds.  --readme also puts the report's table into README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outrider import Report
from outrider.report.tables import markdown

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=ROOT / "runs" / "demo-small")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    report = Report.load(options.report)
    found = {"report": str(options.report), "provenance": report.provenance, "promises": promises(report)}
    if options.readme:
        path = ROOT / "README.md"
        table = f"<!-- table -->\n{markdown(report)}\n<!-- /table -->"
        path.write_text(re.sub(r"<!-- table -->.*?<!-- /table -->", lambda _: table, path.read_text(), flags=re.DOTALL))
    print(json.dumps(found, indent=2, default=str))
    sys.exit(not all(promise["holds"] for promise in found["promises"]))


def promises(report: Report) -> list[dict[str, Any]]:
    """[{promise, wanted, found, holds}]."""
    greedy = {row.drafter: row for row in report.rows if row.temperature == 0}
    dspark = greedy["dspark"]
    plain_over_generate = [row.plain_tokens_per_s / row.generate_tokens_per_s for row in greedy.values()]
    listed = []

    def add(promise: str, wanted: str, value: Any, holds: bool) -> None:
        listed.append({"promise": promise, "wanted": wanted, "found": value, "holds": bool(holds)})

    add("rows at temperature 0", "ngram, small_model, dflash, dspark", sorted(greedy), len(greedy) == 4)
    add(
        "one row at temperature 1",
        "1",
        sum(row.temperature == 1 for row in report.rows),
        any(r.temperature == 1 for r in report.rows),
    )
    for row in greedy.values():
        add(f"{row.drafter} exact on every prompt", "true", row.exact, row.exact is True)
        add(f"{row.drafter} prompts", ">= 24", row.prompts, row.prompts >= 24)
        add(f"{row.drafter} compared tokens", ">= 2000", row.compared_tokens, (row.compared_tokens or 0) >= 2000)
    add("dspark tokens per step", ">= 2.2", dspark.tokens_per_step, dspark.tokens_per_step >= 2.2)
    add("dspark speed-up over plain", ">= 1.5", dspark.speedup, dspark.speedup >= 1.5)
    add("dspark loop overhead", "<= 0.10", dspark.loop_overhead, dspark.loop_overhead <= 0.10)
    add("plain over transformers' generate", ">= 1", plain_over_generate, min(plain_over_generate) >= 1)
    add("plain equal to generate", "true", [getattr(r, "plain_exact", None) for r in greedy.values()],
        all(getattr(r, "plain_exact", None) for r in greedy.values()))  # fmt: skip
    add("share of prompts left out", "<= 0.5", report.share_left_out, report.share_left_out <= 0.5)
    seconds = help_seconds()
    add("outrider --help, median seconds", "< 0.5", seconds, seconds < 0.5)
    return listed


def help_seconds(times: int = 7) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run([str(Path(sys.executable).parent / "outrider"), "--help"], check=True, capture_output=True)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
