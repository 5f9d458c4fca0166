"""How far the logits of every fast path are from float64 with the same stored values, compared with transformers' own
error.

    python benchmarks/accuracy.py [--target smollm2] [--contexts 16,64,256,1000,2000,4000] [--dtypes float32,bfloat16]
                                  [--out FILE]

The text is this repository's own documentation.  Reference: transformers' model in float64, including its norms and
softmax, in one pass over the whole text.  Each path reads the first n tokens as a prompt, then verifies the next 32 in
one pass, whose logits are compared; `steps`: it reads the first 16 of these one by one.  `transformers`: its own pass
over the whole text in the same dtype.  A path passes if, at every context, its root mean square error is at most 1.5
times transformers', and its largest difference at most 3 times.

Rows: `plain` (our packed products), `compiled`, `compiled prompt` (the prompt was read by the compiled package too);
`block`, a dflash drafter of two layers with random weights on the target's states of 100 tokens, plain and compiled,
compared with its modules without our products; and `gpu kernels`, run by Triton's interpreter, over two layers and 64
tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before other modules import Triton

import torch
from batch_time import write
from torch import Tensor

from outrider import load_drafter
from outrider.decoding.draft import Draft
from outrider.fast.block import alike
from outrider.fast.passes.compiled import TracedPass
from outrider.kernels import prepacked
from outrider.targets.accuracy import Loss
from outrider.targets.hf.proof.selftest import chain_of
from outrider.targets.load import load_target

ROOT = Path(__file__).resolve().parent.parent
NODES, STEPS = 32, 16
RMS, LARGEST = 1.5, 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--contexts", default="16,64,256,1000,2000,4000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    contexts = [int(length) for length in options.contexts.split(",") if length]
    rows = []
    for dtype in options.dtypes.split(","):
        rows += paths(options.target, dtype, contexts, not options.no_compile) if contexts else []
    rows += [*block(options.target, not options.no_compile), *gpu_kernels(options.target)]
    promises = [
        {
            "promise": f"{row['path']} in {row['dtype']}, {row['context']} tokens", "wanted": f"{RMS} and {LARGEST}",
            "found": [round(row["rms_ratio"], 2), round(row["largest_ratio"], 2)], "holds": row["holds"],
        }
        for row in rows
        if "holds" in row
    ]  # fmt: skip
    write({"rows": rows, "promises": promises}, options.out)
    sys.exit(not all(promise["holds"] for promise in promises))


def text(target: Any, count: int) -> Tensor:
    """Token ids [1, count] of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    whole = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = target.tokenizer.encode(whole[: 20 * count], add_special_tokens=False)[:count]
    assert len(ids) == count, f"the documentation has {len(ids)} tokens, fewer than {count}"
    return torch.tensor([ids])


@contextmanager
def whole_float64() -> Iterator[None]:
    """transformers' families hard-code float32 for norms and softmax: make it float64."""
    with mock.patch.object(torch, "float32", torch.float64):
        yield


@torch.inference_mode()
def paths(name: str, dtype: str, contexts: list[int], compile: bool) -> list[dict[str, Any]]:
    target: Any = load_target(name, dtype=dtype, compile=False)
    tokens = text(target, max(contexts) + NODES)
    exact = copy.deepcopy(target.model).double()
    with whole_float64():
        reference = exact(tokens, use_cache=False).logits[0]
    with prepacked.disabled():
        theirs = target.model(tokens, use_cache=False).logits[0].double()
    spans = {length: slice(length, length + NODES) for length in contexts}
    rows = [row("transformers", dtype, length, theirs[span], reference[span]) for length, span in spans.items()]
    ways: list[tuple[str, bool, bool]] = [("plain", False, False)]
    if compile:
        target.compile()
        ways += [("compiled", True, False), ("compiled prompt", True, True)]
    graph = target.step.graph
    for length in contexts:
        for path, is_compiled, reads in ways:
            for kind in ("chain", "steps"):
                target.step.graph = graph if reads else None
                cache = target.allocate(1, length + 2 * NODES)
                target.prefill(cache, [0], tokens[:, :length], [length])
                target.step.graph = graph if is_compiled else None
                found = (chain if kind == "chain" else steps)(target, cache, tokens[:, length : length + NODES])
                span = slice(length, length + len(found))
                rows.append(row(f"{path}, {kind}", dtype, length, found.double(), reference[span], theirs[span]))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    target.step.graph = graph
    return rows


