"""A small target of bytes and patches, trained from scratch on the demo's text: `python benchmarks/byte_target.py`.

Writes runs/demo-bytes/target, which loads like any other target (`outrider decode "import os" --target
runs/demo-bytes/target`).  The text is the standard library's, without the modules that the demo holds out.  Prints the
expected duration after a few steps, and resumes from its last checkpoint if it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from outrider import demo  # noqa: E402  (a script beside the package, run without an install too)
from outrider.lab import byte_patches  # noqa: E402
from outrider.lab.targets import byte_model  # noqa: E402
from outrider.training.optimizers import Optimizers, pack, unpack  # noqa: E402

END, MASK = range(256, 258)
EVERY = 50
"""Steps between checkpoints."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-bytes"), help="where target and checkpoint go")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8, help="texts a step")
    parser.add_argument("--length", type=int, default=512, help="bytes of a text")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="of ByteConfig")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    sizes = {name: int(value) for name, value in (one.split("=") for one in options.set)}
    model = byte_model.ByteModel(byte_model.ByteConfig(eos_token_id=END, **sizes))
    train(model, options)
    model.generation_config = GenerationConfig(eos_token_id=END)
    model.save_pretrained(options.out / "target")
    byte_model.tokenizer().save_pretrained(options.out / "target")
    print(f"{options.out / 'target'} is written")


def text_of(split: demo.Split) -> Tensor:
    """All modules of a split as ids, each followed by an end token."""
    parts = [[*module.text.encode(), END] for module in demo.modules(split)]
    return torch.tensor([byte for part in parts for byte in part], dtype=torch.int16)


def train(model: byte_model.ByteModel, options: argparse.Namespace) -> None:
    """Cross entropy of the next byte, on windows chosen by the step number."""
    text, held_out = text_of("train"), text_of("held_out")
    share = float(patch_ends(held_out[: 2**16].long()[None], model.config.patch_size).double().mean())
    counts = {name: sum(w.numel() for w in part.parameters()) for name, part in parts_of(model).items()}
    words = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in counts.items())
    print(f"weights: {words}; {len(text):,} bytes of text, {1 / share:.2f} a patch; {options.steps} steps", flush=True)
    optimizer = Optimizers(model, "muon", model.config.vocab_size, 0.1)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint, first, began = options.out / "training.pt", 0, time.time()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        unpack(saved["optimizer"], model, optimizer)
        first = saved["step"]
        print(f"going on from step {first}")
    log = options.out / "training.jsonl"
    for step in range(first, options.steps):
        noise = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - options.length - 1, (options.batch, 1), generator=noise)
        rows = text[starts + torch.arange(options.length + 1)].long()
        loss = next_byte(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(options.lr * min(1.0, 10 * (step + 1) / options.steps) * max(0.02, 1 - step / options.steps))
        optimizer.zero_grad()
        done = step + 1 - first
        if done == 10:
            minutes = (time.time() - began) / done * (options.steps - step - 1) / 60
            print(f"about {minutes:.0f} minutes to go", flush=True)
        if (step + 1) % EVERY == 0 or step + 1 == options.steps:
            row = {
                "step": step + 1, "bits": round(float(loss.detach()) / math.log(2), 3),
                "held_out_bits": round(bits(model, held_out, options.length), 3), "seconds": round(time.time() - began),
            }  # fmt: skip
            print(row, flush=True)
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            torch.save({"model": model.state_dict(), "optimizer": pack(model, optimizer), "step": step + 1}, checkpoint)


def next_byte(model: byte_model.ByteModel, rows: Tensor) -> Tensor:
    """Cross entropy in nats of rows [B, S + 1]."""
    logits = model(rows[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def bits(model: byte_model.ByteModel, text: Tensor, length: int) -> float:
    """Bits per byte over 16 windows spread evenly over a text."""
    starts = torch.linspace(0, len(text) - length - 1, 16).long()[:, None]
    return float(next_byte(model, text[starts + torch.arange(length + 1)].long())) / math.log(2)


def patch_ends(ids: Tensor, size: int) -> Tensor:
    """Which bytes [1, S] of a text end a patch, chunk by chunk, since the mask of a long text would be large."""
    found = []
    for part in ids.split(512, 1):
        positions = torch.arange(part.shape[1])[None]
        words = byte_patches.of_words(part)
        causal = torch.ones(1, part.shape[1], part.shape[1], dtype=torch.bool).tril()
        known = byte_patches.Known(causal, positions, words)
        found.append(known.ends(positions, words, size))
    return torch.cat(found, 1)


def parts_of(model: byte_model.ByteModel) -> dict[str, torch.nn.Module]:
    """The global model, and the parts that every byte goes through."""
    trunk = model.model
    return {
        "global": trunk.global_model,
        "local": torch.nn.ModuleList([trunk.embed_tokens, trunk.layers, trunk.norm, model.lm_head]),
    }


if __name__ == "__main__":
    main()
