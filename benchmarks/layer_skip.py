"""Self-speculation on the demo target: which sublayers it can spare, and whether that pays.

    python benchmarks/layer_skip.py [--tries 30] [--tokens 32] [--prompts 3] [--plain-path] [--out FILE]

Sets of sublayers are searched on six prompts, and the best of each size (sublayers left out) is told: how often its
first drafted token is the target's own, its seconds, and the bound of its speed-up, E[tokens] T(1) / (T(n) + T_draft).
`decoded` are the best set and SWIFT's start, every second layer, on other prompts: greedy, one request, each through
all ways by turns. Drafting passes take the plain path; with compiled steps (the default) T(1) and T(n) do not, so that
the bound is lower.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from batch_time import parties, prompts_of, write

from outrider.decoding.state import Request
from outrider.lab.drafters import layer_skip
from outrider.measure.timing import run_once
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.fitting import sublayers
from outrider.training.fitting.sublayers import Found

SEARCHED = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=32, help="tokens a prompt, in the search and after it")
    parser.add_argument("--prompts", type=int, default=3, help="prompts that are decoded with what was found")
    parser.add_argument("--plain-path", action="store_true", help="without compiled steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target, _ = parties([], compiled=not options.plain_path)
    target.ends = frozenset()
    prompts = prompts_of(target, SEARCHED + options.prompts)

    def say(number: int, found: Found) -> None:
        print(f"try {number + 1} of {options.tries}: {found.speedup:.2f}", file=sys.stderr, flush=True)

    found = sublayers.search(target, prompts[:SEARCHED], tokens=options.tokens, tries=options.tries, say=say)
    by_size: dict[int, Found] = {}
    for one in found:  # the best first
        by_size.setdefault(len(one.skip_attention) + len(one.skip_mlp), one)
    decoded_, mismatches = decoded(target, found[0], prompts[SEARCHED:], options.tokens)
    best = max(row["over_plain"] for row in decoded_)
    promises = [
        {
            "promise": "texts that differ from plain decoding's",
            "wanted": 0,
            "found": mismatches,
            "holds": mismatches == 0,
        },
        {"promise": "best measured speed-up over plain", "wanted": 1.0, "found": best, "holds": best > 1.0},
    ]
    write(
        {
            "promises": promises,
            "path": "plain" if options.plain_path else "compiled",
            "layers": target.spec.layers, "sets_tried": len(found), "drafts_tried_per_set": found[0].drafts,
            "by_size": [told(by_size[size]) for size in sorted(by_size)],
            "decoded": decoded_,
        },
        options.out,
    )  # fmt: skip


def told(found: Found) -> dict[str, Any]:
    return {
        "left_out": len(found.skip_attention) + len(found.skip_mlp), "skip_attention": found.skip_attention,
        "skip_mlp": found.skip_mlp, "length": found.length, "min_confidence": found.min_confidence,
        "agreement": found.agreement, "kept_per_step": found.accepted, "passes_per_step": found.passes,
        "plain_ms": 1e3 * found.plain_s,
        "draft_pass_ms": 1e3 * found.draft_s, "verify_ms": 1e3 * found.verify_s, "bound": found.speedup,
    }  # fmt: skip


@torch.inference_mode()
def decoded(
    target: TransformersTarget, best: Found, prompts: list[list[int]], tokens: int
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """Seconds of the best set and of SWIFT's start beside plain decoding, and texts that differ from its."""
    start = layer_skip.build(layer_skip.Config(), target)
    ways: dict[str, Any] = {
        "plain": None,
        "best": layer_skip.LayerSkip(target, best.skip, best.length, best.min_confidence),
        "best, drafts of 4 that end below 0.4": layer_skip.LayerSkip(target, best.skip, 4, 0.4),
        "every second layer": start,
    }
    seconds, steps, mismatches = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0), 0
    for number, prompt in enumerate([prompts[0], *prompts]):
        texts = {}
        for name, drafter in ways.items():
            run = run_once(target, Request(prompt, tokens, Sampling()), drafter, ends=False)
            texts[name] = run.tokens
            if number:  # the first is a warm-up
                seconds[name] += run.seconds
                steps[name] += run.steps
        mismatches += sum(text != texts["plain"] for text in texts.values())
        print(f"prompt {number} of {len(prompts)}", file=sys.stderr, flush=True)
    rows = [
        {"way": name, "tokens_per_step": len(prompts) * tokens / steps[name], "seconds": seconds[name],
         "over_plain": seconds["plain"] / seconds[name]}
        for name in ways if name != "plain"
    ]  # fmt: skip
    return rows, mismatches


if __name__ == "__main__":
    main()
