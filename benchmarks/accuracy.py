"""How far the logits of every fast path are from float64 over the same stored values, beside what transformers loses.

    python benchmarks/accuracy.py [--target smollm2] [--contexts 16,64,256,1000,2000,4000] [--dtypes float32,bfloat16]
                                  [--out FILE]

The text is this repository's own documentation.  Reference: transformers' model in float64, its norms and softmax too,
in one pass over the whole text.  Each path reads the first n tokens as a prompt, then verifies the next 8 in one pass,
whose logits are compared; steps: it takes the first 4 of these one by one.  transformers: its own pass over the whole
text in the same type.  A path holds if its root mean square is at most 1.5 times transformers', and its largest
difference at most 3 times, over all contexts.

Rows: `plain` (our packed products), `compiled`, `compiled prompt` (the prompt was read by the package too).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from batch_time import write
from torch import Tensor

from outrider import prepacked
from outrider.decoding.draft import Draft
from outrider.targets.accuracy import Loss
from outrider.targets.load import load_target
from outrider.targets.selftest import chain_of

ROOT = Path(__file__).resolve().parent.parent
NODES, STEPS = 8, 4
RMS, LARGEST = 1.5, 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--contexts", default="16,64,256,1000,2000,4000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    contexts = [int(length) for length in options.contexts.split(",")]
    rows = []
    for dtype in options.dtypes.split(","):
        rows += paths(options.target, dtype, contexts, not options.no_compile)
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
    """transformers' families compute norms and softmax in what they call float32: make it float64."""
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


def chain(target: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Logits [NODES, V] of one pass over these tokens."""
    logits: Tensor = target.verify(cache, [0], tokens[:, 0], chain_of(tokens[:, 1:])).logits[0]
    return logits


def steps(target: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Logits [STEPS, V], one token a pass."""
    found = []
    for n in range(STEPS):
        found.append(target.verify(cache, [0], tokens[:, n], Draft.empty(1, tokens.device)).logits[0, 0])
        cache.keep([[]])
    return torch.stack(found)


def row(
    path: str, dtype: str, context: int, found: Tensor, wanted: Tensor, base: Tensor | None = None
) -> dict[str, Any]:
    """base: transformers' own logits of the same tokens, with whose loss this one's is compared."""
    loss = Loss.between([(found, wanted)])
    made: dict[str, Any] = {"path": path, "dtype": dtype, "context": context, **loss._asdict()}
    if base is not None:
        usual = Loss.between([(base, wanted)])
        made |= {"rms_ratio": loss.rms / usual.rms, "largest_ratio": loss.largest / usual.largest}
        made["holds"] = made["rms_ratio"] <= RMS and made["largest_ratio"] <= LARGEST
    return made


if __name__ == "__main__":
    main()
