"""The server: nothing lost under load, the scheduler compared with the best of plain and fixed depths, latency, other
servers.

    python benchmarks/serving.py all --out benchmarks/results/serving.json
    python benchmarks/serving.py soak scheduler … [--again] [settings] [--out FILE]

soak       clients that stream, disconnect midway (10 %) or send invalid requests (5 %); the target in float64, so that
           every answer, greedy or seeded, must be the one `generate` gave before, or diverge from it at a tie
scheduler  tokens/s at every concurrency: plain, every fixed depth, always-on, and the policies; times to the first
           token and between pieces; the policies' own share of a step
overhead   one client: seconds per token relative to `generate` in this process
peers      the same clients against `transformers serve`, vLLM and llama.cpp's server
fuzz       schemathesis, driven by the server's own OpenAPI document
chaos      drafters that raise, return garbage or hang

Servers stay up, and all but the one being measured are paused.  Clients run in a separate process
(`serving_clients.py`).  Ways take turns, in a different order each time; the first turn is a warm-up.  Ratios are of
tokens over seconds of all turns, with the 95 % interval of a bootstrap over turns.  The best of the others is chosen on
the odd turns for the even ones, and vice versa, since the maximum of several noisy numbers is biased upwards.
Identical processes differ by up to 8 %, so the scheduler's ways are compared with plain requests to the same server
(`speculative: false`); `waiting` is the speed of these relative to a server without a drafter.

Parts that are in FILE with the same settings are not measured again; a stopped part resumes.  Whatever is unavailable
is in `left_out`, with the reason. dspark is the checkpoint of the last `make demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.batch_time import CHECKPOINT, parties, promise, serve
from benchmarks.engines.server_process import Server, running
from benchmarks.replay import provenance, publish
from benchmarks.serving_clients import Due
from benchmarks.serving_faults import chaos, fuzz
from benchmarks.serving_peers import peers
from benchmarks.serving_turns import (
    Clients,
    Turn,
    asleep,
    at_most,
    audited,
    best_over_plain,
    by_turns,
    figures,
    first_s,
    goodput,
    known,
    numbers_of,
    outrider_serve,
    per_token_s,
    rate,
    ratio,
    ratio_over,
    started,
    tell,
    warmed,
    with_body,
)
from outrider import demo, generate, load_target, machine
from outrider.costs import passes
from outrider.decoding.accept import Accepted
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.state import DecodeState, Timing
from outrider.policies import named
from outrider.policies.auto import Auto

DRAFTERS = {"dspark": str(CHECKPOINT), "ngram": "ngram"}
POLICIES = ("auto", "auto with a table")
SOAK_NEW, NEW = (4, 16, 48, 96, 128), (32, 64, 96)
"""Maximum answer lengths in tokens; requests cycle through them."""
SIZES, SOAK_LENGTH = (100, 200, 400, 800, 1400), 768
"""Characters of the soak's prompts, in cycles, and tokens per slot."""
SHARED_BYTES = 2**26
"""Budget for prompt prefixes in the soak: full within its warm-up."""
TOKENS_PER_S = {1: 450, 2: 600, 4: 800, 8: 1000}
"""Approximate throughput of this server on two cores, for the time estimate; MOST with more clients."""
MOST = 1150

Save = Callable[[], None]


