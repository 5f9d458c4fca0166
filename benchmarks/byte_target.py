"""A small target of bytes and patches, trained from scratch on the demo's text, and what its drafters read of memory.

    python benchmarks/byte_target.py [--steps 900] [--patch 4.5]         # writes runs/demo-bytes/target
    python benchmarks/byte_target.py --measure --out benchmarks/results/byte_target.json

The folder loads like any other target (`outrider decode "import os" --target runs/demo-bytes/target`).  The text is the
standard library's, without the modules that the demo holds out.  First the patcher learns next bytes, and its threshold
is set so that patches have `--patch` bytes on average; then the rest learns next bytes and, in the same passes, to fill
blocks of masks (Fast BLT, arXiv 2605.08044).

`--measure` writes held-out prompts one at a time, and counts passes of the local layers, the patcher and the global
model.  Traffic is the bytes of weights that these passes read per byte of text, over those of plain decoding; keys and
values are left out.  Intervals are 95 %, from a bootstrap over prompts.  BLT-D keeps whole blocks, so its distance from
the target's distribution is measured too, and how many nats per byte the target gives its text.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.batch_time import write  # noqa: E402  (a script beside the package, run without an install too)
from outrider import demo, generate, load_target  # noqa: E402
from outrider.lab.drafters import patch_diffusion, stale_latent  # noqa: E402
from outrider.lab.judges.scorer import scorer  # noqa: E402
from outrider.lab.targets import byte_model  # noqa: E402
from outrider.policies.lossy import LossyJudge  # noqa: E402
from outrider.sampling.judge import SamplingJudge  # noqa: E402
from outrider.training.optimizers import Optimizers  # noqa: E402

END, MASK = range(256, 258)
BATCH, LENGTH, ANCHORS, BLOCK = 8, 384, 12, 16
SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 128, "num_attention_heads": 4, "patcher_hidden_size": 48,
    "patcher_intermediate_size": 128, "global_hidden_size": 192, "global_layers": 4, "global_intermediate_size": 576,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-bytes"))
    parser.add_argument("--steps", type=int, default=900, help=f"of {BATCH} texts of {LENGTH} bytes")
    parser.add_argument("--patch", type=float, default=4.5, help="bytes of a patch, on average")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="of ByteConfig")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=128, help="bytes a prompt")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        write(measured(options), options.out)
    else:
        make(options)


def make(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    sizes = SIZES | {name: int(value) for name, value in (one.split("=") for one in options.set)}
    model = byte_model.ByteModel(byte_model.ByteConfig(eos_token_id=END, **sizes))
    text, held_out = text_of("train"), text_of("held_out")
    train_patcher(model, text, options)
    model = train(model, text, held_out, options)
    model.generation_config = GenerationConfig(eos_token_id=END)
    model.save_pretrained(options.folder / "target")
    byte_model.tokenizer().save_pretrained(options.folder / "target")
    print(f"{options.folder / 'target'} is written")


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def text_of(split: demo.Split) -> Tensor:
    """All modules of a split as ids, each followed by an end token."""
    parts = [[*module.text.encode(), END] for module in demo.modules(split)]
    return torch.tensor([byte for part in parts for byte in part], dtype=torch.int16)


def windows(text: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """Rows [B, S + 1] of every step."""
    noise = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=noise)
        yield text[starts + torch.arange(LENGTH + 1)].long()


def patcher_logits(model: Any, rows: Tensor) -> Tensor:
    at = torch.arange(rows.shape[1])
    mask = (at <= at[:, None]) & (at > at[:, None] - model.config.window_size)
    logits: Tensor = model.model.patcher(rows, mask[None], at.expand(len(rows), -1))
    return logits


def train_patcher(model: Any, text: Tensor, options: argparse.Namespace) -> None:
    """Cross entropy of the next byte; then the threshold that gives patches their size, and no more training."""
    patcher, steps = model.model.patcher, options.steps // 2
    optimizer = Optimizers(patcher, "muon", model.config.vocab_size, 0.1)
    for step, rows in enumerate(windows(text, steps, options.seed + 1)):
        loss = F.cross_entropy(patcher_logits(model, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimise(patcher, optimizer, loss, options.lr, step, steps)
    patcher.requires_grad_(False)
    rows = torch.cat(list(windows(text, 8, options.seed + 2)))
    found = byte_model.entropies(patcher_logits(model, rows)).flatten().quantile(1 - 1 / options.patch)
    patcher.threshold = model.config.entropy_threshold = float(found)
    print(f"patcher: {float(loss.detach()) / math.log(2):.3f} bits per byte; threshold {float(found):.3f}", flush=True)


def train(model: Any, text: Tensor, held_out: Tensor, options: argparse.Namespace) -> Any:
    """Cross entropy of the next byte and of masked bytes; returns the trained model."""
    counts = {name: weights / 1e6 for name, weights in weights_of(model).items()}
    print(f"M weights: {counts}; {options.steps} steps", flush=True)
    config = patch_diffusion.Config(block=BLOCK, anchors=ANCHORS, mask_token=MASK)
    blocks = patch_diffusion.TargetModel(config, load_target(model, compile=False)).train()
    blocks.lm.model.patcher.requires_grad_(False)
    optimizer = Optimizers(blocks.lm, "muon", model.config.vocab_size, 0.1)
    for step, rows in enumerate(windows(text, options.steps, options.seed)):
        next_byte, masked = losses(blocks, rows)
        optimise(blocks.lm, optimizer, next_byte + masked, options.lr, step, options.steps)
        if (step + 1) % 50 == 0:
            bits = [float(one.detach()) / math.log(2) for one in (next_byte, masked)]
            print(step + 1, [round(each, 3) for each in (*bits, held_out_bits(blocks.lm, held_out))], flush=True)
    return blocks.lm


def losses(blocks: patch_diffusion.TargetModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of the next byte, and of masked bytes; of every second block all are masked, of the others a share."""
    at = torch.rand(len(rows), LENGTH - BLOCK - 2).topk(ANCHORS, 1).indices.sort(1).values
    chance = torch.rand(*at.shape, BLOCK)
    masked = (chance < 2 * torch.rand(*at.shape, 1)) | (chance == chance.amin(-1, keepdim=True))
    logits = blocks.logits(blocks.read(rows, torch.ones_like(rows), at, masked)).float()
    labels = rows.gather(1, (at[..., None] + 2 + torch.arange(BLOCK)).flatten(1))
    text, block = logits[:, :LENGTH], logits[:, LENGTH + 1 :]
    return F.cross_entropy(text.flatten(0, 1), rows[:, 1:].flatten()), F.cross_entropy(
        block[masked.flatten(1)], labels[masked.flatten(1)]
    )


