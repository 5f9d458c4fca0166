"""How a step and a prompt scale with the length of the text: is the cost linear, and is each cached key read once for
all rows of a slot?

    python benchmarks/contexts.py [--contexts 1,4,16,32] [--prompts 1,4] [--rows 1,8] [--rounds 15] [--out FILE]

A Qwen3 with attention of the 0.6 B shape (16 query heads of 128, 8 key heads), 4 layers, a small vocabulary and random
weights in float32, compiled, one slot.  The cache is filled with noise up to each context (in thousands of tokens), so
that a step there can be timed without reading such a long text; steps of all widths at all contexts are interleaved,
and the fastest of each counts.  `over_context_ms` is the extra time of a step over a step after 64 tokens, `bound_ms`
the time to read the same bytes of keys and values at the speed of a sum over as many.  Prompts (in thousands of tokens)
are read whole, in chunks, as `generate` reads them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from batch_time import promise, write
from transformers import Qwen3Config, Qwen3ForCausalLM

from outrider import load_target, machine
from outrider.decoding.draft import Draft
from outrider.decoding.scheduler import PREFILL_CHUNK
from outrider.targets.hf.transformers import TransformersTarget

SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 8192, "max_position_embeddings": 40_960,
}  # fmt: skip
SHORT = 64
"""Context at which a step costs little more than its weights."""
LINEAR = 0.8
"""Minimum cost of a token of context at a quarter of the longest context, relative to its cost at the longest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Any = {"type": lambda given: [int(one) for one in given.split(",")]}
    parser.add_argument("--contexts", **numbers, default=[1, 4, 16, 32])
    parser.add_argument("--prompts", **numbers, default=[1, 4])
    parser.add_argument("--rows", **numbers, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    torch.manual_seed(0)
    target = load_target(Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval(), compile=False)
    target.compile()
    contexts = [SHORT, *(1000 * thousands for thousands in options.contexts)]
    found = steps(target, contexts, options.rows, options.rounds)
    prompts = [{"tokens": 1000 * each, **read(target, 1000 * each)} for each in options.prompts]
    write({"promises": promises(found), "shape": SHAPE, "steps": found, "prompts": prompts}, options.out)


@torch.inference_mode()
def steps(target: TransformersTarget, contexts: list[int], rows: list[int], rounds: int) -> list[dict[str, Any]]:
    """The fastest step of each width at each context."""
    cache = target.allocate(1, max(contexts) + max(rows) + 1)
    target.prefill(cache, [0], torch.zeros(1, SHORT, dtype=torch.int64), [SHORT])
    cache.reserve(cache.length)
    for buffer in cache.stacks.tensors:
        buffer.normal_()
    drafts = {
        count: Draft.chain(torch.zeros(1, count - 1, dtype=torch.int64), torch.tensor([count - 1])) for count in rows
    }
    seconds: dict[tuple[int, int], float] = {}
    sums: dict[int, float] = {}
    whole = torch.ones(bytes_of(max(contexts)) // 4)
    for _, context, count in itertools.product(range(rounds + 1), contexts, rows):
        cache.lengths[0] = context
        began = time.perf_counter()
        target.verify(cache, [0], torch.zeros(1, dtype=torch.int64), drafts[count])
        key, taken = (context, count), time.perf_counter() - began
        seconds[key] = min(seconds.get(key, taken), taken)
        began = time.perf_counter()
        whole[: bytes_of(context) // 4].sum()
        sums[context] = min(sums.get(context, 1e9), time.perf_counter() - began)
    return [
        {
            "context": context, "rows": count, "ms": 1e3 * taken, "over_context_ms": 1e3 * (taken - seconds[SHORT,
            count]),
            "bound_ms": 1e3 * sums[context], "mb_of_keys_and_values": bytes_of(context) / 1e6,
        }
        for (context, count), taken in seconds.items()
    ]  # fmt: skip


def read(target: TransformersTarget, count: int) -> dict[str, float]:
    """Seconds to a prompt's last logits, read as the loop reads it."""
    text = torch.randint(SHAPE["vocab_size"], (1, count), generator=torch.Generator().manual_seed(1))
    best = float("inf")
    for _ in range(2):
        cache = target.allocate(1, count + 1)
        began = time.perf_counter()
        for part in text.split(PREFILL_CHUNK, 1):
            target.prefill(cache, [0], part, [part.shape[1]])
        best = min(best, time.perf_counter() - began)
    return {"seconds": best, "ms_per_token": 1e3 * best / count}


def bytes_of(context: int) -> int:
    """Bytes of keys and values of this many tokens in all layers."""
    return 2 * 4 * context * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]


def promises(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    own = {(row["context"], row["rows"]): row for row in found}
    longest = max(context for context, _ in own)
    said = []
    for count in sorted({rows for _, rows in own}):
        each = {context: row["over_context_ms"] / context for (context, rows), row in own.items() if rows == count}
        middle = min(each, key=lambda context: abs(context - longest / 4))
        what = f"{count} rows: what a token of context costs at {middle} over {longest}"
        said.append(promise(what, LINEAR, each[middle] / each[longest]))
    return said


if __name__ == "__main__":
    main()
