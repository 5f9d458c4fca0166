"""`make demo`: plan, prepare, train and evaluate a drafter for a real model, within a given number of minutes.

python scripts/demo.py --minutes 15

The target is SmolLM2-135M-Instruct, from the package index.  If that can't be reached, the demo uses the package's own
small target.  Rerun the same command to resume after an interruption.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from outrider.errors import TargetError
from outrider.targets import catalog

MINUTES = 15.0
SMALL = ("recipes/demo-dflash.yaml", "recipes/demo.yaml")
"""Run files for the small target: the drafter to compare with, and the demo's own."""


def main() -> int:
    began, options = time.monotonic(), argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=MINUTES, help="for all of it but installing packages")
    minutes = options.parse_args().minutes
    try:
        catalog.smollm2()
    except TargetError as error:
        print(f"demo      on the small target, because smollm2 can't be fetched: {error}", flush=True)
        return _outrider("run", SMALL[0]) or _outrider("run", SMALL[1], "name=demo-small")
    file = Path("runs/demo.yaml" if minutes == MINUTES else f"runs/demo-{minutes:g}-minutes.yaml")
    file.parent.mkdir(exist_ok=True)
    if not file.exists():
        left = minutes - (time.monotonic() - began) / 60
        if code := _outrider("init", str(file), "--target", "smollm2", "--minutes", f"{left:.2f}"):
            return code
    code = _outrider("run", str(file))
    print(f"demo      took {(time.monotonic() - began) / 60:.1f} of {minutes:g} minutes; {file} is its run file")
    return code


def _outrider(*arguments: str) -> int:
    return subprocess.call([sys.executable, "-m", "outrider", *arguments])


if __name__ == "__main__":
    sys.exit(main())