def optimise(module: Any, optimizer: Optimizers, loss: Tensor, lr: float, step: int, steps: int) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step(lr * min(1.0, 10 * (step + 1) / steps) * max(0.02, 1 - step / steps))
    optimizer.zero_grad()


@torch.no_grad()
def held_out_bits(model: Any, text: Tensor, count: int = 16) -> float:
    """Bits per byte over windows spread evenly over a text."""
    starts = torch.linspace(0, len(text) - LENGTH - 1, count).long()[:, None]
    rows = text[starts + torch.arange(LENGTH + 1)].long()
    logits = model(rows[:, :-1], use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())) / math.log(2)


# ── memory traffic ────────────────────────────────────────────────────────────────────────────────────────────────────


def weights_of(model: Any) -> dict[str, int]:
    """Weights that a pass of each part reads: all but embeddings, of which it reads rows."""
    trunk = model.model
    to_latents = [across.kv for across in trunk.to_patches]  # of latents, which are 0 but where a patch ends
    parts = {
        "global": [trunk.global_model, *to_latents], "patcher": [trunk.patcher.layers, trunk.patcher.head],
        "local": [trunk.layers, trunk.to_bytes, trunk.to_patches, trunk.norm, model.lm_head],
    }  # fmt: skip
    counts = {name: sum(w.numel() for part in modules for w in part.parameters()) for name, modules in parts.items()}
    counts["local"] -= sum(w.numel() for part in to_latents for w in part.parameters())
    return counts


