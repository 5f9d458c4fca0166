"""Rebuild the demo's two models from the standard library's source: `python scripts/make_demo.py WORK`.

Six stages, each of which leaves files in WORK and is skipped if they exist; `target` and `small_model` also resume from
their last checkpoint after an interruption.

    corpus       tokenizer (byte-level BPE, Qwen2's pre-tokenizer), token ids of the training and the held-out modules
    target       16 layers x 256, trained on the training modules: bf16 weights, float32 masters; Muon for the matrices
                 (half the steps that AdamW needs here), AdamW for embedding and norms
    steady       the target taught not to loop: it continues training code greedily, and tokens that complete an 8-gram
                 it has already written are made unlikely (unlikelihood training, arXiv 1908.04319), alongside ordinary
                 training; then a mean of the weights before and after, which keeps most of both gains
    text         the target's own continuations of pieces of the training modules
    small_model  2 layers x 128, trained on that text against the target's own distribution
    package      both models, the tokenizer and the model card into outrider/demo/
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from outrider import demo, machine  # noqa: E402  (a script beside the package, run without an install too)
from outrider.targets.hf.anatomy import cache_argument  # noqa: E402

VOCABULARY = 4096
SPECIALS = ["<|endoftext|>", "<|pad|>", "<|mask|>", *(f"<|reserved_{i}|>" for i in range(13))]
END, PAD = 0, 1
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "<|endoftext|>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""Deliberately plain: the target only continues text, so a turn is its content and an answer ends with end-of-text."""

SHAPES = {
    "target": dict(
        hidden_size=256,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=704,
    ),
    "small_model": dict(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=320,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="where tokens, checkpoints and logs go")
    parser.add_argument("--stages", default="corpus,target,steady,text,small_model,package")
    parser.add_argument("--passes", type=float, default=2.7, help="passes over the training modules")
    parser.add_argument("--steady-steps", type=int, default=150)
    parser.add_argument("--steady-lr", type=float, default=4e-4)
    parser.add_argument(
        "--steady-share", type=float, default=0.55, help="weight of the model after, in the mean with that before"
    )
    parser.add_argument("--small-passes", type=float, default=6.0, help="passes of small_model over the target's text")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256, help="window; the last twentieth of training uses 2048")
    parser.add_argument("--text-tokens", type=int, default=1_500_000, help="size of the target's own text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for stage in options.stages.split(","):
        print(f"── {stage}", flush=True)
        {f.__name__: f for f in (corpus, target, steady, text, small_model, package)}[stage](options)


# ── corpus ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def corpus(options: argparse.Namespace) -> None:
    """Train the tokenizer on the training modules and write every module's ids, each followed by end-of-text."""
    if (options.work / "held_out.npy").exists():
        return
    tokenizer = make_tokenizer(module.text for module in demo.modules("train"))
    tokenizer.save_pretrained(options.work / "tokenizer")
    for split in ("train", "held_out"):
        documents = [[*tokenizer.encode(module.text), END] for module in demo.modules(split)]
        ids = np.array([token for document in documents for token in document], dtype=np.uint16)
        np.save(options.work / f"{split}.npy", ids)
        print(f"{split}: {len(documents)} modules, {len(ids):,} tokens")
    text = "".join(module.text for module in demo.modules("train"))
    facts = {"python": platform.python_version(), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}
    (options.work / "corpus.json").write_text(json.dumps(facts))


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[END],
        pad_token=SPECIALS[PAD],
        mask_token=SPECIALS[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def new_model(shape: str) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
            **SHAPES[shape],
        )
    )


