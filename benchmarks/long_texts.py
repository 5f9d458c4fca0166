"""Long prompts on a server of a real model: memory, time to first token, speed after them, and the effect on other
clients.

    python benchmarks/engines/build_llama.py
    python benchmarks/long_texts.py [--rows memory,first,depth,beside,many] [--rounds 2] [--out FILE]

Prompts are sources of Python's library, each after a different first line, so that no two share a prefix.  Greedy.

`memory`: a server of 16 slots: its memory when idle, at its peak and after one prompt of 6,443 tokens, and the size of
the prompt's keys and values.  `first`: seconds to the first token of prompts of 170, 2,000 and 6,400 tokens, for the
server, `generate` and llama-server with bfloat16 weights and flash attention, interleaved.  `depth`: tokens/s of 64
tokens after them.  `beside`: 15 streams while a prompt of 6,443 tokens is read: gaps between their tokens, and the
prompt's speed relative to its speed alone.  `many`: 16 clients with prompts of 4,000 distinct tokens, then with 3,500
in common.  Servers are paused while another is measured.  Prints JSON.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import promise, write  # noqa: E402
from benchmarks.engines.server_process import Server, running  # noqa: E402
from benchmarks.real_server import their_model, with_port  # noqa: E402
from outrider import generate, machine  # noqa: E402
from outrider.targets.cache.capacity import token_bytes  # noqa: E402
from outrider.targets.load import load_target  # noqa: E402

SLOTS, LONG, DEPTHS, BEHIND = 16, 6443, (170, 2000, 6400), 64
WAIT_S = 900
SETTLE_S = 1.0


class Stream(NamedTuple):
    """When a request was sent, and when its pieces arrived."""

    began: float
    pieces: list[float]
    tokens: int

    @property
    def first_s(self) -> float:
        return self.pieces[0] - self.began

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - 1) / (self.pieces[-1] - self.pieces[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    target = load_target("smollm2", compile="auto")
    found: dict[str, Any] = {"slots": SLOTS, "rounds": options.rounds, "promises": []}
    for row in options.rows:
        found[row], promised = ROWS[row](target, options.rounds)
        found["promises"] += promised
        write(found, options.out)
    return 0


# ── parties ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Texts:
    """Prompts of any number of tokens, no two of which share a prefix."""

    def __init__(self, target: Any):
        modules = (argparse, inspect, statistics, threading, tempfile, httpx)
        self.ids: list[int] = target.encode("\n".join(inspect.getsource(each) for each in modules))
        self.target, self.numbers = target, itertools.count(1)

    def of(self, tokens: int, common: str = "") -> str:
        """About this many tokens, after `common`."""
        first = common or f"Read file {next(self.numbers)} of a library.\n"
        own = tokens - len(self.target.encode(first)) - 40 * (not common)
        at = 97 * next(self.numbers)
        return first + str(self.target.tokenizer.decode(self.ids[at : at + own]))


@contextmanager
def ours(*more: object) -> Iterator[Server]:
    words = [sys.executable, "-m", "outrider", "serve", "--target", "smollm2", "--compile", "--slots", SLOTS, *more]
    with running("outrider", partial(with_port, words), {"PYTHONPATH": str(ROOT)}) as server:
        yield server


@contextmanager
def theirs(target: Any, slots: int, length: int) -> Iterator[Server | None]:
    """llama-server; None if it was not built."""
    with tempfile.TemporaryDirectory() as place:
        words = their_model(target, Path(place))
        if words is None:
            yield None
            return
        words = [*words, "-np", slots, "-c", length * slots, "-fa", "on", "-t", os.cpu_count()]
        with running("llama-server", partial(with_port, words)) as server:
            yield server


def ask(server: Server, prompt: str, new: int) -> Stream:
    """One streamed request."""
    url, body = f"http://127.0.0.1:{server.port}/v1/completions", {"prompt": prompt, "max_tokens": new}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"model": "smollm2"} if server.name == "outrider" else {"cache_prompt": False, "ignore_eos": True}
    pieces, tokens = list[float](), 0
    with httpx.Client(timeout=WAIT_S) as client:
        began = time.perf_counter()
        with client.stream("POST", url, json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                if piece.get("usage"):
                    tokens = piece["usage"]["completion_tokens"]
                if any(each.get("text") for each in piece.get("choices", ())):
                    pieces.append(time.perf_counter())
    return Stream(began, pieces, tokens or len(pieces))


def together(server: Server, prompts: Sequence[str], new: int) -> list[Stream]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: ask(server, prompt, new), prompts))


@contextmanager
def peak(server: Server) -> Iterator[list[int]]:
    """The server's peak memory while the block runs, as the single element of a list."""
    most, is_over = [server.resident_bytes()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            most[0] = max(most[0], server.resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

Row = tuple[Any, list[dict[str, Any]]]


def memory(target: Any, rounds: int) -> Row:
    """Memory of one long prompt."""
    texts, column = Texts(target), token_bytes(target)
    with ours() as server:
        ask(server, texts.of(100), 4)
        time.sleep(SETTLE_S)
        idle, found = server.resident_bytes(), []
        for _ in range(rounds):
            with peak(server) as most:
                stream = ask(server, texts.of(LONG), 4)
            time.sleep(SETTLE_S)
            after = server.resident_bytes()
            found.append({"peak_over_idle": most[0] - idle, "after_over_idle": after - idle, "first_s": stream.first_s})
    whole = {"idle_bytes": idle, "keys_and_values_bytes": LONG * column, "prompts": found}
    grown = found[0]["peak_over_idle"] / (LONG * column)
    return whole, [promise("keys and values over what memory grows by, wanted 1 / 1.3", 1 / 1.3, 1 / grown)]


def by_turns(target: Any, rounds: int, new: int) -> dict[str, dict[int, list[Stream]]]:
    """Streams of our server, of `generate` and of llama-server, by prompt length."""
    texts, found = Texts(target), defaultdict[str, dict[int, list[Stream]]](lambda: defaultdict(list))
    with ours("serve.prefix_bytes=0") as server, theirs(target, 1, 8192) as other:
        servers = [each for each in (server, other) if each is not None]
        for each in servers:
            ask(each, texts.of(200), 8)
            each.pause()
        for _ in range(rounds):
            for depth in DEPTHS:
                prompt = texts.of(depth)
                for each in servers:
                    with each.awake():
                        found[each.name][depth].append(ask(each, prompt, new))
                began = time.perf_counter()
                generate(target, [target.encode(prompt)], max_new_tokens=1)
                found["generate"][depth].append(Stream(began, [time.perf_counter()], 1))
    return found


def first(target: Any, rounds: int) -> Row:
    streams = by_turns(target, rounds, 2)
    seconds = {way: {depth: statistics.median(each.first_s for each in own) for depth, own in by_depth.items()}
               for way, by_depth in streams.items()}  # fmt: skip
    lines = []
    for depth in DEPTHS:
        mine = seconds["outrider"][depth]
        lines.append(
            promise(f"first token at {depth}: generate over serve", 1 / 1.05, seconds["generate"][depth] / mine)
        )
        if "llama-server" in seconds:
            wanted = 1 / (0.95 if depth == DEPTHS[0] else 0.75)
            lines.append(
                promise(f"first token at {depth}: llama.cpp over serve", wanted, seconds["llama-server"][depth] / mine)
            )
    return seconds, lines


def depth(target: Any, rounds: int) -> Row:
    streams = by_turns(target, rounds, BEHIND)
    rates = {way: {depth: statistics.median(each.rate for each in own) for depth, own in by_depth.items()}
             for way, by_depth in streams.items() if way != "generate"}  # fmt: skip
    lines = []
    if "llama-server" in rates:
        for behind, wanted in ((2000, 1.4), (6400, 1.8)):
            ratio = rates["outrider"][behind] / rates["llama-server"][behind]
            lines.append(promise(f"decoding behind {behind} tokens over llama.cpp", wanted, ratio))
    return rates, lines


def beside(target: Any, rounds: int) -> Row:
    """A long prompt while 15 streams are running."""
    texts, rows = Texts(target), []
    with ours("serve.prefix_bytes=0", "serve.interval_s=0") as server:
        for _ in range(rounds):
            alone = ask(server, texts.of(LONG), 2).first_s
            with ThreadPoolExecutor(SLOTS) as threads:
                streams = [threads.submit(ask, server, texts.of(60), 1500) for _ in range(SLOTS - 1)]
                time.sleep(6)
                long = threads.submit(ask, server, texts.of(LONG), 2).result()
                found = [each.result() for each in streams]
            gaps = [
                [after - before for before, after in itertools.pairwise(each.pieces)
                 if (long.began <= after <= long.pieces[0]) == is_during]
                for each in found for is_during in (False, True)
            ]  # fmt: skip
            usual, during = list(itertools.chain(*gaps[::2])), sorted(itertools.chain(*gaps[1::2]))
            rows.append({
                "usual_gap_s": statistics.median(usual), "during_p99_s": during[int(0.99 * (len(during) - 1))],
                "during_median_s": statistics.median(during), "first_s": long.first_s, "first_alone_s": alone,
            })  # fmt: skip
    worst = statistics.median(row["during_p99_s"] / row["usual_gap_s"] for row in rows)
    pace = statistics.median(row["first_alone_s"] / row["first_s"] for row in rows)
    return rows, [
        promise("streams beside a prompt: 4 median gaps over the p99 gap", 1.0, 4 / worst),
        promise("the prompt's pace beside 15 streams over its pace alone", 0.7, pace),
    ]


def many(target: Any, rounds: int) -> Row:
    """16 long prompts at once, all distinct, and then with a common prefix."""
    texts, column, found, lines = Texts(target), token_bytes(target), dict[str, Any](), list[dict[str, Any]]()
    own, new = [texts.of(4000) for _ in range(SLOTS)], 200
    common = texts.of(3500)
    shared = [texts.of(4000, common) for _ in range(SLOTS)]
    with ours() as server, theirs(target, SLOTS, 4608) as other:
        ask(server, texts.of(200), 8)
        time.sleep(SETTLE_S)
        idle = server.resident_bytes()
        for name, prompts in (("own", own), ("shared", shared)):
            began = time.perf_counter()
            with peak(server) as most:
                streams = together(server, prompts, new)
            seconds = time.perf_counter() - began
            found[name] = {
                "tokens_per_s": sum(each.tokens for each in streams) / seconds, "peak_over_idle": most[0] - idle,
                "first_s": statistics.median(each.first_s for each in streams),
                "last_first_s": max(each.first_s for each in streams),
            }  # fmt: skip
        if other is not None:
            server.pause()
            began = time.perf_counter()
            streams = together(other, own, new)
            rate = sum(each.tokens for each in streams) / (time.perf_counter() - began)
            found["llama-server"] = {"tokens_per_s": rate}
            lines.append(promise("16 prompts of 4,000 tokens over llama.cpp", 1.5, found["own"]["tokens_per_s"] / rate))
    live = SLOTS * (4000 + new) * column
    found["live_bytes"] = live
    lines.append(promise("live keys and values over peak memory", 1 / 1.3, live / found["own"]["peak_over_idle"]))
    faster = found["own"]["last_first_s"] / found["shared"]["last_first_s"]
    return found, [*lines, promise("first tokens of 16 that share 3,500 tokens over none", 5.0, faster)]


ROWS: dict[str, Callable[[Any, int], Row]] = {
    "memory": memory, "first": first, "depth": depth, "beside": beside, "many": many,
}  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main())