@torch.inference_mode()
def block(name: str, compile: bool) -> list[dict[str, Any]]:
    """A block drafter's logits."""
    target: Any = load_target(name, dtype="float32", compile=False)
    torch.manual_seed(0)
    drafter: Any = load_drafter("dflash", target, layers=2, block=8)
    step = drafter.steps[0]
    exact = step.exact()
    with prepacked.disabled():
        base = step.predicted(step.traced)
    ways = {"block, plain": step.traced}
    if compile:
        step.get(build=True)
        ways["block, compiled"] = step.graph.forward
    rows = []
    for path, way in ways.items():
        loss, usual = (Loss.between(alike(own, exact)) for own in (step.predicted(way), base))
        rows.append(of_losses(path, "float32", 100, loss, usual))
    return rows


@torch.inference_mode()
def gpu_kernels(name: str, context: int = 64, layers: int = 2) -> list[dict[str, Any]]:
    """A pass by our Triton kernels."""
    from outrider.fast.gpu.kernel_pass import GpuPass  # Triton reads this setting on import

    whole: Any = load_target(name, dtype="float32", compile=False)
    model = copy.deepcopy(whole.model)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
    target: Any = load_target(model, compile=False)
    tokens, span = text(whole, context + NODES), slice(context, context + NODES)
    exact = copy.deepcopy(model).double()
    with whole_float64():
        reference = exact(tokens, use_cache=False).logits[0]
    with prepacked.disabled():
        theirs = model(tokens, use_cache=False).logits[0].double()
    cache = target.allocate(1, context + 2 * NODES)
    target.prefill(cache, [0], tokens[:, :context], [context])
    cache.open([0], NODES)
    given = target.step._arguments(tokens[:, span], cache, None, (0,))
    found = GpuPass(target, TracedPass(target, []))(*given)[0][0].double()
    return [row("gpu kernels, chain", "float32", context, found, reference[span], theirs[span])]


def chain(target: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Logits [NODES, V] of one pass over these tokens."""
    logits: Tensor = target.verify(cache, [0], tokens[:, 0], chain_of(tokens[:, 1:])).logits[0]
    return logits


def steps(target: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Logits [STEPS, V], one token per pass."""
    found = []
    for n in range(STEPS):
        found.append(target.verify(cache, [0], tokens[:, n], Draft.empty(1, tokens.device)).logits[0, 0])
        cache.keep([[]])
    return torch.stack(found)


def row(
    path: str, dtype: str, context: int, found: Tensor, wanted: Tensor, base: Tensor | None = None
) -> dict[str, Any]:
    """base: transformers' own logits for the same tokens, whose error is the yardstick."""
    loss = Loss.between([(found, wanted)])
    made: dict[str, Any] = {"path": path, "dtype": dtype, "context": context, **loss._asdict()}
    return made if base is None else of_losses(path, dtype, context, loss, Loss.between([(base, wanted)]))


def of_losses(path: str, dtype: str, context: int, loss: Loss, usual: Loss) -> dict[str, Any]:
    ratios = {"rms_ratio": loss.rms / usual.rms, "largest_ratio": loss.largest / usual.largest}
    holds = ratios["rms_ratio"] <= RMS and ratios["largest_ratio"] <= LARGEST
    return {"path": path, "dtype": dtype, "context": context, **loss._asdict(), **ratios, "holds": holds}


if __name__ == "__main__":
    main()
