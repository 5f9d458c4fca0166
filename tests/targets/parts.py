"""The first of several processes that share tiny targets: `torchrun … -m targets.parts FOLDER`, which has a target of
each family; it writes what they decode to FOLDER/texts.json.

The processes draw other numbers, so that a text which depends on another process's draws is another one.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from contracts.parties import Oracle

from outrider import generate, load_drafter, load_target

PROMPTS = [[3, 4, 5, 6, 7] * 3, [9, 8, 7]]
HOW: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 5}}
NEW = 8
"""Tokens of a text."""
TYPES = {"qwen3_moe": "float32"}
"""transformers multiplies experts in float32 at most."""


def plainly(target: Any) -> dict[str, list[list[int]]]:
    """Token ids after each prompt without a drafter, for each way to sample."""
    return {
        name: [found.tokens for found in generate(target, PROMPTS, max_new_tokens=NEW, **how)]
        for name, how in HOW.items()
    }


def drafted(target: Any, texts: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """The same by eagle3, which taps layers and borrows embedding and head."""
    tree = Oracle(
        [prompt + text for prompt, text in zip(PROMPTS, texts["greedy"], strict=True)], target.spec.vocabulary
    )
    found = generate(target, PROMPTS, tree, max_new_tokens=NEW, policy="fixed")
    assert max(found[0].accepted) == tree.depth
    eagle = load_drafter("eagle3", target)
    return {"tree": [own.tokens for own in found]} | {
        name: [own.tokens for own in generate(target, PROMPTS, eagle, max_new_tokens=NEW, policy="fixed", **how)]
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
        known = load_target(place, dtype=target.spec.dtype, compile=False)
        assert rank == 0  # the other one works for this one, and never gets here
        own = target._part.model.model.layers[0].self_attn.k_proj.weight.to_local()
        greedily = target.generate_plainly(torch.tensor(PROMPTS[:1]), {"max_new_tokens": NEW, "do_sample": False})
        found[place.name] = {
            "hash": target.spec.weights_hash, "mode": target.spec.mode, "local": list(own.shape),
            "whole": whole(target),
            "generate": greedily[0, len(PROMPTS[0]) :].tolist(),
            "drafted": drafted(target, plainly(known)),
        }  # fmt: skip
    (folder / "texts.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
