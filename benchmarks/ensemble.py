"""Speculation over plain ensembling on the demo's models: tokens per step, speed, and where members disagree.

    python benchmarks/ensemble.py [--members demo,small] [--weights 0.7,0.3] [--prompts 16] [--tokens 64] [--out FILE]

Members are `demo`, `small` (the small model that ships with it) or folders of the same tokenizer.  Every prompt is
continued at temperature 0 and 1 by every way in turn: the ensemble without drafts, with its last member drafting (SAFE:
a member of the ensemble drafts), with n-grams, and the first member alone.  Speeds are ratios to the ensemble without
drafts, over the same prompts; intervals are 95 % bootstraps over prompts.  All steps are plain ones.

`other_tokenizers`: byte-level BPE of other sizes, trained on the demo's training modules, reads beside the demo target.
Which positions are ensembled does not depend on a reader's weights, so that its model is random and its weight near 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from batch_time import prompts_of, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from outrider import demo, load_drafter, load_target
from outrider.decoding.state import Request
from outrider.drafters import small_model
from outrider.lab.targets.ensemble import EnsembleTarget, Shares
from outrider.measure.record import Run
from outrider.measure.timing import run_once
from outrider.report.bootstrap import ratio_of_rates, ratio_of_totals
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

SHIPPED = {"demo": "demo", "small": str(demo.SMALL_MODEL)}
SIZES = (512, 2048, 8192)
"""Of other tokenizers; the demo's has 4,096 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="demo,small")
    parser.add_argument("--weights", default="0.7,0.3")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a prompt")
    parser.add_argument("--length", type=int, default=4, help="drafted tokens of a step")
    parser.add_argument("--no-tokenizers", action="store_true", help="leave out `other_tokenizers`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    members = [load_target(SHIPPED.get(name, name), compile=False) for name in options.members.split(",")]
    weights = [float(weight) for weight in options.weights.split(",")]
    ensemble = EnsembleTarget(members, weights)
    prompts = prompts_of(members[0], options.prompts)
    found = {
        "members": [member.spec.name for member in members], "parameters": [member.parameters for member in members],
        "weights": ensemble.weights, "prompts": len(prompts), "tokens": options.tokens, "length": options.length,
        "rows": [row for t in (0.0, 1.0) for row in measured(ensemble, prompts, options, t)],
        "shares": shares_of(ensemble, prompts, options.tokens),
    }  # fmt: skip
    if not options.no_tokenizers:
        few = prompts[: max(1, len(prompts) // 2)]
        found["other_tokenizers"] = [other_tokenizer(members[0], size, few, options.tokens) for size in SIZES]
    write(found, options.out)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(
    ensemble: EnsembleTarget, prompts: Sequence[list[int]], options: argparse.Namespace, temperature: float
) -> list[dict[str, Any]]:
    """A row for every way, over the same prompts."""
    first, last = ensemble.members[0], ensemble.members[-1]
    member = small_model.SmallModel(last, small_model.Config(length=options.length))
    ways: dict[str, tuple[Any, Any]] = {
        "ensemble": (ensemble, None), "its last member drafts": (ensemble, member),
        "ngram drafts": (ensemble, load_drafter("ngram", ensemble, length=options.length)),
        "first member alone": (first, None),
    }  # fmt: skip
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    began = time.perf_counter()
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first warms up
        for name, (target, drafter) in ways.items():
            sampling = Sampling(temperature, seed=number if temperature else None)
            run = run_once(target, Request(prompt, options.tokens, sampling), drafter, ends=False)
            if number:
                runs[name].append(run)
        if number == 0:
            seconds = (time.perf_counter() - began) * len(prompts)
            say(f"temperature {temperature:g}: {len(prompts)} prompts, about {seconds:.0f} s")
    plain = runs["ensemble"]
    rows = []
    for name, own in runs.items():
        per_step = ratio_of_totals([len(run.tokens) for run in own], [run.steps for run in own])
        both = zip(own, plain, strict=True)
        speed = ratio_of_rates([(len(a.tokens), a.seconds, len(b.tokens), b.seconds) for a, b in both])
        texts = zip(own, plain, strict=True)
        rows.append({
            "way": name, "temperature": temperature, "tokens_per_step": per_step._asdict(),
            "over_ensemble": speed._asdict(), "seconds": sum(run.seconds for run in own),
            "equal_texts": sum(a.tokens == b.tokens for a, b in texts),
        })  # fmt: skip
        say(f"  {name}: {per_step.center:.2f} tokens per step, {speed.center:.2f} times the ensemble's speed")
    return rows


def shares_of(target: EnsembleTarget, prompts: Sequence[list[int]], tokens: int) -> dict[str, int]:
    """Counts over the greedy texts of these prompts."""
    target.shares = Shares()
    for prompt in prompts:
        run_once(target, Request(prompt, tokens, Sampling()), ends=False)
    counts = target.shares
    say(f"  {counts}")
    return {name: value for name, value in vars(counts).items() if isinstance(value, int)}


def other_tokenizer(first: TransformersTarget, size: int, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """What is ensembled where another tokenizer reads, and the seconds that alignment takes beside the passes."""
    with tempfile.TemporaryDirectory() as folder:
        bpe(size).save_pretrained(folder)
        config = Qwen3Config(
            vocab_size=size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, eos_token_id=None, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        reader = load_target(folder, compile=False)
    target = EnsembleTarget([first, reader], (1.0, 1e-9))
    counts = shares_of(target, prompts, tokens)
    drafter = load_drafter("ngram", target)
    texts = [
        [run_once(target, Request(p, tokens, Sampling()), own, ends=False).tokens for p in prompts]
        for own in (None, drafter)
    ]
    member = target._others[0][0]
    return {
        "tokenizer": size, "shared_tokens": member.shared.count, "of": first.spec.vocabulary,
        "positions": counts["positions"], "ensembled": counts["ensembled"],
        "equal_texts": sum(a == b for a, b in zip(*texts, strict=True)), "texts": len(prompts),
    }  # fmt: skip


def bpe(size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((module.text for module in demo.modules("train")), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


if __name__ == "__main__":
    main()
