"""Targets trained with hashed n-gram embeddings and without: bits per byte at equal compute and equal weights.

    python benchmarks/ngram_target.py [--arms 'words;tables'] [--seeds 0,1,2] [--steps 400] [--out FILE]

Small models of the demo's tokenizer, trained from scratch on the standard library's source and measured on the modules
that the demo holds out.  Every arm but `words` has the same number of weights, and every arm the same number of
multiplications: steps follow from the weights that a token is multiplied with, `--steps` is what `words` makes.  All
arms of a seed read the same windows in the same order.  Differences are from the arm they name, with 95 % intervals
from a bootstrap over seeds and, within them, windows.

`collisions` is how often two different pairs of tokens of the text meet in one row, over what an even hash would give,
by rows per word of the vocabulary.  A run that is there (`--runs`) is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as MoeForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.batch_time import write  # noqa: E402
from outrider import demo  # noqa: E402
from outrider.lab.targets.ngram_embedding import NgramEmbeddingConfig, NgramEmbeddingForCausalLM, NgramHashes  # noqa: E402
from outrider.training.optimizers import Optimizers  # noqa: E402

WORDS = 4096
HIDDEN, EXPERT, CHOSEN, ROW = 128, 192, 2, 32
LENGTH, BATCH, WINDOWS = 256, 4, 96
NEAR, AWAY = 3.0, 2.62
"""Rows of a table per word: sizes just above a multiple of the vocabulary, and between two."""


class Arm(NamedTuple):
    layers: int
    experts: int = 0
    """Per layer; two of them are as large as the MLP of a layer without."""
    splits: int = 0
    """Tables of either order, 2 and 3."""
    ratio: float = AWAY


ARMS = {
    "words": Arm(4), "deeper": Arm(11), "experts": Arm(4, experts=7), "tables": Arm(4, splits=2),
    "tables, near a multiple": Arm(4, splits=2, ratio=NEAR), "experts and tables": Arm(4, experts=4, splits=1),
    "fewer layers, tables": Arm(2, splits=2, ratio=3.45),
}  # fmt: skip
PAIRS = (
    ("tables", "words"), ("tables", "deeper"), ("tables", "experts"), ("tables", "tables, near a multiple"),
    ("experts and tables", "experts"), ("experts and tables", "tables"), ("fewer layers, tables", "tables"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=";".join(ARMS))
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help=f"of `words`, of {BATCH * LENGTH} tokens each")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--runs", type=Path, default=Path("runs/ngram_target"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    text, held_out, sizes = ids(options.runs, "train"), ids(options.runs, "held_out"), byte_lengths()
    budget, results = options.steps * multiplied(model_of(ARMS["words"])), dict[str, dict[int, Any]]()
    for seed in options.seeds:
        for name in options.arms.split(";"):
            file = options.runs / f"{name.replace(', ', '-').replace(' ', '-')}-{options.steps}-{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(trained(ARMS[name], seed, budget, text, held_out, sizes, options.lr)))
            results.setdefault(name, {})[seed] = json.loads(file.read_text())
            print(name, seed, round(bits_of(results[name][seed]["windows"]), 4), file=sys.stderr, flush=True)
    rows = [row(name, by_seed) for name, by_seed in results.items()]
    differences = [difference(*pair, results) for pair in PAIRS if set(pair) <= results.keys()]
    write({"rows": rows, "differences": differences, "collisions": collisions(text[: 2**20])}, options.out)


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ids(folder: Path, split: demo.Split) -> Tensor:
    """All modules of a split as tokens; encoded once."""
    if not (file := folder / f"{split}.pt").exists():
        tokenizer = AutoTokenizer.from_pretrained(demo.TARGET)
        parts = [[*tokenizer.encode(module.text), tokenizer.eos_token_id] for module in demo.modules(split)]
        torch.save(torch.tensor([token for part in parts for token in part], dtype=torch.int16), file)
    tokens: Tensor = torch.load(file, weights_only=True)
    return tokens


def byte_lengths() -> Tensor:
    """Bytes of every token."""
    tokenizer = AutoTokenizer.from_pretrained(demo.TARGET)
    return torch.tensor([len(token or "") for token in tokenizer.convert_ids_to_tokens(range(WORDS))])


# ── one run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def model_of(arm: Arm) -> PreTrainedModel:
    common: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": arm.layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": CHOSEN * EXPERT, "tie_word_embeddings": True,
        "max_position_embeddings": 2 * LENGTH, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    config: Any = Qwen3Config(**common)
    if arm.experts:
        sizes = {"num_experts": arm.experts, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": EXPERT}
        config = Qwen3MoeConfig(**common, **sizes, norm_topk_prob=True, output_router_logits=True)
    if arm.splits:
        rows = {"ngram_table_size": int(arm.ratio * WORDS), "ngram_dim": ROW}
        return NgramEmbeddingForCausalLM(NgramEmbeddingConfig(config, ngram_order=3, ngram_splits=arm.splits, **rows))
    return MoeForCausalLM(config) if arm.experts else Qwen3ForCausalLM(config)


def table_weights(model: PreTrainedModel) -> int:
    return sum(weight.numel() for name, weight in model.named_parameters() if "ngram_table" in name)


def multiplied(model: PreTrainedModel) -> float:
    """Weights that a token is multiplied with: all but tables and the experts that it does not choose."""
    count = 0.0
    for name, weight in model.named_parameters():
        if "ngram_table" not in name:
            count += weight.numel() * (CHOSEN / len(weight) if ".experts." in name else 1)
    return count


def trained(
    arm: Arm, seed: int, budget: float, text: Tensor, held_out: Tensor, sizes: Tensor, lr: float
) -> dict[str, Any]:
    """Train one model for a budget of multiplications, and measure it: nats and bytes of every held-out window."""
    torch.manual_seed(seed)
    model = model_of(arm).train()
    steps = round(budget / multiplied(model))
    optimizer = Optimizers(model, "adamw", WORDS, 0.1)
    order = torch.Generator().manual_seed(seed)
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=order)
        rows = text[starts + torch.arange(LENGTH + 1)].long()
        output = model(rows[:, :-1], use_cache=False)
        loss = F.cross_entropy(output.logits.flatten(0, 1), rows[:, 1:].flatten())
        if arm.experts:
            loss = loss + 0.01 * output.aux_loss  # else a few experts get all tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(lr * min(1.0, (step + 1) / 40) * max(0.02, 1 - step / steps))
        optimizer.zero_grad()
    weights, tables = sum(weight.numel() for weight in model.parameters()), table_weights(model)
    facts = {"weights": weights, "in_tables": tables / weights, "multiplied": multiplied(model), "steps": steps}
    return facts | {"windows": measured(model.eval(), held_out, sizes)}


@torch.no_grad()
def measured(model: PreTrainedModel, text: Tensor, sizes: Tensor) -> list[list[float]]:
    """Nats, tokens and bytes of windows spread evenly over a text."""
    starts = torch.linspace(0, len(text) - LENGTH - 1, WINDOWS).long()[:, None]
    windows = list[list[float]]()
    for rows in text[starts + torch.arange(LENGTH + 1)].long().split(8):
        logits, labels = model(rows[:, :-1], use_cache=False).logits, rows[:, 1:]
        nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).sum(1)
        windows += [[n, LENGTH, b] for n, b in zip(nats.tolist(), sizes[labels].sum(1).tolist(), strict=True)]
    return windows


# ── all runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def bits_of(windows: list[list[float]], unit: int = 2) -> float:
    """Bits per byte, or per token (unit 1)."""
    return sum(one[0] for one in windows) / sum(one[unit] for one in windows) / math.log(2)


def row(name: str, by_seed: dict[int, Any]) -> dict[str, Any]:
    runs = list(by_seed.values())
    per_byte = [bits_of(run["windows"]) for run in runs]
    return {
        "arm": name, "seeds": len(runs), **{key: value for key, value in runs[0].items() if key != "windows"},
        "bits_per_byte": statistics.mean(per_byte), "by_seed": per_byte,
        "bits_per_token": statistics.mean(bits_of(run["windows"], 1) for run in runs),
    }  # fmt: skip


def difference(one: str, other: str, results: dict[str, dict[int, Any]]) -> dict[str, Any]:
    """Bits per byte of one arm less another's, at the same seeds."""
    seeds = sorted(results[one].keys() & results[other].keys())

    def less(seed: int, at: Sequence[int]) -> float:
        bits = [bits_of([results[name][seed]["windows"][i] for i in at]) for name in (one, other)]
        return bits[0] - bits[1]

    noise, every = random.Random(0), range(WINDOWS)
    drawn = sorted(
        statistics.mean(less(seed, noise.choices(every, k=WINDOWS)) for seed in noise.choices(seeds, k=len(seeds)))
        for _ in range(2000)
    )
    center = statistics.mean(less(seed, every) for seed in seeds)
    return {
        "arm": one, "less": other, "seeds": len(seeds), "bits_per_byte": center, "low": drawn[50], "high": drawn[-51],
    }  # fmt: skip


def collisions(text: Tensor) -> list[dict[str, float]]:
    """How likely two different pairs of tokens, drawn from a text, share a row, over what an even hash would give."""
    pairs, counts = torch.stack([text[1:], text[:-1]], 1).long().unique(dim=0, return_counts=True)
    shares, rows = counts.double() / counts.sum(), list[dict[str, float]]()
    for eighths in range(8, 41):
        hashes = NgramHashes(WORDS, 2, 1, eighths * WORDS // 8)
        size = hashes.sizes[0]
        at = (pairs * torch.tensor(hashes.powers)[:, 0]).sum(1) % size
        together = torch.zeros(size, dtype=torch.double).index_add_(0, at, shares)
        meeting = float(together.square().sum() - shares.square().sum())
        rows.append({"per_word": eighths / 8, "over_even": meeting * size / (1 - float(shares.square().sum()))})
    return rows


if __name__ == "__main__":
    main()