# ── soak ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def soak(wanted: argparse.Namespace, own: dict[str, Any], clients: Clients, save: Save) -> None:
    """Three slots for four clients, so that some wait; prompt prefixes are shared.

    First every slot gets its longest text at the same time, since memory is allocated on first use.
    """
    target = load_target("demo", dtype=wanted.dtype, compile=False)
    pool = known(target, wanted.pool, SOAK_NEW, SIZES, has_all=True)
    tell(f"soak: {len(pool)} answers of {sum(len(due.tokens) for due in pool):,} tokens are known")
    longest, slots = max(range(len(pool)), key=lambda n: len(str(pool[n].body))), max(1, 3 * wanted.clients // 4)
    start = partial(
        outrider_serve, slots=slots, length=SOAK_LENGTH, drafter=DRAFTERS[wanted.drafter], dtype=wanted.dtype,
        prefix_bytes=SHARED_BYTES,
    )  # fmt: skip
    readings: list[tuple[float, int]] = []
    with running("outrider", start) as server:
        clients.turn(server, pool, [longest] * slots, slots)
        asked = with_body(pool, model=server.model())
        asked[::2] = with_body(asked[::2], return_token_ids=True)  # compared too; without, pieces take a shorter path
        with Readings(server, readings):
            found = clients.ask(
                do="soak", port=server.port, clients=wanted.clients, seconds=wanted.seconds,
                pool=[list(due) for due in asked], seed=wanted.seed, leaving=0.10, malformed=0.05, model=server.model(),
            )  # fmt: skip
        own |= found | {"slots_in_use": slots_in_use(server), "server_cpu_s": server.cpu_s()}
        own["alarms"] = {name: value for name, value in server.metrics().items() if "alarms_total" in name}
    own |= {"memory_mib": memory(readings, wanted.seconds), "partings": audited(target, pool, found["partings"])}
    own["promises"] = soak_promises(own)


def soak_promises(own: Mapping[str, Any]) -> list[dict[str, Any]]:
    counts, windows = own["counts"], own["memory_mib"]["windows"]
    ties = sum(one["is_tie"] for one in own["partings"])
    mean = statistics.mean(windows) if windows else 0.0
    return [
        at_most("soak: answers with 5xx", 0, counts.get("5xx", 0)),
        at_most("soak: answers without an end", 0, counts.get("failed", 0)),
        at_most(
            "soak: answers that lost, repeated or changed a token, not at a tie", 0, counts.get("differ", 0) - ties
        ),
        at_most("soak: malformed requests that were accepted", 0, counts.get("malformed, accepted", 0)),
        at_most("soak: slots in use at the end", 0, own["slots_in_use"]),
        at_most("soak: resident memory, highest window over the mean", 1.05, max(windows) / mean if mean else 9.9),
        promise("soak: resident memory, lowest window over the mean", 0.95, min(windows) / mean if mean else 0.0),
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
    """Requests in slots or waiting for one, after those of disconnected clients had time to end."""
    ends = time.monotonic() + patience_s
    while True:
        found = server.metrics()
        in_use = int(found["outrider:num_requests_running"] + found["outrider:num_requests_waiting"])
        if not in_use or time.monotonic() > ends:
            return in_use
        time.sleep(0.2)


# ── scheduler ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def scheduler(wanted: argparse.Namespace, own: dict[str, Any], clients: Clients, save: Save) -> None:
    target, drafters = parties([wanted.drafter])
    pool = known(target, wanted.pool, NEW)
    if "policies" not in own:
        own["policies"] = share_of_policies(target, drafters[wanted.drafter], wanted.slots)
        save()
    settings = {"slots": wanted.slots, "length": wanted.length}
    drafting = settings | {"drafter": DRAFTERS[wanted.drafter]}
    starts = {"plain": partial(started, settings)}
    starts |= {policy: partial(started, drafting | {"policy": policy}) for policy in ("fixed", *POLICIES)}
    rows = own.setdefault("rows", [])
    with asleep(starts, own["left_out"], lambda server: warmed(clients, server, pool)) as servers:
        ways = ways_of(wanted, servers)
        for concurrency in wanted.concurrency:
            if any(row["concurrency"] == concurrency for row in rows):
                continue
            count = max(wanted.requests, 2 * concurrency)
            turns = turns_at(concurrency, wanted.turns)

            def ask(way: str, number: int, count: int = count, concurrency: int = concurrency) -> Turn:
                kind, more = ways[way]
                with servers[kind].awake() as server:
                    return clients.turn(
                        server, with_body(pool, **more), numbers_of(number, count, len(pool)), concurrency
                    )

            found = by_turns(list(ways), turns, ask, own["left_out"])
            rows.append({"concurrency": concurrency, "requests_a_turn": count, "turns": turns} | told(found, own))
            own["promises"] = [one for row in rows for one in row_promises(row)] + policy_promises(own["policies"])
            save()
            speeds = (f"{name} {way['tokens_per_s']:.0f}" for name, way in rows[-1]["ways"].items())
            tell(f"scheduler: {concurrency} at a time, tokens/s: {', '.join(speeds)}")


def ways_of(wanted: argparse.Namespace, servers: Mapping[str, Server]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Ways by name: the server, and what is added to request bodies."""
    ways: dict[str, tuple[str, dict[str, Any]]] = {"plain": ("plain", {})}
    for kind in [name for name in servers if name != "plain"]:
        ways[f"{kind}: plain"] = kind, {"speculative": False}
        if kind != "fixed":
            ways[kind] = kind, {}
            continue
        ways |= {f"depth {depth}": (kind, {"speculative": {"depth": depth}}) for depth in wanted.depths}
        ways["always on"] = kind, {}
    return ways


def turns_at(concurrency: int, turns: int) -> int:
    """Fewer turns if each has more requests than 16 clients send."""
    return max(min(6, turns), min(turns, 16 * turns // concurrency))


def plain_beside(way: str) -> str:
    """The plain requests to the server of this way."""
    return f"{way if way in POLICIES else 'fixed'}: plain"


def told(turns: Mapping[str, Sequence[Turn]], own: dict[str, Any]) -> dict[str, Any]:
    """All ways at one concurrency.  The goodput of all is judged by the plain requests of the first row."""
    plain = turns["plain"]
    alone = {"first_s": statistics.median(first_s(plain)), "per_token_s": statistics.median(per_token_s(plain))}
    slo = {name: 2 * value for name, value in own.setdefault("unloaded", alone).items()}
    drafted = {way: found for way, found in turns.items() if way != "plain" and not way.endswith(": plain")}
    beside = {way: turns[plain_beside(way)] for way in drafted}
    fixed = [way for way in drafted if way not in POLICIES]
    best, names = best_over_plain({way: turns[way] for way in fixed}, turns["fixed: plain"])
    return {
        "ways": {
            way: figures(found) | {"goodput": goodput(found, slo["first_s"], slo["per_token_s"])}
            for way, found in turns.items()
        },
        "best": names,
        "over_plain": {way: ratio(found, beside[way]) for way, found in drafted.items()},
        "over_best": {way: ratio_over(found, beside[way], best) for way, found in drafted.items()},
        "first_p99": {way: first_p99(found, beside[way]) for way, found in drafted.items()},
        "waiting": {name: ratio(turns[f"{name}: plain"], plain) for name in POLICIES if name in turns},
    }


def first_p99(one: Sequence[Turn], plain: Sequence[Turn], draws: int = 1000) -> dict[str, Any]:
    """The p99 of the time to the first token, relative to plain requests; 95 % interval of a bootstrap over turns."""

    def of(taken: Sequence[int]) -> float:
        mine, theirs = (np.quantile(first_s([turns[n] for n in taken]), 0.99) for turns in (one, plain))
        return float(mine / theirs)

    noise = np.random.default_rng(0)
    drawn = [of(noise.integers(0, len(one), len(one)).tolist()) for _ in range(draws)]
    return {"ratio": of(range(len(one))), "interval": [float(end) for end in np.quantile(drawn, [0.025, 0.975])]}


def row_promises(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for policy in POLICIES:
        if policy in row["over_best"]:
            at = f"{row['concurrency']} at a time: {policy}"
            low, best = row["over_best"][policy]["interval"][0], " or ".join(row["best"])
            found += [
                promise(f"{at} over the best of plain and fixed ({best}), lower end", 0.98, low),
                at_most(f"{at}, p99 of the first token over plain", 1.05, row["first_p99"][policy]["ratio"]),
            ]
    return found


class Timed(Policy):
    """Wraps a policy; `seconds` is the time spent in it."""

    def __init__(self, inner: Policy):
        self.inner, self.seconds = inner, 0.0

    def budget(self, state: DecodeState) -> torch.Tensor:
        return self._timed(self.inner.budget, state)

    def keep(self, state: DecodeState, sizes: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
        return self._timed(self.inner.keep, state, sizes, confidence)

    def observe(self, state: DecodeState, sizes: torch.Tensor, accepted: Accepted, timing: Timing) -> None:
        self._timed(self.inner.observe, state, sizes, accepted, timing)

    def _timed(self, act: Callable[..., Any], *given: Any) -> Any:
        began = time.perf_counter()
        try:
            return act(*given)
        finally:
            self.seconds += time.perf_counter() - began


def share_of_policies(target: Any, drafter: Drafter, slots: int) -> list[dict[str, Any]]:
    """The policies' share of a step, from the same step in this process."""
    makes: dict[str, Callable[[], Policy]] = {
        "auto": lambda: named.policy("auto", drafter),
        "auto with a table": lambda: Auto(drafter.limit, passes.measured(target, drafter, slots)),
    }
    found = []
    for name in POLICIES:
        policy = Timed(makes[name]())
        for batch in sorted({1, min(16, slots), slots}):
            prompts = [target.encode(text) for _, text in demo.prompts("held_out", max(8, batch))]
            serve(target, prompts, 16, drafter, policy, slots=batch)  # lets it learn
            policy.seconds = 0.0
            served, _ = serve(target, prompts, 64, drafter, policy, slots=batch)
            step = {"us_a_step": 1e6 * policy.seconds / served.steps, "step_ms": 1e3 * served.seconds / served.steps}
            found.append({"policy": name, "batch": batch, "share": policy.seconds / served.seconds, **step})
    return found


def policy_promises(shares: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [at_most(f"{one['policy']}: share of a step of {one['batch']}", 0.01, one["share"]) for one in shares]


# ── overhead ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def overhead(wanted: argparse.Namespace, own: dict[str, Any], clients: Clients, save: Save) -> None:
    """Seconds per token of one streaming client, relative to `generate` on the same prompts here, interleaved."""
    target, drafters = parties([wanted.drafter])
    drafter = drafters[wanted.drafter]
    pool = known(target, wanted.pool, NEW)
    here: dict[str, dict[str, Any]] = {
        "plain": {}, wanted.drafter: {"drafter": drafter, "policy": named.policy("auto", drafter)}
    }  # fmt: skip
    settings = {"slots": 16, "length": wanted.length}
    starts = {
        "plain": partial(started, settings),
        wanted.drafter: partial(started, settings | {"drafter": DRAFTERS[wanted.drafter], "policy": "auto"}),
    }
    rows = own["rows"] = []
    with asleep(starts, own["left_out"], lambda server: warmed(clients, server, pool)) as servers:

        def ask(way: str, number: int) -> Turn:
            side, _, name = way.partition(": ")
            numbers = numbers_of(number, wanted.requests, len(pool))
            if side == "generate":
                return generated(target, pool, numbers, here[name])
            with servers[name].awake() as server:
                done = clients.turn(server, pool, numbers, 1)
                return done._replace(seconds=sum(row["whole_s"] for row in done.rows))

        ways = [f"{side}: {name}" for name in servers for side in ("generate", "server")]
        turns = by_turns(ways, wanted.turns, ask, own["left_out"])
        for name in servers:
            inside, outside = turns[f"generate: {name}"], turns[f"server: {name}"]
            each = {"generate_ms": 1e3 / rate(inside), "server_ms": 1e3 / rate(outside)}
            # seconds per token are the inverse of tokens/s
            rows.append({"way": name, **each, **ratio(inside, outside), **figures(outside)})
    own["promises"] = [at_most(f"{row['way']}: time a token over `generate`", 1.05, row["ratio"]) for row in rows]


def generated(target: Any, pool: Sequence[Due], numbers: Sequence[int], settings: Mapping[str, Any]) -> Turn:
    """The same requests with `generate`, one at a time."""
    tokens, seconds = 0, 0.0
    for number in numbers:
        body = pool[number].body
        began = time.perf_counter()
        (answer,) = generate(target, [body["prompt"]], max_new_tokens=body["max_tokens"], **settings)
        seconds += time.perf_counter() - began
        tokens += len(answer.tokens)
    return Turn(tokens, seconds, 0.0, [], list(numbers))


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Part(NamedTuple):
    measure: Callable[[argparse.Namespace, dict[str, Any], Clients, Save], None]
    minutes: Callable[[argparse.Namespace], float]
    """Approximate duration on two cores."""
    settings: tuple[str, ...]
    """Options that affect its result."""


def scheduler_minutes(wanted: argparse.Namespace) -> float:
    ways, tokens = len(wanted.depths) + 7, statistics.mean(NEW)
    seconds = sum(
        (turns_at(count, wanted.turns) + 1)
        * (max(wanted.requests, 2 * count) * tokens / TOKENS_PER_S.get(count, MOST) + 0.5)
        for count in wanted.concurrency
    )
    return 3 + ways * seconds / 60


def peers_minutes(wanted: argparse.Namespace) -> float:
    tokens = sum(max(8, 2 * count) for count in wanted.peer_concurrency) * statistics.mean(NEW)
    a_token = 12 / 600 + 1 / 80  # twelve servers that batch, and one that does not
    return 10 + (wanted.peer_turns + 1) * tokens * a_token / 60


SERVERS = ("slots", "length", "drafter", "pool")
PARTS: dict[str, Part] = {
    "soak": Part(
        soak, lambda wanted: 4 + wanted.seconds / 60, ("drafter", "pool", "seed", "clients", "seconds", "dtype")
    ),
    "scheduler": Part(scheduler, scheduler_minutes, (*SERVERS, "concurrency", "depths", "turns", "requests")),
    "overhead": Part(
        overhead, lambda wanted: 3 + (wanted.turns + 1) * wanted.requests * 4 * 64 / 450 / 60,
        (*SERVERS[1:], "turns", "requests"),
    ),
    "peers": Part(peers, peers_minutes, (*SERVERS, "peer_concurrency", "peer_turns", "only")),
    "fuzz": Part(fuzz, lambda wanted: 1 + wanted.cases / 600, ("cases", "seed", "drafter")),
    "chaos": Part(chaos, lambda wanted: 5, ("dtype",)),
}  # fmt: skip


def settings(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda said: [int(one) for one in said.split(",")]
    parser.add_argument("parts", nargs="+", choices=["all", *PARTS], metavar="part", help=f"all, {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="file of the results, with which a later run goes on")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--slots", type=int, default=64, help="scheduler, peers: of every server")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a slot of our servers")
    parser.add_argument("--drafter", default="dspark", choices=list(DRAFTERS))
    parser.add_argument("--pool", type=int, default=96, help="requests whose answers are known")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=64, help="soak: clients at the same time")
    parser.add_argument("--seconds", type=float, default=300, help="soak: how long")
    parser.add_argument("--dtype", default="float64", help="soak, chaos: of the target")
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32, 64], help="scheduler: 1 first")
    parser.add_argument("--depths", type=numbers, default=[1, 2, 4], help="scheduler: fixed, besides the whole draft")
    parser.add_argument("--turns", type=int, default=12, help="scheduler, overhead: of every way, after the warm-up")
    parser.add_argument(
        "--requests", type=int, default=12, help="scheduler, overhead: of a turn; two a client at least"
    )
    parser.add_argument("--peer-concurrency", type=numbers, default=[1, 4, 16, 64], help="peers")
    parser.add_argument("--peer-turns", type=int, default=3, help="peers: of every way, after the warm-up")
    parser.add_argument("--only", default="", help="peers: of the others, those that begin so")
    parser.add_argument("--cases", type=int, default=5000, help="fuzz")
    return parser.parse_args(given)


class Results:
    """The results file: parts by name, each with its settings, its promises, and whether it is complete."""

    def __init__(self, wanted: argparse.Namespace, names: Sequence[str]):
        self.out, self.began = wanted.out, time.monotonic()
        self.parts: dict[str, Any] = {}
        if self.out is not None and self.out.exists():
            self.parts = json.loads(self.out.read_text())["parts"]
        for name in names:
            own = {setting: getattr(wanted, setting) for setting in PARTS[name].settings}
            if wanted.again or self.parts.get(name, {}).get("settings") != own:
                self.parts[name] = {"settings": own, "is_done": False, "promises": [], "left_out": []}

    def save(self) -> None:
        facts = provenance(time.monotonic() - self.began)
        promises = [one for name in PARTS for one in self.parts.get(name, {}).get("promises", ())]
        publish({"provenance": facts, "promises": promises, "parts": self.parts}, self.out, quiet=True)


def main() -> int:
    wanted = settings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything started is stopped too
    machine.set_up_process()
    return run(wanted)


def run(wanted: argparse.Namespace) -> int:
    """Measure the requested parts that are missing; 1 if a promise does not hold."""
    names = [name for name in PARTS if name in wanted.parts or "all" in wanted.parts]
    results = Results(wanted, names)
    due = [name for name in names if not results.parts[name]["is_done"]]
    for name in names:
        minutes = f"about {PARTS[name].minutes(wanted):.0f} minutes" if name in due else "is there, with these settings"
        tell(f"{name}: {minutes}")
    for name in due:
        own, began = results.parts[name], time.monotonic()
        own |= {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "load_before": os.getloadavg()[0]}
        with Clients() as clients:
            PARTS[name].measure(wanted, own, clients, results.save)
        own |= {"is_done": True, "minutes": round((time.monotonic() - began) / 60, 1)}
        results.save()
        for one in own["promises"]:
            holds = "holds" if one["holds"] else "DOES NOT HOLD"
            tell(f"{name}: {one['promise']}: {one['found']:.4g}, wanted {one['wanted']:g}: {holds}")
    if wanted.out is None:
        print(json.dumps({name: results.parts[name] for name in names}, indent=1))
    return int(not all(one["holds"] for name in names for one in results.parts[name]["promises"]))


if __name__ == "__main__":
    raise SystemExit(main())