def windows(ids: np.ndarray, length: int, rows: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [rows, length + 1]; each pass cuts the ids at a different offset and shuffles the pieces."""
    passes = 0
    while True:
        order = np.random.default_rng([seed, passes, length])
        offset = int(order.integers(length))
        starts = order.permutation(np.arange(offset, len(ids) - length - 1, length))
        for i in range(0, len(starts) - rows + 1, rows):
            yield torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts[i : i + rows]]).astype(np.int64))
        passes += 1


class Masters:
    """float32 copies of bf16 weights; the optimiser steps the copies and the weights follow."""

    def __init__(self, model: torch.nn.Module, options: argparse.Namespace):
        self.weights = list(model.parameters())
        self.masters = [w.detach().float().clone().requires_grad_() for w in self.weights]
        inner = [name.startswith("model.layers") and w.dim() == 2 for name, w in model.named_parameters()]
        matrices = [m for m, is_inner in zip(self.masters, inner, strict=True) if is_inner]
        others = [m for m, is_inner in zip(self.masters, inner, strict=True) if not is_inner]
        self.optimizers = [
            torch.optim.Muon(
                matrices, weight_decay=options.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def step(self, lr: float) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)

    def state(self) -> dict:
        return {"masters": self.masters, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    @torch.no_grad()
    def restore(self, state: dict) -> None:
        torch._foreach_copy_(self.masters, state["masters"])
        torch._foreach_copy_(self.weights, self.masters)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def fit(
    shape: str,
    model: Qwen3ForCausalLM,
    ids: np.ndarray,
    held_out: np.ndarray,
    passes: float,
    options: argparse.Namespace,
    teacher: Qwen3ForCausalLM | None = None,
) -> None:
    """Train `model`, writing WORK/<shape>/model.safetensors at the end; resumes from WORK/<shape>.checkpoint."""
    torch.manual_seed(options.seed)
    device, out = options.device, options.work / shape
    model = model.to(device, getattr(torch, machine.training_dtype(device))).train()
    masters = Masters(model, options)
    loss_of = batch_loss if options.no_compile else torch.compile(batch_loss, dynamic=False)
    steps = int(passes * len(ids) / options.step_tokens)
    checkpoint, log, first = options.work / f"{shape}.checkpoint", [], 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=device)
        masters.restore(saved["masters"])
        first, log = saved["step"], saved["log"]
        print(f"going on from step {first}")
    print(f"{steps} steps of {options.step_tokens} tokens on {device}", flush=True)
    began, source, length = time.time(), None, 0
    for step in range(first, steps):
        wanted = options.length if step < 0.95 * steps else 2048
        if source is None or wanted != length:
            length = wanted
            source = windows(ids, length, max(1, options.step_tokens // length), options.seed + 1000 * step)
        batch = next(source).to(device, non_blocking=True)
        loss = loss_of(model, batch[:, :-1], batch[:, 1:], teacher)
        loss.backward()
        warm, left = min(1.0, (step + 1) / 100), 1 - step / steps
        masters.step(options.lr * warm * max(0.02, left))
        every = max(1, steps // 30)
        if (step + 1) % every == 0 or step + 1 == steps:
            log.append([step + 1, round(loss.item(), 4), round(held_out_loss(model, held_out, device), 4)])
            rate = (step + 1 - first) * options.step_tokens / (time.time() - began)
            print(
                f"step {step + 1:6d}  loss {log[-1][1]:.3f}  held out {log[-1][2]:.3f}  {rate:,.0f} tokens/s",
                flush=True,
            )
            part = checkpoint.with_suffix(".part")
            torch.save({"step": step + 1, "log": log, "masters": masters.state()}, part)
            part.replace(checkpoint)
    model.save_pretrained(out)
    facts = {
        "passes": passes,
        "steps": steps,
        "tokens": len(ids),
        "seconds": round(time.time() - began),
        "device": describe(device),
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "step_tokens": options.step_tokens,
        "length": options.length,
        "seed": options.seed,
        "log": log,
    }
    (options.work / f"{shape}.json").write_text(json.dumps(facts))
    print(f"held-out loss {log[-1][2]}")


def batch_loss(model: Qwen3ForCausalLM, inputs: Tensor, labels: Tensor, teacher: Qwen3ForCausalLM | None) -> Tensor:
    """Cross-entropy of the next token, or forward KL (up to a constant) against the teacher if there is one."""
    logits = model(inputs, use_cache=False).logits.float()
    if teacher is None:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    with torch.no_grad():
        p = teacher(inputs, use_cache=False).logits.float().softmax(-1)
    return -(p * logits.log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, ids: np.ndarray, device: str, length: int = 512) -> float:
    """Mean cross-entropy in nats over non-overlapping windows of `length`; at most 64 of them."""
    model.eval()
    rows = torch.from_numpy(ids[: (len(ids) - 1) // length * length + 1].astype(np.int64))
    inputs, labels = rows[:-1].view(-1, length), rows[1:].view(-1, length)
    pick = torch.linspace(0, len(inputs) - 1, min(64, len(inputs))).long()
    total = 0.0
    for i in pick.split(8):
        logits = model(inputs[i].to(device), use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), labels[i].flatten().to(device), reduction="sum").item()
    model.train()
    return total / (len(pick) * length)


def target(options: argparse.Namespace) -> None:
    if not (options.work / "target.json").exists():
        torch.manual_seed(options.seed)
        ids, held_out = (np.load(options.work / f"{split}.npy") for split in ("train", "held_out"))
        fit("target", new_model("target"), ids, held_out, options.passes, options)


# ── text generated by the target ──────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def write(model: Qwen3ForCausalLM, prompts: Tensor, new: int, temperature: float, seed: int) -> Tensor:
    """Continue every row of `prompts` [B, S] by `new` tokens.  Returns [B, S + new]; end-of-text does not stop a
    row."""
    from transformers import StaticCache

    noise = torch.Generator(prompts.device).manual_seed(seed)
    cache = StaticCache(model.config, max_cache_len=prompts.shape[1] + new)
    takes = cache_argument(inspect.signature(model.forward).parameters)
    rows, pieces = prompts, [prompts]
    for _ in range(new):
        logits = model(rows, **{takes: cache}, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if temperature:
            race = torch.empty_like(logits).exponential_(generator=noise)
            rows = (logits.div(temperature).softmax(-1) / race).argmax(-1, keepdim=True)
        else:
            rows = logits.argmax(-1, keepdim=True)
        pieces.append(rows)
    return torch.cat(pieces, 1)


def load(path: Path, device: str) -> Qwen3ForCausalLM:
    return (
        Qwen3ForCausalLM.from_pretrained(path, dtype=getattr(torch, machine.training_dtype(device))).to(device).eval()
    )


def pieces(ids: np.ndarray, count: int, length: int, seed: int) -> Tensor:
    starts = np.random.default_rng(seed).integers(0, len(ids) - length, count)
    return torch.from_numpy(np.stack([ids[s : s + length] for s in starts]).astype(np.int64))


def fresh_share(tokens: list[int], n: int = 8) -> float:
    """Share of n-grams that occur for the first time: 1 is no repetition, near 0 is a loop."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def samples(options: argparse.Namespace) -> None:
    """How often greedy text after held-out code falls into a loop, with samples."""
    model = load(options.work / "steady", options.device)
    prompt = pieces(np.load(options.work / "held_out.npy"), 128, 160, options.seed)
    out = write(model, prompt.to(options.device), 128, 0.0, 0)[:, prompt.shape[1] :].tolist()
    shares = [fresh_share(row) for row in out]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.work / "tokenizer")
    kept = sum(share >= 0.6 for share in shares)
    print(
        f"greedy after held-out code: {kept} of {len(shares)} continuations do not loop, mean share of fresh 8-grams "
        f"{sum(shares) / len(shares):.2f}"
    )
    shown = [
        {"prompt": tokenizer.decode(p), "text": tokenizer.decode(o), "fresh": round(s, 2)}
        for p, o, s in zip(prompt[:12].tolist(), out, shares, strict=False)
    ]
    (options.work / "samples.json").write_text(
        json.dumps({"kept": kept, "of": len(shares), "samples": shown}, indent=1)
    )


