"""Plant each known fault in a copy of the package and check that a test catches it.

python scripts/faults.py RECORDING [--all] [--only N] [--json FILE]

RECORDING is a folder written by `scripts/recording.py`.  Each fault (`known_faults.py`) is tried with the tests that
run the lines it changes, cheapest files first, until one fails.  `--all` continues after that and lists every test that
catches the fault, with its seconds.  Exits with 1 if a fault is not caught, with 2 if one can't be planted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import planting
from known_faults import FAULTS, Fault
from recording import Recording

LIMIT_S = 600
"""CPU seconds for the tests of one fault."""
_WORKER: list[Any] = []


def changes(fault: Fault, files: Mapping[Path, str]) -> list[planting.Change]:
    """All edits of a fault as whole texts, with the edits of one file combined.  Raises ValueError if one does not
    apply.

    files: the package's, as returned by `planting.sources`.
    """
    joined: dict[Path, planting.Change] = {}
    for edit in fault.edits:
        change = planting.locate(edit, {**files, **{path: earlier.text for path, earlier in joined.items()}})
        earlier = joined.get(change.path)
        joined[change.path] = change._replace(lines=(*(earlier.lines if earlier else ()), *change.lines))
    return list(joined.values())


def _begin(recording: Path) -> None:
    _WORKER.extend([planting.Bench(planting.ROOT), Recording(recording)])


def _try(fault: Fault, stops: bool) -> planting.Trial:
    bench, recording = _WORKER
    edits = changes(fault, planting.sources(bench.copy))
    tests = {test for change in edits for test in recording.covering(change.path, change.lines)}
    with bench.planted((change.path, change.text) for change in edits):
        return planting.run_tests(bench.copy, sorted(tests), recording.costs, LIMIT_S, stops)


def row(fault: Fault, trial: planting.Trial, recording: Recording) -> dict[str, Any]:
    catching = [{"test": test, "seconds": round(recording.costs.get(test, 0.0), 3)} for test in trial.failed]
    first = catching[0] if catching else {"test": None, "seconds": None}
    return {"fault": fault.name, **first, "could_catch": trial.tests, "tried_s": trial.seconds, "all": catching}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--all", action="store_true", help="list every test that catches a fault, not the first")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="plant these faults alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    chosen = [fault for n, fault in enumerate(FAULTS, 1) if options.only is None or n in options.only]
    files = planting.sources()
    for fault in chosen:
        try:
            changes(fault, files)
        except ValueError as error:
            print(f"{fault.name}: {error}")
            return 2
    recording = Recording(options.recording)
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, initializer=_begin, initargs=(options.recording,)) as pool:
        for fault, trial in zip(chosen, pool.map(_try, chosen, [not options.all] * len(chosen)), strict=True):
            rows.append(row(fault, trial, recording))
            print(f"{len(rows):3} {fault.name}: {rows[-1]['test'] or 'NOT CAUGHT'} ({trial.seconds:.1f} s)", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    missed = [row["fault"] for row in rows if row["test"] is None]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