def ways(target: Any) -> Iterator[tuple[str, Any, SamplingJudge]]:
    """What is measured: name, drafter and judge."""
    yield "plain", None, SamplingJudge()
    for length in (4, 8, 16):
        yield (
            f"S, {length} bytes",
            stale_latent.StaleLatent(target, stale_latent.Config(length=length)),
            SamplingJudge(),
        )
    for block, steps in ((4, 1), (8, 1), (16, 1), (8, 2), (16, 4)):
        config = patch_diffusion.Config(block=block, steps=steps, mask_token=MASK)
        drafter = patch_diffusion.PatchDiffusion(target, config)
        yield f"DV, {block} bytes in {steps}", drafter, SamplingJudge()
        yield f"D, {block} bytes in {steps}", drafter, LossyJudge(scorer(-math.inf, "mean", block, 0))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    target: Any = load_target(options.folder / "target", compile=False)
    model, held_out = target.model, text_of("held_out")
    prompts = [list(text.encode()) for _, text in demo.prompts("held_out", options.prompts, characters=300)]
    parts, rows, counts = weights_of(model), list[dict[str, Any]](), Counter[str]()
    first = {"local": model.model.layers[0], "patcher": model.model.patcher.layers[0],
             "global": model.model.global_model.layers[0]}  # fmt: skip
    for name, module in first.items():
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    for temperature in (0.0, 1.0):
        plain: list[float] = []
        for way, drafter, judge in ways(target):
            written, traffic, steps = list[list[int]](), list[float](), 0
            for seed, prompt in enumerate(prompts):
                counts.clear()
                [text] = generate(
                    target, [prompt], drafter, max_new_tokens=options.new, temperature=temperature, seed=seed,
                    policy="fixed", verification=judge,
                )  # fmt: skip
                written.append(text.tokens)
                traffic.append(sum(counts[part] * parts[part] for part in parts))
                steps += text.steps
            plain = plain or [read / len(text) for read, text in zip(traffic, written, strict=True)]
            is_lossy = isinstance(judge, LossyJudge)
            rows.append({
                "way": way, "temperature": temperature, "bytes_per_step": sum(map(len, written)) / steps,
                **ratio(traffic, list(map(len, written)), plain), "nats": nats(model, prompts, written),
                "distance": judge.distance if is_lossy else 0.0,  # type: ignore[attr-defined]
            })  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    entropies = byte_model.entropies(patcher_logits(model, held_out[: 2**15].long().view(-1, 512)))
    return {
        "weights": parts, "bytes_per_patch": 1 / float((entropies > model.config.entropy_threshold).double().mean()),
        "held_out_bits": held_out_bits(model, held_out, 64), "prompts": len(prompts), "rows": rows,
    }  # fmt: skip


def ratio(traffic: Sequence[float], lengths: Sequence[int], plain: Sequence[float]) -> dict[str, float]:
    """Traffic per byte over plain's, prompt by prompt."""
    ratios = [read / length / base for read, length, base in zip(traffic, lengths, plain, strict=True)]
    noise = random.Random(0)
    drawn = sorted(statistics.mean(noise.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"traffic": statistics.mean(ratios), "low": drawn[50], "high": drawn[-51]}


@torch.no_grad()
def nats(model: Any, prompts: Sequence[list[int]], written: Sequence[list[int]]) -> float:
    """The target's, per byte of these texts."""
    total = 0.0
    for prompt, text in zip(prompts, written, strict=True):
        logits = model(torch.tensor([prompt + text])[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        total += float(F.cross_entropy(logits.float(), torch.tensor(text), reduction="sum"))
    return total / sum(map(len, written))


if __name__ == "__main__":
    main()