def repeats(rows: Tensor, start: int, n: int = 8) -> Tensor:
    """Which tokens of rows [B, S], from `start` on, complete an n-gram that occurred earlier in their row. [B, S]
    bool."""
    found = torch.zeros_like(rows, dtype=torch.bool)
    for b, row in enumerate(rows.tolist()):
        seen = set()
        for end in range(n, len(row) + 1):
            gram = tuple(row[end - n : end])
            found[b, end - 1] = gram in seen and end > start
            seen.add(gram)
    return found


def unlikelihood(model: Qwen3ForCausalLM, rows: Tensor, repeated: Tensor) -> Tensor:
    """-log(1 - p) of the repeated tokens, averaged over them."""
    logits = model(rows[:, :-1], use_cache=False).logits.float()
    p = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0].exp()
    weight = repeated[:, 1:].float()
    return (-(1 - p).clamp(min=1e-4).log() * weight).sum() / weight.sum().clamp(min=1)


def steady(options: argparse.Namespace) -> None:
    """Teach the target not to loop; from WORK/target to WORK/steady, resuming from WORK/steady.checkpoint."""
    if (options.work / "steady.json").exists():
        return
    torch.manual_seed(options.seed + 2)
    ids, held_out = (np.load(options.work / f"{split}.npy") for split in ("train", "held_out"))
    model = load(options.work / "target", options.device)
    masters = Masters(model, options)
    before = [weight.detach().float().clone() for weight in masters.masters]
    ordinary, unlikely = batch_loss, unlikelihood
    if not options.no_compile:
        ordinary, unlikely = torch.compile(batch_loss, dynamic=False), torch.compile(unlikelihood, dynamic=False)
    source = windows(ids, options.length, options.step_tokens // options.length, options.seed + 7)
    checkpoint, log, began, first = options.work / "steady.checkpoint", [], time.time(), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=options.device)
        masters.restore(saved["masters"])
        first, log = saved["step"], saved["log"]
    for step in range(first, options.steady_steps):
        model.eval()
        rows = write(model, pieces(ids, 32, 64, options.seed + 9000 + step).to(options.device), 80, 0.0, 0).clone()
        model.train()
        repeated = repeats(rows.cpu(), 64).to(options.device)
        batch = next(source).to(options.device)
        loss = ordinary(model, batch[:, :-1], batch[:, 1:], None)
        loss.backward()
        unlikely(model, rows, repeated).backward()
        masters.step(options.steady_lr * min(1, (step + 1) / 20) * max(0.05, 1 - step / options.steady_steps))
        share = repeated[:, 64:].float().mean().item()
        if (step + 1) % 10 == 0 or step + 1 == options.steady_steps:
            log.append(
                [
                    step + 1,
                    round(loss.item(), 4),
                    round(held_out_loss(model, held_out, options.device), 4),
                    round(share, 3),
                ]
            )
            print(
                f"step {step + 1}: loss, held out, share of repeated tokens {log[-1][1:]}, {time.time() - began:.0f} s",
                flush=True,
            )
            torch.save({"step": step + 1, "log": log, "masters": masters.state()}, checkpoint)
    with torch.no_grad():
        torch._foreach_lerp_(before, masters.masters, options.steady_share)
        torch._foreach_copy_(masters.weights, before)
    log.append([options.steady_steps, None, round(held_out_loss(model, held_out, options.device), 4), None])
    model.save_pretrained(options.work / "steady")
    facts = {
        "steps": options.steady_steps,
        "lr": options.steady_lr,
        "share": options.steady_share,
        "seconds": round(time.time() - began),
    }
    (options.work / "steady.json").write_text(json.dumps(facts | {"log": log}))
    samples(options)


