"""A small target with an n-gram embedding, trained from the demo's answers: does the embedding help, and is it exact?

    python benchmarks/ngram_embedding.py [--steps 300] [--seeds 0,1] [--prompts 12] [--tokens 64] [--out FILE]

Two language models of two layers learn the demo target's answers by KL, from equal random weights: one with the n-gram
embedding, which changes nothing at the beginning, and one without.  Beside each other: how far they agree with the
target on answers that did not train.  Then the first is a target itself, in runs/ngram_embedding/SEED/target: its
greedy texts, drafted by the other model in chains and trees and by `ngram`, are compared with its own, token for token.

A step takes about 0.3 s of one core for each model, and an evaluation as long as a hundred steps.  Prints JSON.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from batch_time import prompts_of, write

from outrider import generate, load_drafter, load_target
from outrider.data.answers.store import hold_out, read_answers
from outrider.data.features.live import LiveFeatures
from outrider.drafters import small_model
from outrider.lab.targets.ngram_embedding import grown
from outrider.targets.hf import causal_lm
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.progress import no_bars
from outrider.training.config import Config as TrainConfig
from outrider.training.progress.held_out import acceptance
from outrider.training.trainer import train

ROOT = Path(__file__).resolve().parent.parent
ANSWERS, RUNS = ROOT / "runs" / "demo-answers" / "answers.jsonl", ROOT / "runs" / "ngram_embedding"
SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 128, "intermediate": 384, "heads": 4, "kv_heads": 2, "head_dim": 32, "rope_theta": 10_000.0,
    "tied": False,
}  # fmt: skip
"""The models without their tables; the smaller of `methods.py`, about a tenth of the target."""
TABLES = {"ngram_order": 3, "ngram_splits": 2}
ROWS = 8
"""Rows of a table for each word of the vocabulary."""
WAYS = {"ngram-embedding": True, "plain": False}
HELD_OUT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not ANSWERS.exists():
        parser.error(f"no {ANSWERS}; run `outrider prepare recipes/demo.yaml` first")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    minutes = len(seeds) * 2 * (options.steps + 100) * 0.3 / 60
    say(f"{len(seeds)} seeds, two models each, {options.steps} steps a model: about {minutes:.0f} minutes of one core")
    target = load_target("demo", compile=False)
    found = [of_seed(target, seed, options) for seed in seeds]
    differ = sum(one["exactness"]["texts_that_differ"] for one in found)
    kept = [{"promise": "texts that differ from the target's own", "wanted": 0, "found": differ, "holds": not differ}]
    write({"promises": kept, "sizes": SIZES, "tables": TABLES | {"rows_per_word": ROWS}, "seeds": found}, options.out)


def of_seed(target: TransformersTarget, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    learnt, held_out = hold_out(read_answers(ANSWERS), HELD_OUT)
    source = LiveFeatures(target, learnt, (), batch=8, length=384, seed=seed)
    unseen = LiveFeatures(target, held_out, (), batch=8, length=384)
    models: dict[str, Any] = {}
    for name, has_tables in WAYS.items():
        folder = RUNS / str(seed) / name
        begin(target, folder / "begun", seed, has_tables)
        models[name] = fitted(target, source, unseen, folder, seed, options.steps)
    return {"seed": seed, "models": models, "exactness": compared(target, RUNS / str(seed), options)}


def begin(target: TransformersTarget, folder: Path, seed: int, has_tables: bool) -> None:
    """Write a random model, with a tokenizer."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    torch.manual_seed(seed)
    lm = causal_lm.untrained(causal_lm.qwen3(target, **SIZES))
    lm.generation_config.eos_token_id = sorted(target.ends)
    if has_tables:
        ends, rows = sorted(target.ends), ROWS * target.spec.vocabulary
        lm = grown(lm, **TABLES, ngram_table_size=rows, boundary_token_ids=ends)
    save(lm, folder, target)


def fitted(
    target: TransformersTarget, source: LiveFeatures, unseen: LiveFeatures, folder: Path, seed: int, steps: int
) -> dict[str, Any]:
    """Train one model with the ordinary trainer; the result is a target of its own."""
    began, losses = time.process_time(), []
    config = TrainConfig(
        steps=steps, batch=8, lr=8e-3, optimizer="muon", loss={"kl": 1.0}, seed=seed, save_every=steps, log_every=20,
        dtype="float32",
    )  # fmt: skip
    model = small_model.Model(small_model.Config(model=str(folder / "begun")), target)

    def logged(step: int, row: Any) -> None:
        losses.append(row["loss"])
        if step % 50 == 0:
            say(f"{folder.name}, seed {seed}: step {step} of {steps}, loss {row['loss']:.3f}")

    train(model, source, config, folder, on_step=logged)
    seconds = time.process_time() - began
    model.eval()
    save(model.lm, folder / "target", target)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()), "steps": steps,
        "cpu_seconds": round(seconds, 1), "held_out": acceptance(model, unseen), "loss_at_the_end": losses[-1],
    }  # fmt: skip


def save(lm: Any, folder: Path, target: TransformersTarget) -> None:
    with no_bars():
        lm.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


def compared(target: TransformersTarget, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy texts of the target with the n-gram embedding, with drafters and alone, in float64."""
    own = load_target(folder / "ngram-embedding" / "target", dtype="float64", compile=False)
    prompts = prompts_of(own, options.prompts)
    say(f"{own.spec.name}: mode {own.spec.mode}; {len(prompts)} prompts of {options.tokens} tokens by three drafters")
    alone = [one.tokens for one in generate(own, prompts, max_new_tokens=options.tokens)]
    model = str(folder / "plain" / "target")
    drafters = {
        "ngram": load_drafter("ngram", own),
        "the model without": load_drafter("small_model", own, model=model),
        "the same, in trees": load_drafter("small_model", own, model=model, width=3, nodes=7),
    }
    rows, differ = {}, 0
    for name, drafter in drafters.items():
        found = generate(own, prompts, drafter, max_new_tokens=options.tokens, policy="fixed")
        differ += sum(one.tokens != text for one, text in zip(found, alone, strict=True))
        rows[name] = sum(len(one.tokens) for one in found) / sum(one.steps for one in found)
    tokens = sum(map(len, alone))
    return {"mode": own.spec.mode, "tokens": tokens, "texts_that_differ": differ, "tokens_per_step": rows}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
