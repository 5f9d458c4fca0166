"""The first of several processes that share tiny targets: `torchrun … -m targets.parts FOLDER`, which has a target of
each family; it writes what they decode to FOLDER/texts.json.

The processes draw other numbers, so that a text which depends on another process's draws is another one.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from outrider import generate, load_drafter, load_target

PROMPTS = [[3, 4, 5, 6, 7] * 3, [9, 8, 7]]
HOW: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 5}}
NEW = 8
"""Tokens of a text."""
DRAFTERS = ("recycle", "eagle3")
"""A tree of tokens, and a drafter that taps layers and borrows embedding and head."""
TYPES = {"qwen3_moe": "float32"}
"""transformers multiplies experts in float32 at most."""


def texts(target: Any, drafter: str | None) -> dict[str, list[list[int]]]:
    """Token ids after each prompt, for each way to sample."""
    own = None if drafter is None else load_drafter(drafter, target)
    return {
        name: [found.tokens for found in generate(target, PROMPTS, own, max_new_tokens=NEW, policy="fixed", **how)]
        for name, how in HOW.items()
    }


def whole(target: Any) -> list[float]:
    """A row of the head, summed, and what the second layer's own norm and MLP weights sum up to."""
    layer = target.layer(1).state_dict()
    return [float(target.head_rows(torch.tensor([7])).sum()), sum(float(weight.sum()) for weight in layer.values())]


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    random.seed(rank)
    found: dict[str, Any] = {}
    for place in sorted(path.parent for path in folder.glob("*/config.json")):
        target: Any = load_target(place, dtype=TYPES.get(place.name, "float64"), tensor_parallel=2)
        assert rank == 0  # the other one works for this one, and never gets here
        own = target._own.model.model.layers[0].self_attn.k_proj.weight.to_local()
        greedily = target.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=NEW, do_sample=False)
        found[place.name] = {
            "hash": target.spec.weights_hash, "mode": target.spec.mode, "local": list(own.shape),
            "whole": whole(target),
            "generate": greedily[0, len(PROMPTS[0]) :].tolist(),
            **{kind: texts(target, kind) for kind in DRAFTERS},
        }  # fmt: skip
    (folder / "texts.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
