"""Drafts of a target of bytes and patches, by itself: `python benchmarks/byte_drafters.py TARGET --out FILE.json`.

For each drafter: bytes per whole pass, passes of the local layers and of the global model, weights read per byte
beside plain decoding (a pass reads the weights of each part that runs once), CPU time, and whether greedy text in
float64 is the target's own and transformers' `generate`'s.  Prompts are of modules that training never saw.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from byte_target import parts_of  # noqa: E402

from outrider import demo, load_drafter, load_target  # noqa: E402
from outrider.generation import generate  # noqa: E402

STALE = {f"stale_latent, {k}": ("stale_latent", {"length": k}) for k in (4, 8, 16)}
DIFFUSION = {
    f"patch_diffusion, {steps} step{'s'[: steps - 1]}": ("patch_diffusion", {"block": 8, "steps": steps})
    for steps in (1, 2, 4)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--bytes", type=int, default=160, help="new bytes a text")
    parser.add_argument("--exact", type=int, default=24, help="texts that are compared in float64")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--block", type=int, default=8, help="of patch_diffusion: what the target was trained for")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(options.target, compile=False)
    texts = [target.encode(text) for _, text in demo.prompts("held_out", options.prompts)]
    drafters: dict[str, Any] = {"plain": None}
    for name, (kind, settings) in (STALE | DIFFUSION).items():
        settings = settings | ({"block": options.block} if kind == "patch_diffusion" else {})
        drafters[name] = load_drafter(kind, target, **settings)
    rows = []
    for temperature in map(float, options.temperatures.split(",")):
        found = {name: [] for name in drafters}
        for number, text in enumerate(texts):  # interleaved: a change of the machine's speed meets all alike
            for name, drafter in drafters.items():
                found[name].append(measured(target, text, drafter, options.bytes, temperature, number))
        for name, runs in found.items():
            rows.append(row(name, temperature, runs, found["plain"], target))
            print(json.dumps(rows[-1]), flush=True)
    exact = compared(options, texts[: options.exact], drafters)
    print(json.dumps(exact))
    if options.out:
        options.out.write_text(json.dumps({"target": options.target, "rows": rows, "exact": exact}, indent=1) + "\n")


def measured(target: Any, text: list[int], drafter: Any, count: int, temperature: float, seed: int) -> dict[str, Any]:
    """One text's figures."""
    torch.manual_seed(seed)
    with counting(target.model) as passes:
        began = time.process_time()
        [found] = generate(
            target, text, drafter, max_new_tokens=count, policy="fixed", temperature=temperature, seed=seed,
            shared_noise=False,
        )  # fmt: skip
        seconds = time.process_time() - began
    return {"bytes": len(found.tokens), "steps": found.steps, "seconds": seconds, "tokens": found.tokens, **passes}


@contextmanager
def counting(model: Any) -> Iterator[Counter[str]]:
    """Counts passes of the local layers and of the global model."""
    passes: Counter[str] = Counter(local=0, wide=0)
    first = {"local": model.model.layers[0], "wide": model.model.global_model.layers[0]}
    handles = [part.register_forward_hook(lambda *_, name=name: passes.update([name])) for name, part in first.items()]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def row(
    name: str, temperature: float, runs: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], target: Any
) -> dict[str, Any]:
    """Sums over texts; intervals of 95 % from a bootstrap over them."""
    sizes = {part: sum(w.numel() for w in module.parameters()) for part, module in parts_of(target.model).items()}

    def weights(of: Sequence[Mapping[str, Any]]) -> float:
        read = sum(run["local"] * sizes["local"] + run["wide"] * sizes["global"] for run in of)
        return read / sum(run["bytes"] for run in of)

    def rate(of: Sequence[Mapping[str, Any]]) -> float:
        return sum(run["bytes"] for run in of) / sum(run["seconds"] for run in of)

    noise, pairs = random.Random(0), list(zip(runs, plain, strict=True))
    figures: dict[str, Any] = {
        "bytes_per_step": lambda own, _: sum(r["bytes"] for r in own) / sum(r["steps"] for r in own),
        "bytes_per_global_pass": lambda own, _: sum(r["bytes"] for r in own) / sum(r["wide"] for r in own),
        "local_passes_per_byte": lambda own, _: sum(r["local"] for r in own) / sum(r["bytes"] for r in own),
        "weights_read_beside_plain": lambda own, other: weights(own) / weights(other),
        "speed_beside_plain": lambda own, other: rate(own) / rate(other),
    }
    result: dict[str, Any] = {"drafter": name, "temperature": temperature, "texts": len(runs)}
    for figure, of in figures.items():
        draws = sorted(of(*zip(*noise.choices(pairs, k=len(pairs)), strict=True)) for _ in range(1000))
        result[figure] = [round(value, 3) for value in (of(runs, plain), draws[25], draws[974])]
    if temperature == 0:
        result["same_text_float32"] = sum(one["tokens"] == other["tokens"] for one, other in pairs)
    return result


def compared(options: Any, texts: Sequence[list[int]], drafters: Mapping[str, Any]) -> dict[str, int]:
    """How many greedy texts in float64 are the target's own, by drafter; `generate` is transformers'."""
    target = load_target(options.target, dtype="float64", compile=False)
    alone = [one.tokens for one in generate(target, texts, max_new_tokens=options.bytes)]
    exact = {"texts": len(texts), "generate": 0}
    for text, tokens in zip(texts, alone, strict=True):
        given = torch.tensor([text])
        out = target.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=options.bytes, do_sample=False, pad_token_id=0
        )
        exact["generate"] += out[0, len(text) :].tolist() == tokens
    for name, (kind, settings) in (STALE | DIFFUSION).items():
        settings = settings | ({"block": options.block} if kind == "patch_diffusion" else {})
        own = load_drafter(kind, target, **settings)
        found = generate(target, texts, own, max_new_tokens=options.bytes, policy="fixed")
        exact[name] = sum(one.tokens == tokens for one, tokens in zip(found, alone, strict=True))
    return exact


if __name__ == "__main__":
    main()
