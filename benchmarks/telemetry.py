"""What the server's counters cost: a step of 16 slots, a scrape of /metrics, a look at /stats.

    python benchmarks/telemetry.py [--slots 16] [--steps 20000] [--out FILE]

Steps as the engine reports them, with drafts of 5 of which 2 are accepted.  Medians over rounds of 1,000 steps.  The
promise is 20 us a step at 16 slots; a step that is slower makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outrider.decoding.state import Request
from outrider.sampling.settings import Sampling
from outrider.serve.calls import Call
from outrider.serve.records.metrics import StepRecord, Telemetry

PROMISED_US = 20.0
ROUND = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    telemetry = Telemetry("demo", options.slots, length=1024)
    calls = [Call(Request([1] * 20, 100, Sampling()), lambda output: None) for _ in range(options.slots)]
    for call in calls:
        call.arrived = time.monotonic()
        telemetry.arrived(call)
        telemetry.admitted(call)
    three, two, five = ([n] * options.slots for n in (3, 2, 5))
    record = StepRecord(calls, three, two, five, five, 0.01, 0.002, 0.007, 0.001, 0)
    found = {
        "slots": options.slots, "machine": platform.processor() or platform.machine(),
        "step_us": seconds_of(lambda: telemetry.stepped(record), options.steps // ROUND, ROUND) * 1e6,
        "metrics_ms": seconds_of(telemetry.text, 20, 5) * 1e3, "stats_ms": seconds_of(telemetry.snapshot, 20, 5) * 1e3,
    }  # fmt: skip
    print(json.dumps(found, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(found["step_us"] > PROMISED_US * options.slots / 16)


def seconds_of(run: Callable[[], object], rounds: int, times: int) -> float:
    """Median seconds of a run, over rounds."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(times):
            run()
        taken.append((time.perf_counter() - began) / times)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
