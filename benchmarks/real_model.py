"""A real model with default settings: tokens/s compared with llama.cpp, and whether every text is the same.

    python benchmarks/engines/build_llama.py
    python benchmarks/real_model.py KIND=FILE.jsonl ... [--target smollm2] [--prompts 16] [--new 96] [--rounds 2]
                                    [--out FILE]

KIND=FILE: a kind of prompts, such as code=humaneval.jsonl, whose rows have `turns`; the first turn is sent, through the
chat template.  Greedy, one request at a time, whole requests including the prompt; all configurations are interleaved
per prompt.

Ours: `plain`, `ngram` and `suffix`, loaded as `outrider decode` and `evaluate` do. llama.cpp's server with 16-bit
weights, with threads and flash attention tuned on the first prompt of every kind; with --gguf FILE, that file as well.
`transformers` is its own `generate`.  Texts are compared with `generate` of transformers: a text that diverges from it
is a tie or a fault (`same_text.py`).  Prints JSON; exits with 1 if a promise is missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batch_time import promise, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import answering  # noqa: E402
from benchmarks.answering import Answers  # noqa: E402
from benchmarks.engines.build_llama import COMMIT, VERSION, server  # noqa: E402
from benchmarks.same_text import Verdicts, read  # noqa: E402
from outrider import load_drafter, machine  # noqa: E402
from outrider.formats.gguf import layouts  # noqa: E402
from outrider.targets.load import load_target  # noqa: E402
from outrider.weights import weights_of  # noqa: E402

TUNED = tuple(itertools.product((1, 2), ("on", "off")))
"""Threads as a share of all, and whether to use flash attention."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", metavar="KIND=FILE")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=int, default=16, help="of each kind")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="a file of the same model for llama.cpp, as people have it")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    target = load_target(options.target, compile="auto")
    prompts = {kind: read(target, path, options.prompts) for kind, path in (each.split("=") for each in options.kinds)}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as place:
        ways = dict(ours(target))
        if not options.no_transformers:
            ways["transformers"] = partial(answering.transformers, target)
        tuned = dict(llama_ways(stack, target, Path(place), options.gguf, prompts))
        ways |= {name: answer for name, (answer, _) in tuned.items()}
        rows = measured(ways, prompts, options.new, options.rounds)
    texts = compared(target, rows, prompts, options.new)
    table = [line(name, kind, rows) for name in ways for kind in [*prompts, None]]
    write(
        {
            "promises": promises(table, texts), "compiled": target.step.graph is not None,
            "llama_cpp": {"package": f"llama-cpp-python {VERSION}", "commit": COMMIT,
                          "tuned": {name: settings for name, (_, settings) in tuned.items()}},
            "table": table, "texts": texts, "prompts": options.prompts, "new": options.new, "rounds": options.rounds,
        },
        options.out,
    )  # fmt: skip
    return 0


# ── ways ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ours(target: Any) -> Iterator[tuple[str, Answers]]:
    for name in ("plain", "ngram", "suffix"):
        yield name, partial(answering.outrider, target, None if name == "plain" else load_drafter(name, target), False)


def llama_ways(
    stack: ExitStack, target: Any, place: Path, file: Path | None, prompts: dict[str, list[list[int]]]
) -> Iterator[tuple[str, tuple[Answers, dict[str, Any]]]]:
    binary = Path(os.environ.get("LLAMA_SERVER", server()))
    if not binary.exists():
        print(f"left out: llama.cpp: no {binary}; run benchmarks/engines/build_llama.py", file=sys.stderr)
        return
    sixteen, lm = place / "sixteen.gguf", target.model
    layouts.write_file(sixteen, layouts.header(lm, target.tokenizer, "f16"), weights_of(lm), lm, "f16")
    samples = [own[0] for own in prompts.values()]
    for name, model in {"llama.cpp, 16 bits": sixteen, "llama.cpp, the file": file}.items():
        if model is not None:
            settings = tuned(target, binary, model, samples)
            yield name, (stack.enter_context(llama(target, binary, model, **settings)), settings)


