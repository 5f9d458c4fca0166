"""The cost of a step besides the models, and the cost of the distribution on a large vocabulary.

    python benchmarks/overhead.py [--batches 1,16] [--new 64] [--out FILE]

Loop: the share of a step not spent in calls into the two models (a module's forward, or the graph that replaces it):
masks, cache, distributions, acceptance, commit, policy and Python, on the demo target, for the plain path, for compiled
steps, and for steps that are one call (which then include acceptance and commit), with each batch's drafters
interleaved.

Distribution: `distribution` (temperature 0.8, top-k 50, top-p 0.95) and the loop's acceptance of a chain with dense q,
compared with one float32 softmax over the logits [B, N+1, V]; greedy acceptance compared with one argmax.  Medians of
rounds in which all are interleaved.  Peak memory is the maximum growth of resident memory, beyond the returned p, in
units of [B, N, V] float32; the few [B, V] tensors of the last draw are part of it, a thirty-second each.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batch_time import Served, parties, prompts_of, serve, serve_in_one_call, write

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.fast import accept_chain, accept_greedy
from outrider.sampling.settings import Sampling

SLOTS, NODES, VOCABULARY = 16, 32, 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--new", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--peak", action="store_true", help="only print the distribution's peak memory in bytes, in a fresh process"
    )
    options = parser.parse_args()
    if options.peak:
        print(peak())
        return
    batches = [int(batch) for batch in options.batches.split(",")]
    loops = [row for compiled in (False, True) for row in loop(batches, options.new, compiled)]
    costs = acceptance()
    promises = [
        {"promise": f"loop overhead of {row['drafter']}, batch {row['batch']}, {row['path']}", "wanted": 0.05,
         "found": row["overhead"], "holds": row["overhead"] <= 0.05}
        for row in loops
    ] + [
        {"promise": "distribution and accept over a softmax", "wanted": 3.0, "found": costs["acceptance_over_softmax"],
         "holds": costs["acceptance_over_softmax"] <= 3},
        {"promise": "greedy acceptance over an argmax", "wanted": 1.2, "found": costs["greedy_over_argmax"],
         "holds": costs["greedy_over_argmax"] <= 1.2},
        {"promise": "copies of [B, N, V] beyond p and q", "wanted": 0.25, "found": costs["copies_beyond_p_and_q"],
         "holds": costs["copies_beyond_p_and_q"] <= 0.25},
    ]  # fmt: skip
    write({"promises": promises, "loop": loops, "acceptance": costs}, options.out)


def loop(batches: list[int], new: int, compiled: bool) -> list[dict[str, Any]]:
    target, drafters = parties(["ngram", "dspark"], compiled=compiled)
    rows = []
    for batch in batches:
        prompts = prompts_of(target, max(batch, 8))
        path = "compiled" if compiled else "plain"
        ways: dict[tuple[str, str], Any] = {
            (path, name): partial(serve, drafter=drafters.get(name))
            for name, drafter in ({"plain": None} | drafters).items()
        }
        if compiled:
            ways |= {
                ("one call", name): partial(serve_in_one_call, drafter=drafters.get(name))
                for name in ("plain", "dspark")
            }
        sums, texts = {way: Served() for way in ways}, {}
        for number in range(4):
            for way, run in ways.items():
                served, texts[way] = run(target, prompts, new, slots=batch)
                if number:  # the first is a warm-up
                    sums[way] += served
        equal = {way: sum(map(operator.eq, text, texts[path, "plain"])) for way, text in texts.items()}
        rows += [
            {
                "path": path,
                "batch": batch,
                "drafter": name,
                **served.says(),
                "texts": len(prompts),
                "equal": equal[path, name],
            }
            for (path, name), served in sums.items()
        ]
        print(f"batch {batch}, {path} path: done", file=sys.stderr, flush=True)
    return rows


# ── the distribution ──────────────────────────────────────────────────────────────────────────────────────────────────


def made() -> tuple[torch.Tensor, Settings, Draft, Streams]:
    """Logits [B, N+1, V] as peaked as a model's, and a chain drawn from a q close to their exact distribution."""
    noise = torch.Generator().manual_seed(0)
    logits = torch.empty(SLOTS, NODES + 1, VOCABULARY).normal_(0, 3, generator=noise)
    settings = Settings.of([Sampling(temperature=0.8, top_k=50, top_p=0.95)] * SLOTS)
    q = distribution(logits[:, :NODES], settings)
    streams = Streams(torch.arange(SLOTS), torch.zeros(SLOTS, dtype=torch.int64))
    tokens = torch.stack([streams.draw(q[:, n], n, Purpose.DRAFT) for n in range(NODES)], 1)
    return logits, settings, Draft.chain(tokens, torch.full((SLOTS,), NODES), q), streams


def acceptance(rounds: int = 7) -> dict[str, Any]:
    logits, settings, draft, streams = made()
    deterministic = Draft.chain(logits[:, :NODES].argmax(-1), draft.sizes)
    ways: dict[str, Callable[[], Any]] = {
        "softmax": lambda: logits.softmax(-1),
        "acceptance": lambda: accept_chain(draft, distribution(logits, settings), streams),
        "distribution": lambda: distribution(logits, settings),
        "argmax": lambda: logits.argmax(-1),
        "greedy": lambda: accept_greedy(deterministic, logits.argmax(-1).tolist(), VOCABULARY),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    command = [sys.executable, __file__, "--peak"]
    extra = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "slots": SLOTS, "nodes": NODES, "vocabulary": VOCABULARY, "rounds": rounds,
        "acceptance_over_softmax": median["acceptance"] / median["softmax"],
        "distribution_over_softmax": median["distribution"] / median["softmax"],
        "greedy_over_argmax": median["greedy"] / median["argmax"],
        "copies_beyond_p_and_q": extra / (4 * SLOTS * NODES * VOCABULARY),
        "milliseconds": {name: 1e3 * taken for name, taken in median.items()},
    }  # fmt: skip


def peak() -> int:
    """Maximum growth of resident memory in bytes, beyond the returned p."""
    logits, settings, draft, streams = made()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _resident("VmRSS")
    accept_chain(draft, distribution(logits, settings), streams)
    return max(0, _resident("VmHWM") - before - logits.nbytes)


def _resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
