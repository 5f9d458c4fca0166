"""Tokens per second beside llama.cpp on the same machine: whole requests, prompt included, one at a time.

    python benchmarks/engines/build_llama.py
    python benchmarks/peers.py [--prompts 8] [--new 96] [--rounds 2] [--out FILE]

The demo target, greedy, every way of every party by turns, prompt by prompt: llama.cpp's server with weights in float32 and in
16 bits, as it comes, with its own n-gram speculation, and with our small model as a drafter; `generate` of transformers; ours,
compiled: plain, with ngram, and with the checkpoint of the last `make demo`.  `first_ms` is a request for one token.  Texts are
compared with ours, whose weights and caches are float32; llama.cpp's caches are as they come, in 16 bits.

LLAMA_SERVER names another binary.  Prints JSON; exits with 3 where there is no server.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from serving import parties, promise, prompts_of, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import llama_cpp  # noqa: E402
from benchmarks.engines.build_llama import CANNOT, COMMIT, VERSION  # noqa: E402
from outrider import generate, machine  # noqa: E402
from outrider.checkpoint import weights_of  # noqa: E402
from outrider.export import gguf  # noqa: E402

Ask = Callable[[list[int], int], list[int]]
"""(prompt, new tokens) to the tokens of the answer."""
OURS = "outrider: "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=96, help="tokens a prompt, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    binary = llama_cpp.found_binary()
    if binary is None:
        return CANNOT
    machine.settle()
    target, drafters = parties(["ngram", "dspark"])
    prompts = prompts_of(target, wanted.prompts)
    ours = {"plain": None, **drafters}
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as place:
        ways: dict[str, Ask] = {OURS + name: partial(outrider, target, drafter) for name, drafter in ours.items()}
        ways["transformers"] = partial(transformers, target)
        for name, model, more in llama_ways(target, Path(place)):
            client = stack.enter_context(llama_cpp.serving(binary, model, target.spec.context, torch.get_num_threads(), more))
            ways[f"llama.cpp: {name}"] = partial(llama, client)
        rows = measured(ways, prompts, wanted.new, wanted.rounds)
    plain = OURS + "plain"
    theirs = [row for row in rows if not row["way"].startswith(OURS)]
    best = max(theirs, key=lambda row: row["tokens_per_s"])
    mine = max((row for row in rows if row["way"].startswith(OURS)), key=lambda row: row["tokens_per_s"])
    sixteen = next(row for row in rows if row["way"] == "llama.cpp: 16 bits")
    own = next(row for row in rows if row["way"] == plain)
    promises = [
        promise("plain over llama.cpp with 16-bit weights", 1.1, own["tokens_per_s"] / sixteen["tokens_per_s"]),
        promise(f"{mine['way']} over the best of others, {best['way']}", 1.5, mine["tokens_per_s"] / best["tokens_per_s"]),
        promise("first token: theirs over ours", 1.0, min(row["first_ms"] for row in theirs) / own["first_ms"]),
    ]
    found = {"promises": promises, "llama_cpp": {"package": f"llama-cpp-python {VERSION}", "commit": COMMIT}, "rows": rows}
    write(found | {"prompts": len(prompts), "prompt_tokens": statistics.mean(map(len, prompts)), "new": wanted.new}, wanted.out)
    return 0


def measured(ways: dict[str, Ask], prompts: list[list[int]], new: int, rounds: int) -> list[dict[str, Any]]:
    """Every way's requests, by turns; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    firsts: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[list[int]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for n, prompt in enumerate(prompts):
            for way, ask in ways.items():
                began = time.perf_counter()
                ask(prompt, 1)
                first = time.perf_counter() - began
                began = time.perf_counter()
                text = ask(prompt, new)
                if number:
                    seconds[way].append(time.perf_counter() - began)
                    firsts[way].append(first)
                if number == 1:
                    texts[way].append(text)
            print(f"round {number} of {rounds}: {n + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    wanted = texts[OURS + "plain"]
    return [
        {
            "way": way, "tokens_per_s": rounds * sum(map(len, texts[way])) / sum(seconds[way]),
            "first_ms": 1e3 * statistics.median(firsts[way]), "texts": len(wanted),
            "equal": sum(mine == text for mine, text in zip(wanted, texts[way], strict=True)),
        }
        for way in ways
    ]  # fmt: skip


def outrider(target: Any, drafter: Any, prompt: list[int], new: int) -> list[int]:
    (one,) = generate(target, prompt, drafter, max_new_tokens=new)
    return [token for token in one.tokens if token not in target.ends]


@torch.inference_mode()
def transformers(target: Any, prompt: list[int], new: int) -> list[int]:
    given = torch.tensor([prompt])
    found = target.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    return [token for token in found[0, len(prompt) :].tolist() if token not in target.ends]


def llama(client: httpx.Client, prompt: list[int], new: int) -> list[int]:
    asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    return list(client.post("/completion", json=asked).raise_for_status().json()["tokens"])


def llama_ways(target: Any, place: Path) -> Iterator[tuple[str, Path, list[object]]]:
    """Names, models and arguments of the servers."""
    lm, drafts = target.model, llama_cpp.written(target, place)[0]
    for name, kind in (("float32", "f32"), ("16 bits", "f16")):
        path = place / f"target-{kind}.gguf"
        gguf.write_file(path, gguf.header(lm, target.tokenizer, kind), weights_of(lm), lm, kind)
        yield name, path, []
        yield f"{name}, its n-grams", path, ["--spec-type", "ngram-simple"]
        yield f"{name}, our small model", path, llama_cpp.drafting(drafts[kind])


if __name__ == "__main__":
    raise SystemExit(main())
