"""A server under load: nothing is lost, no answer differs from plain decoding's, and memory stays flat.

    python benchmarks/serving.py [--clients 64] [--seconds 300] [--seed 0] [--out FILE]

Clients stream, disconnect midway (10 %) or send invalid requests (5 %).  The target runs in float64, so that every
answer, greedy or seeded, must be the one `generate` gave before, or diverge from it at a tie.  Clients run in a
separate process (`serving_clients.py`). dspark is the checkpoint of the last `make demo`.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.batch_time import CHECKPOINT, promise, write
from benchmarks.engines.server_process import Server, running
from benchmarks.serving_turns import Clients, at_most, audited, known, outrider_serve, tell, with_body
from outrider import load_target, machine

DRAFTERS = {"dspark": str(CHECKPOINT), "ngram": "ngram"}
NEW = (4, 16, 48, 96, 128)
"""Maximum answer lengths in tokens; requests cycle through them."""
SIZES, LENGTH = (100, 200, 400, 800, 1400), 768
"""Characters of the prompts, in cycles, and tokens per slot."""
SHARED_BYTES = 2**26
"""Budget for prompt prefixes: full within the warm-up."""


def soak(wanted: argparse.Namespace, clients: Clients) -> dict[str, Any]:
    """Three slots per four clients, so that some wait; prompt prefixes are shared.

    First every slot gets its longest text at the same time, since memory is allocated on first use.
    """
    target = load_target("demo", dtype=wanted.dtype, compile=False)
    pool = known(target, wanted.pool, NEW, SIZES, has_all=True)
    tell(f"{len(pool)} answers of {sum(len(due.tokens) for due in pool):,} tokens are known")
    longest, slots = max(range(len(pool)), key=lambda n: len(str(pool[n].body))), max(1, 3 * wanted.clients // 4)
    start = partial(
        outrider_serve, slots=slots, length=LENGTH, drafter=DRAFTERS[wanted.drafter], dtype=wanted.dtype,
        prefix_bytes=SHARED_BYTES,
    )  # fmt: skip
    readings: list[tuple[float, int]] = []
    with running("outrider", start) as server:
        clients.turn(server, pool, [longest] * slots, slots)
        asked = with_body(pool, model=server.model())
        # also compared; without it, chunks take a shorter path
        asked[::2] = with_body(asked[::2], return_token_ids=True)
        with Readings(server, readings):
            found = clients.ask(
                do="soak", port=server.port, clients=wanted.clients, seconds=wanted.seconds,
                pool=[list(due) for due in asked], seed=wanted.seed, leaving=0.10, malformed=0.05, model=server.model(),
            )  # fmt: skip
        own = found | {"slots_in_use": slots_in_use(server), "server_cpu_s": server.cpu_s()}
        own["alarms"] = {name: value for name, value in server.metrics().items() if "alarms_total" in name}
    own |= {"memory_mib": memory(readings, wanted.seconds), "partings": audited(target, pool, found["partings"])}
    return {"promises": promises(own), "settings": {**vars(wanted), "out": None}} | own


def promises(own: Mapping[str, Any]) -> list[dict[str, Any]]:
    counts, windows = own["counts"], own["memory_mib"]["windows"]
    ties = sum(one["is_tie"] for one in own["partings"])
    mean = statistics.mean(windows) if windows else 0.0
    return [
        at_most("answers with 5xx", 0, counts.get("5xx", 0)),
        at_most("answers without an end", 0, counts.get("failed", 0)),
        at_most("answers that lost, repeated or changed a token, not at a tie", 0, counts.get("differ", 0) - ties),
        at_most("malformed requests that were accepted", 0, counts.get("malformed, accepted", 0)),
        at_most("slots in use at the end", 0, own["slots_in_use"]),
        at_most("resident memory, highest window over the mean", 1.05, max(windows) / mean if mean else 9.9),
        promise("resident memory, lowest window over the mean", 0.95, min(windows) / mean if mean else 0.0),
    ]


class Readings:
    """Reads a server's resident memory once per second, as (seconds since the start, bytes)."""

    def __init__(self, server: Server, readings: list[tuple[float, int]]):
        self.server, self.readings, self.is_over = server, readings, threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()

    def _read(self) -> None:
        began = time.monotonic()
        while not self.is_over.wait(1.0):
            self.readings.append((time.monotonic() - began, self.server.resident_bytes()))


def memory(readings: Sequence[tuple[float, int]], seconds: float, parts: int = 10) -> dict[str, Any]:
    """Mean resident memory in windows after a warm-up of a fifth of the time, at most a minute; MiB."""
    warm = min(60.0, seconds / 5)
    width = (seconds - warm) / parts
    windows = []
    for n in range(parts):
        own = [size for at, size in readings if warm + n * width <= at < warm + (n + 1) * width]
        windows += [statistics.mean(own) / 2**20] if own else []
    first = readings[0][1] / 2**20 if readings else None
    return {"warm_up_s": warm, "window_s": width, "windows": windows, "first": first}


def slots_in_use(server: Server, patience_s: float = 10.0) -> int:
    """Requests in slots or waiting for one, after those of disconnected clients have had time to end."""
    ends = time.monotonic() + patience_s
    while True:
        found = server.metrics()
        in_use = int(found["outrider:num_requests_running"] + found["outrider:num_requests_waiting"])
        if not in_use or time.monotonic() > ends:
            return in_use
        time.sleep(0.2)


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drafter", default="dspark", choices=list(DRAFTERS))
    parser.add_argument("--pool", type=int, default=96, help="requests whose answers are known")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=64, help="at the same time")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--dtype", default="float64", help="of the target")
    return parser.parse_args()


def main() -> int:
    options = settings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything that was started is also stopped
    machine.set_up_process()
    tell(f"about {4 + options.seconds / 60:.0f} minutes")
    with Clients() as clients:
        results = soak(options, clients)
    write(results, options.out)
    return int(not all(promise["holds"] for promise in results["promises"]))


if __name__ == "__main__":
    raise SystemExit(main())
