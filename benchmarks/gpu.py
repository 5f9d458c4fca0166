"""Outrider on a GPU: passes, the loop, whole steps, acceptance, exactness, training.  One command of nine minutes.

    python benchmarks/gpu.py [--device cuda] [--small] [--rows machine,passes-0.6b,…] [--seconds 530] [--out FILE]

Every row runs in its own process with a time limit, and its results are written at once, so a row that fails or hangs
costs only itself.  A row has its figures and, if it failed, an `error`.  The models are Qwen3 shapes with random
weights, and the demo.  `--device cpu --small` rehearses everything on tiny shapes.  `floor_ms` of a pass is the time
for the bytes it must read and the products it must compute, at the speeds measured by the row `machine` in the same
run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.replay import provenance, publish

LIMITS = {
    "machine": 30, "acceptance": 60, "loop-8b": 70, "step-8b": 220, "passes-8b": 100, "exact": 120, "passes-0.6b": 60,
    "training-4b": 70, "training-8b": 90,
}  # fmt: skip
"""Time limit of each row in seconds, in the order in which rows run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few points, for a rehearsal")
    parser.add_argument("--rows", default=",".join(LIMITS), help="which, by name")
    parser.add_argument("--seconds", type=float, default=530, help="for all rows together; later ones are left out")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--known", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.row is None:
        sys.exit(run_all(options))
    from benchmarks import gpu_rows

    known = json.loads(options.known.read_text()) if options.known else {}
    found = gpu_rows.run(options.row, options.device, options.small, known, options.out)
    options.out.write_text(json.dumps(found))


def run_all(options: argparse.Namespace) -> int:
    """Runs every row in turn; returns 0 if each has its figures."""
    names, began = options.rows.split(","), time.monotonic()
    if unknown := [name for name in names if name not in LIMITS]:
        raise SystemExit(f"there is no row {unknown[0]!r}; choose among {', '.join(LIMITS)}")
    print(f"{len(names)} rows, at most {options.seconds:.0f} s", file=sys.stderr)
    rows: dict[str, Any] = {}
    for name in names:
        left = options.seconds - (time.monotonic() - began)
        at = time.monotonic()
        rows[name] = run_row(name, options, rows, left) if left > 15 else {"error": "not run: no time was left"}
        rows[name]["seconds"] = round(time.monotonic() - at, 1)
        print(f"{name}: {rows[name].get('error', 'done')} in {rows[name]['seconds']} s", file=sys.stderr, flush=True)
        found = {
            **provenance(time.monotonic() - began), "device": options.device, "small": options.small,
            "promises": promises(rows), "rows": rows,
        }  # fmt: skip
        publish(found, options.out, quiet=options.out is not None)
    return int(any("error" in row for row in rows.values()))


def run_row(name: str, options: argparse.Namespace, rows: dict[str, Any], left: float) -> dict[str, Any]:
    """One row's figures from its own process, or why there are none."""
    with tempfile.TemporaryDirectory() as place:
        out, known = Path(place) / "row.json", Path(place) / "known.json"
        known.write_text(json.dumps(rows))
        command = [
            sys.executable, "-m", "benchmarks.gpu", "--row", name, "--device", options.device, "--out", str(out),
            "--known", str(known), *(["--small"] if options.small else []),
        ]  # fmt: skip
        limit = min(LIMITS[name], left)
        interprets = {"TRITON_INTERPRET": "1"} if name == "acceptance" and options.device == "cpu" else {}
        try:
            done = subprocess.run(
                command, timeout=limit, stdout=sys.stderr, stderr=subprocess.PIPE, text=True,
                env=os.environ | interprets,
            )  # fmt: skip
            why = f"exit code {done.returncode}: {last_words(done.stderr)}" if done.returncode else ""
        except subprocess.TimeoutExpired as stopped:
            why = f"stopped after {limit:.0f} s: {last_words((stopped.stderr or b'').decode(errors='replace'))}"
        if options.out is not None:
            for trace in Path(place).glob("*.trace.json.gz"):
                shutil.copy(trace, options.out.with_name(f"{name}-{trace.name}"))
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        return found | {"error": why} if why or not found else found


def promises(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """How a step on a GPU should perform, as far as it was measured."""
    found: list[dict[str, Any]] = []

    def at_most(what: str, wanted: float, value: float) -> None:
        found.append({"promise": what, "wanted": wanted, "found": value, "holds": value <= wanted})

    for point in rows.get("passes-8b", {}).get("ratios", []):
        if point["context"] == 1024 and "x8" in point:
            at_most(f"8 B, {point['batch']} texts of 1,024 tokens: 8 rows over one", 1.1, point["x8"])
    for point in rows.get("passes-8b", {}).get("points", []):
        if (point["batch"], point["context"], point.get("width"), point.get("way")) == (1, 1024, 1, "kernels"):
            what, share = "8 B, one row of one text: share of the speed of memory", point.get("share", 0.0)
            found.append({"promise": what, "wanted": 0.85, "found": share, "holds": share >= 0.85})
    for width, is_same in rows.get("loop-8b", {}).get("same_bits", {}).items():
        what = f"8 B: a text read {width} tokens a pass has the logits of one pass, to the last bit"
        found.append({"promise": what, "wanted": True, "found": is_same, "holds": is_same})
    for point in rows.get("loop-8b", {}).get("points", []):
        if point.get("captured") and "outside_kernels" in point:
            at_most(f"8 B, one text, {point['way']}: share of a step outside kernels", 0.05, point["outside_kernels"])
    for row, what in (("step-8b", "8 B: texts that a step as one graph writes as steps with Python in between do"),
                      ("acceptance", "slots that accept by our kernels what they do by the plain rule")):  # fmt: skip
        if shares := [point["same"] for point in rows.get(row, {}).get("points", []) if "same" in point]:
            what = f"{what}: least share of {len(shares)} cases"
            found.append({"promise": what, "wanted": 1.0, "found": min(shares), "holds": min(shares) == 1.0})
    return found


def last_words(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-6:])[-1500:]


if __name__ == "__main__":
    main()