def text(options: argparse.Namespace) -> None:
    """The target's own text after pieces of the training modules, half at temperature 1 and half greedy."""
    if (options.work / "text.npy").exists():
        return
    model, ids = load(options.work / "steady", options.device), np.load(options.work / "train.npy")
    prompt, new, rows = 96, 160, 1024 if options.device == "cuda" else 64
    parts = sorted(options.work.glob("text-*.npy"))
    batches = math.ceil(options.text_tokens / (rows * (prompt + new)))
    for i in range(len(parts), batches):
        out = write(model, pieces(ids, rows, prompt, options.seed + i).to(options.device), new, float(i % 2 == 0), i)
        np.save(options.work / f"text-{i:05d}.npy", out.cpu().numpy().astype(np.uint16))
        print(f"{i + 1} of {batches}", flush=True)
    parts = sorted(options.work.glob("text-*.npy"))
    np.save(options.work / "text.npy", np.concatenate([np.load(part) for part in parts]).reshape(-1))


def small_model(options: argparse.Namespace) -> None:
    if (options.work / "small_model.json").exists():
        return
    torch.manual_seed(options.seed + 1)
    ids, held_out = (np.load(options.work / f"{name}.npy") for name in ("text", "held_out"))
    teacher = load(options.work / "steady", options.device)
    fit("small_model", new_model("small_model"), ids, held_out, options.small_passes, options, teacher)


# ── package ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def describe(device: str) -> str:
    return (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )


def package(options: argparse.Namespace) -> None:
    """Copy models and tokenizer into the package and write the model card."""
    for made, folder in (("steady", demo.TARGET), ("small_model", demo.SMALL_MODEL)):
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.bfloat16() for name, w in load_file(options.work / made / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for name in ("config.json", "generation_config.json"):
            (folder / name).write_text((options.work / made / name).read_text())
        for path in (options.work / "tokenizer").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    facts = {stage: json.loads((options.work / f"{stage}.json").read_text()) for stage in (*SHAPES, "steady")}
    (demo.TARGET.parent / "MODEL_CARD.md").write_text(
        card(facts, json.loads((options.work / "samples.json").read_text()), options)
    )
    size = sum(path.stat().st_size for path in demo.TARGET.parent.rglob("*") if path.is_file())
    print(f"wrote {demo.TARGET.parent}, {size / 1e6:.1f} MB")


def card(facts: dict, loops: dict, options: argparse.Namespace) -> str:
    """The model card: scripts/model_card.md filled in with the figures of this build."""
    values = json.loads((options.work / "corpus.json").read_text())
    values |= {"held_out": ", ".join(sorted(demo.HELD_OUT)), "kept": loops["kept"], "of": loops["of"]}
    for shape, found in facts.items():
        rows = ["| " + " | ".join(str(value) for value in row) + " |" for row in found["log"]]
        values[f"{shape}_curve"] = "\n".join(rows)
        values[f"{shape}_settings"] = ", ".join(f"{key} {value}" for key, value in found.items() if key != "log")
        values[f"{shape}_loss"] = found["log"][-1][2]
    text = (Path(__file__).parent / "model_card.md").read_text()
    for key, value in values.items():
        text = text.replace("{" + key + "}", str(value))
    return text


if __name__ == "__main__":
    main()
