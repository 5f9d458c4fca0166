"""One checkpoint beside its target in float32 and in int8: tokens per step, speed and memory, on the same prompts by
turns.

    python benchmarks/quantised.py [--prompts 24] [--tokens 96] [--drafter runs/demo/checkpoint] [--out FILE]

The checkpoint was trained beside float32 weights.  `lost` is how many tokens per step fewer it has beside int8 ones,
with the standard error of the mean over prompts; the draft's own weights are float32 or int8.  Every text is compared
with that same target's `generate`.  `apart` is the largest difference of a logit between single steps and one pass over
the same tokens: for int8-dynamic it is why that mode is refused.  The plain path throughout, since int8 has no other.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from batch_time import CHECKPOINT, prompts_of, write
from torch import nn

from outrider import load_drafter, load_target
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.measure.record import Run
from outrider.measure.row import first_difference
from outrider.measure.timing import generate_once, run_once
from outrider.sampling.settings import Sampling
from outrider.targets import quantised
from outrider.targets.hf.transformers import TransformersTarget

WAYS = {
    "float32": (None, None),
    "int8": ("int8", None),
    "float32, int8 draft": (None, "int8"),
    "int8, int8 draft": ("int8", "int8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="tokens a prompt")
    parser.add_argument("--drafter", type=Path, default=CHECKPOINT)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    targets = {mode: load_target("demo", quantize=mode, compile=False) for mode in (None, "int8")}
    for target in targets.values():
        target.ends = frozenset()
    drafters = {
        way: load_drafter(options.drafter, targets[mode], quantize=draft) for way, (mode, draft) in WAYS.items()
    }
    rows, mismatches = measured(targets, drafters, prompts_of(targets[None], options.prompts), options.tokens)
    write(
        {
            "promises": [
                {"promise": "texts that differ from the same target's generate", "wanted": 0, "found": mismatches,
                 "holds": mismatches == 0}
            ],
            "drafter": named(options.drafter), "prompts": options.prompts, "tokens_a_prompt": options.tokens,
            "rows": rows,
            "apart": {str(mode or "float32"): apart(target.model, target) for mode, target in targets.items()}
            | {"int8-dynamic": apart(dynamic(), targets[None])},
            "bytes": {str(mode or "float32"): weight_bytes(target.model) for mode, target in targets.items()},
        },
        options.out,
    )  # fmt: skip


@torch.inference_mode()
def measured(
    targets: dict[str | None, TransformersTarget], drafters: dict[str, Drafter], prompts: list[list[int]], tokens: int
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """A row a way, and how many texts are not their target's own."""
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    plain: dict[str | None, list[Run]] = {mode: [] for mode in targets}
    mismatches = 0
    for number, prompt in enumerate([prompts[0], *prompts]):
        own = {mode: generate_once(target, prompt, tokens)[0] for mode, target in targets.items()}
        request = Request(prompt, tokens, Sampling())
        alone = {mode: run_once(target, request, ends=False) for mode, target in targets.items()}
        order = [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]
        ridden = {way: run_once(targets[WAYS[way][0]], request, drafters[way], ends=False) for way in order}
        if not number:  # a warm-up
            continue
        for mode, run in alone.items():
            plain[mode].append(run)
            mismatches += first_difference(run.tokens, own[mode]) is not None
        for way, run in ridden.items():
            runs[way].append(run)
            mismatches += first_difference(run.tokens, own[WAYS[way][0]]) is not None
        print(f"prompt {number} of {len(prompts)}", file=sys.stderr, flush=True)
    return [told(way, runs, plain[WAYS[way][0]]) for way in WAYS], mismatches


def told(way: str, runs: dict[str, list[Run]], plain: list[Run]) -> dict[str, Any]:
    mine, seconds = runs[way], sum(run.seconds for run in runs[way])
    lost = [_pace(base) - _pace(run) for base, run in zip(runs["float32"], mine, strict=True)]
    return {
        "way": way,
        "tokens_per_step": sum(len(run.tokens) for run in mine) / sum(run.steps for run in mine),
        "lost": statistics.mean(lost),
        "lost_error": statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else None,
        "tokens_per_s": sum(len(run.tokens) for run in mine) / seconds,
        "plain_tokens_per_s": sum(len(run.tokens) for run in plain) / sum(run.seconds for run in plain),
        "over_plain": sum(run.seconds for run in plain) / seconds,
    }


def _pace(run: Run) -> float:
    return len(run.tokens) / run.steps


def dynamic() -> nn.Module:
    """The demo target with rounded activations too, as no Target is."""
    target = load_target("demo", compile=False)
    model, api = copy.deepcopy(target.model), quantised.library("int8")
    head = model.get_output_embeddings()
    api.quantize_(
        model, api.Int8DynamicActivationInt8WeightConfig(),
        filter_fn=lambda part, _: isinstance(part, nn.Linear) and part is not head,
    )  # fmt: skip
    return model


@torch.inference_mode()
def apart(model: nn.Module, target: TransformersTarget) -> dict[str, float]:
    """Largest difference of a logit between passes of one token and a pass of 16, in our own cache; and the largest
    logit."""
    own, target.model = target.model, model
    trunk, target._trunk = target._trunk, model.base_model
    try:
        text = torch.tensor([prompts_of(target, 1)[0][:17]])
        many, one = target.allocate(1, 40), target.allocate(1, 40)
        for cache in (many, one):
            target.prefill(cache, [0], text[:, :1], [1])
        whole = target.verify(many, [0], text[:, 1], Draft.chain(text[:, 2:], torch.tensor([15]))).logits[0]
        worst = 0.0
        for n in range(16):
            single = target.verify(one, [0], text[:, 1 + n], Draft.empty(1, target.device)).logits[0, 0]
            one.keep([[]])
            worst = max(worst, float((whole[n] - single).abs().max()))
        return {"logits": worst, "of": float(whole.abs().max())}
    finally:
        target.model, target._trunk = own, trunk


def named(folder: Path) -> str:
    """As seen from the repository."""
    return str(folder.resolve()).removeprefix(f"{CHECKPOINT.parents[2]}/")


def weight_bytes(model: nn.Module) -> int:
    parts = {id(weight): weight for weight in model.parameters()}
    return sum(part.nbytes for weight in parts.values() for _, part in quantised.parts("", weight))


if __name__ == "__main__":
    main()