def tuned(target: Any, binary: Path, model: Path, samples: list[list[int]]) -> dict[str, Any]:
    """The fastest settings of a server, from three requests each, of which the last two are used."""
    seconds: dict[tuple[int, str], float] = {}
    for share, flash in TUNED:
        threads = max(1, torch.get_num_threads() // share)
        with llama(target, binary, model, threads, flash) as answer:
            times = [clock(answer, prompt, 48)[0] for _ in range(3) for prompt in samples]
        seconds[threads, flash] = sum(times[len(samples) :])
    threads, flash = min(seconds, key=seconds.__getitem__)
    return {"threads": threads, "flash": flash}


def llama(target: Any, binary: Path, model: Path, threads: int, flash: str) -> AbstractContextManager[Answers]:
    return answering.llama(target, binary, model, 1, ["-fa", flash, "-t", threads, "-tb", threads])


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def clock(answer: Answers, prompt: list[int], new: int) -> tuple[float, list[int]]:
    began = time.perf_counter()
    [tokens] = answer([prompt], new, 1)
    return time.perf_counter() - began, tokens


def measured(
    ways: dict[str, Answers], prompts: dict[str, list[list[int]]], new: int, rounds: int
) -> list[dict[str, Any]]:
    """One row per request: way, kind, prompt, seconds, tokens; all ways interleaved per prompt, in rotating order."""
    for answer in ways.values():  # warm up
        for own in prompts.values():
            answer([own[0]], 16, 1)
    rows, order = [], list(ways)
    for _ in range(rounds):
        for kind, own in prompts.items():
            for number, prompt in enumerate(own):
                order = [*order[1:], order[0]]
                for name in order:
                    seconds, tokens = clock(ways[name], prompt, new)
                    rows.append({"way": name, "kind": kind, "prompt": number, "seconds": seconds, "tokens": tokens})
                print(f"{kind} {number + 1} of {len(own)}", file=sys.stderr, flush=True)
    return rows


def line(name: str, kind: str | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    own = [row for row in rows if row["way"] == name and kind in (None, row["kind"])]
    tokens, seconds = sum(len(row["tokens"]) for row in own), sum(row["seconds"] for row in own)
    by_prompt = [len(row["tokens"]) / row["seconds"] for row in own]
    return {
        "way": name, "kind": kind or "all", "tokens": tokens, "tokens_per_s": tokens / seconds,
        "median_of_requests": statistics.median(by_prompt),
    }  # fmt: skip


def compared(
    target: Any, rows: list[dict[str, Any]], prompts: dict[str, list[list[int]]], new: int
) -> dict[str, dict[str, Any]]:
    """Our texts compared with transformers' own."""
    every = [(kind, n, prompt) for kind, own in prompts.items() for n, prompt in enumerate(own)]
    reference = {(kind, n): answering.transformers(target, [prompt], new, 1)[0] for kind, n, prompt in every}
    found = {}
    for way in ("plain", "ngram", "suffix"):
        own = [row for row in rows if row["way"] == way]
        asked = [prompts[row["kind"]][row["prompt"]] for row in own]
        verdicts = Verdicts(target, asked, [reference[row["kind"], row["prompt"]] for row in own])
        found[way] = verdicts.of([row["tokens"] for row in own])
    return found


def promises(table: list[dict[str, Any]], texts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    speed = {(row["way"], row["kind"]): row["tokens_per_s"] for row in table}
    lines = [promise(f"faults of {way}: none", 0, -own["faults"]) for way, own in texts.items()]
    if ("llama.cpp, 16 bits", "all") in speed:
        ratio = speed["plain", "all"] / speed["llama.cpp, 16 bits", "all"]
        lines.append(promise("plain over llama.cpp with 16-bit weights", 1.15, ratio))
    lines.append(promise("suffix over plain", 1.12, speed["suffix", "all"] / speed["plain", "all"]))
    if ("suffix", "code") in speed:
        lines.append(promise("suffix over plain on code", 1.2, speed["suffix", "code"] / speed["plain", "code"]))
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
