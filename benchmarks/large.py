"""Does speculation pay where a target does not fit into the caches?

    python benchmarks/large.py [--shape 0.6b] [--values float32,bfloat16] [--rows 8] [--new 24] [--rounds 3]
    [--plain-path]
                               [--out FILE]

A Qwen3 of that shape with random weights, as float32 numbers or as exact bfloat16 ones, greedy, one request at a time.
Drafts are replayed: chains of which so much is right as the demo's dspark (the checkpoint of the last `make demo`) kept
on the demo target, step by step; drafting them costs nothing here, so the ratio is what verification allows.  Plain and
drafted requests take turns, and all texts are compared.  `share`: how fast a plain step reads the packed weights beside
the quickest reading of as many bytes in the same run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from batch_time import parties, promise, prompts_of, serve, write
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from outrider import generate, load_target, machine
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.fast import NotCompiled
from outrider.kernels import prepacked

SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
}
HEADS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
WANTED = {"float32": 1.7, "bfloat16": 1.4}
SAMPLE_BYTES = 2**30
"""Memory whose reading says how fast memory is: more than caches hold, less than would crowd out the model."""
PROMPT = 40


class Replay(Drafter):
    """Chains of `limit` nodes of which as many are right as the next of `kept` says."""

    def __init__(self, limit: int, kept: Sequence[int]):
        self.limit, self.kept, self.texts = limit, cycle(kept), {}
        """texts: what the target writes, by the prompt's tokens."""

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        nodes = []
        for row in state.rows:
            prompt = state.requests[row].prompt
            done = len(state.tokens[row]) - len(prompt)
            right = self.texts[tuple(prompt)][done : done + min(next(self.kept), self.limit)]
            nodes.append([*right, *[0] * (self.limit - len(right))])
        return Draft.chain(torch.tensor(nodes), torch.full((len(nodes),), self.limit)).first(budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=SHAPES)
    parser.add_argument("--values", default="float32,bfloat16")
    parser.add_argument("--rows", type=int, default=8, help="of a verified pass: the anchor and the drafted nodes")
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain-path", action="store_true", help="without compiled steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    kept = demo_kept(options.rows - 1)
    rows = []
    for values in options.values.split(","):
        rows.append(measured(options, values, kept))
        gc.collect()  # room for the next
    promises = [
        promise(f"{row['values']}: speculation over its own plain", WANTED[row["values"]], row["speedup"])
        for row in rows
    ] + [promise(f"{row['values']}: plain's share of the bandwidth", 0.9, row["share"]) for row in rows]
    promises += [
        promise(f"{row['values']}: share of a {way} step within the model", 0.97, 1 - row[f"{way}_overhead"])
        for row in rows
        for way in ("plain", "drafted")
    ]
    write({"promises": promises, "shape": options.shape, "rows_verified": options.rows, "rows": rows}, options.out)


def demo_kept(most: int) -> list[int]:
    """Nodes that the demo's drafter kept, step by step."""
    target, drafters = parties(["dspark"], compiled=False)
    if not drafters:
        raise SystemExit("the demo's dspark is missing: run `make demo` first")
    found = generate(target, prompts_of(target, 8), drafters["dspark"], max_new_tokens=96, slots=8, policy="fixed")
    return [min(count, most) for one in found for count in one.accepted]


def measured(options: argparse.Namespace, values: str, kept: Sequence[int]) -> dict[str, Any]:
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[options.shape], **HEADS, max_position_embeddings=4096)).eval()
    if values == "bfloat16":
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16().float())
    target = load_target(model, compile=False)
    seconds = None
    try:
        seconds = None if options.plain_path else target.compile()
    except NotCompiled as error:
        print(f"{values}: {error}", file=sys.stderr, flush=True)
    noise = torch.Generator().manual_seed(0)
    prompts = torch.randint(HEADS["vocab_size"], (2, PROMPT), generator=noise).tolist()
    drafter = Replay(options.rows - 1, kept)
    bytes_read = prepacked.stored(target.model)
    if not bytes_read:
        raise SystemExit(f"{values}: no layer is packed, for want of free memory or of a faster way than torch's")
    sample = torch.ones(min(bytes_read, SAMPLE_BYTES) // 4)
    times: dict[str, list[float]] = {
        "read": [],
        "plain": [],
        "drafted": [],
        "plain overhead": [],
        "drafted overhead": [],
    }
    differ, steps, tokens = 0, 0, 0
    for number in range(options.rounds + 1):
        for prompt in prompts:
            plain, [text] = serve(target, [prompt], options.new)
            differ += text != drafter.texts.setdefault(tuple(prompt), text)
            drafted, [other] = serve(target, [prompt], options.new, drafter)
            differ += text != other
            began = time.perf_counter()
            sample.sum()
            read = (time.perf_counter() - began) * bytes_read / sample.nbytes
            if number:
                times["read"].append(read)
                times["plain"].append(plain.seconds / plain.tokens)
                times["drafted"].append(drafted.seconds / drafted.tokens)
                times["plain overhead"].append(plain.overhead)
                times["drafted overhead"].append(drafted.overhead)
                steps, tokens = steps + drafted.steps, tokens + drafted.tokens
        print(f"{values}: round {number} of {options.rounds}", file=sys.stderr, flush=True)
    median = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "values": values, "compiled": target.step.graph is not None, "compiled_in_s": seconds,
        "stored_gb": bytes_read / 1e9,
        "plain_ms_per_token": 1e3 * median["plain"], "drafted_ms_per_token": 1e3 * median["drafted"],
        "tokens_per_step": tokens / steps, "speedup": median["plain"] / median["drafted"],
        "drafted_ms_per_step": 1e3 * median["drafted"] * tokens / steps, "read_ms": 1e3 * min(times["read"]),
        "share": min(times["read"]) / median["plain"], "texts_that_differ": differ,
        "plain_overhead": median["plain overhead"], "drafted_overhead": median["drafted overhead"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
