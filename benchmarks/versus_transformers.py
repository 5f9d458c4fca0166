"""Outrider beside transformers' own generate on the demo target: greedy, one request, equal tokens.

    python benchmarks/versus_transformers.py [--prompts 12] [--new 88] [--plain-path] [--out FILE]

Every prompt goes through all ways one after the other, so that a slow moment of the machine falls on all.  Ratios are
of total times, prefill included.  The bound of a drafter is tokens_per_step * T(1) / (T(n) + T_draft), with T the calls
into the models alone and T(1) those of plain decoding on the same path; `of_bound` says how near the measured speed-up
over plain comes to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from batch_time import parties, prompts_of, write

from outrider.decoding.state import Request
from outrider.measure.record import Run
from outrider.measure.timing import run_once
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

PROMISED = {"ngram over prompt_lookup": 1.3, "small_model over assistant_model": 1.3, "plain over generate": 1.5}


@torch.inference_mode()
def generated(target: TransformersTarget, prompt: list[int], new: int, **options: Any) -> tuple[list[int], float]:
    """transformers' greedy text, whatever ends there, and its seconds."""
    began = time.perf_counter()
    inputs = torch.tensor([prompt])
    out = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        eos_token_id=None, pad_token_id=0, **options,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist(), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new", type=int, default=88, help="tokens a prompt")
    parser.add_argument("--plain-path", action="store_true", help="without compiled steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target, drafters = parties(["ngram", "small_model", "dspark"], compiled=not options.plain_path)
    target.ends = frozenset()
    small: Any = drafters["small_model"]
    theirs = {
        "generate": {}, "prompt_lookup": {"prompt_lookup_num_tokens": 10},
        "assistant_model": {"assistant_model": small.model.model},
    }  # fmt: skip
    ours: dict[str, Any] = {"plain": None, **drafters}
    seconds = dict.fromkeys([*theirs, *ours], 0.0)
    runs: dict[str, list[Run]] = {name: [] for name in ours}
    compared = mismatches = 0
    for number, prompt in enumerate([prompts_of(target, 1)[0], *prompts_of(target, options.prompts)]):
        texts = {}
        for name, settings in theirs.items():
            texts[name], taken = generated(target, prompt, options.new, **settings)
            seconds[name] += taken if number else 0.0
        for name, drafter in ours.items():
            run = run_once(target, Request(prompt, options.new, Sampling()), drafter, ends=False)
            texts[name] = run.tokens
            if number:  # the first is a warm-up
                seconds[name] += run.seconds
                runs[name].append(run)
        for name in ours:
            compared += options.new
            mismatches += texts[name] != texts["generate"]
        print(f"prompt {number} of {options.prompts}", file=sys.stderr, flush=True)
    ratios = {
        "plain over generate": seconds["generate"] / seconds["plain"],
        "ngram over prompt_lookup": seconds["prompt_lookup"] / seconds["ngram"],
        "small_model over assistant_model": seconds["assistant_model"] / seconds["small_model"],
    }
    promises = [
        {"promise": name, "wanted": wanted, "found": ratios[name], "holds": ratios[name] >= wanted}
        for name, wanted in PROMISED.items()
    ]
    rows = [row(name, runs[name], runs["plain"], seconds) for name in ours]
    promises += [
        {
            "promise": f"{one['name']} of its bound",
            "wanted": 0.85,
            "found": one["of_bound"],
            "holds": one["of_bound"] >= 0.85,
        }
        for one in rows
    ]
    write(
        {
            "path": "plain" if options.plain_path else "compiled", "prompts": options.prompts,
            "new_tokens": options.new,
            "compared_tokens": compared, "mismatches": mismatches, "promises": promises, "rows": rows,
            "transformers": {name: {"over_generate": seconds["generate"] / seconds[name]} for name in theirs},
        },
        options.out,
    )  # fmt: skip
    sys.exit(bool(mismatches))


def row(name: str, runs: list[Run], plain: list[Run], seconds: dict[str, float]) -> dict[str, Any]:
    def total(of: list[Run], field: str) -> float:
        return sum(getattr(run, field) for run in of)

    steps, tokens = total(runs, "steps"), sum(len(run.tokens) for run in runs)
    one = total(plain, "model_s") / total(plain, "steps")
    drafted = total(runs, "model_s") / steps
    bound = tokens / steps * one / drafted
    speedup = seconds["plain"] / seconds[name]
    return {
        "name": name, "tokens_per_step": tokens / steps, "over_generate": seconds["generate"] / seconds[name],
        "over_plain": speedup, "bound_over_plain": bound, "of_bound": speedup / bound, "t1_ms": 1e3 * one,
        "tn_and_draft_ms": 1e3 * drafted,
        "overhead": 1 - total(runs, "model_s") / sum(total(runs, part) for part in ("draft_s", "verify_s", "other_s")),
    }  # fmt: skip


if __name__ == "__main__":
    main()
