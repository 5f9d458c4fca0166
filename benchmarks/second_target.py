"""README's headlines on a target of another family: a mixture of experts, trained from nothing on the demo's text.

    python benchmarks/second_target.py [--work runs/second] [--passes 2] [--out benchmarks/results/second_target.json]

Eight experts a layer, two of which read a token; 10 million weights, the demo's tokenizer.  It is trained by
`scripts/make_demo.py`'s loop on the modules that the demo's target was trained on, at most an hour on two cores, and
goes on where it was stopped.  Then the two run files of `make demo` are run for it, unchanged but for the target,
whose layers have no MLP that a drafter could start from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import make_demo  # noqa: E402  (scripts, run without an install too)
from batch_time import write  # noqa: E402

import outrider  # noqa: E402
from outrider import demo  # noqa: E402
from outrider.report.schema import Report  # noqa: E402

SIZES = dict(
    hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=704, moe_intermediate_size=176, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
    norm_topk_prob=True, router_aux_loss_coef=0.0, tie_word_embeddings=True, max_position_embeddings=2048,
)  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--work", type=Path, default=Path("runs/second"), help="where target, runs and reports go")
    asked.add_argument("--passes", type=float, default=2.0, help="passes over the training modules")
    asked.add_argument("--lr", type=float, default=4e-3)
    asked.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both run files")
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    folder = trained(options)
    run("demo-dflash", folder, options)
    report = run("demo", folder, options)
    assert report is not None
    found = {"target": json.loads((options.work / "moe.json").read_text()), "rows": rows_of(report)}
    found["promises"] = promises(found["rows"])
    write(found, options.out)


def trained(options: argparse.Namespace) -> Path:
    """The folder of the target, trained unless it is there."""
    folder: Path = options.work / "moe"
    if (options.work / "moe.json").exists():
        return folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.TARGET)
    texts = {split: ids_of(split, tokenizer) for split in ("train", "held_out")}
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    ends = dict(bos_token_id=None, eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=make_demo.VOCABULARY, **SIZES, **ends))
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M weights", flush=True)
    ours = dict(device="cpu", no_compile=True, seed=0, weight_decay=0.1, step_tokens=4096, length=256)
    settings = argparse.Namespace(work=options.work, lr=options.lr, **ours)
    make_demo.fit("moe", model, texts["train"], texts["held_out"], options.passes, settings)
    tokenizer.save_pretrained(folder)
    return folder


def ids_of(split: demo.Split, tokenizer: Any) -> np.ndarray:
    """All modules of a split as ids, an end after each."""
    parts = [[*tokenizer.encode(module.text), tokenizer.eos_token_id] for module in demo.modules(split)]
    return np.array([token for part in parts for token in part], dtype=np.uint16)


def run(name: str, target: Path, options: argparse.Namespace) -> Report | None:
    """The report of a run file of `make demo` for this target; None where it measures nothing."""
    # of experts there is no MLP to copy
    given = [f"target.name={target}", f"name=second-{name}", "drafter.init_from_layers=null"]
    given.append(f"prepare.folder={options.work / 'answers'}")
    if name == "demo":
        given.append("evaluate.baselines=[ngram, small_model, runs/second-demo-dflash/checkpoint]")
    return outrider.run(ROOT / "recipes" / f"{name}.yaml", [*given, *options.set])


def rows_of(report: Report) -> list[dict[str, Any]]:
    """README's columns."""
    found = []
    for row in report.rows:
        low, high = (None, None) if row.speedup_range is None else (row.speedup_range.low, row.speedup_range.high)
        found.append({
            "drafter": row.drafter, "temperature": row.temperature, "tokens_per_step": row.tokens_per_step,
            "speedup": row.speedup, "low": low, "high": high, "tokens_per_s": row.tokens_per_s,
            "plain_tokens_per_s": row.plain_tokens_per_s, "exact": row.exact, "compared_tokens": row.compared_tokens,
        })  # fmt: skip
    return found


def promises(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What README says of the demo's target, of this one."""
    greedy = {row["drafter"]: row for row in rows if row["temperature"] == 0}
    best = max((row for name, row in greedy.items() if name != "dspark"), key=lambda row: row["tokens_per_step"])
    dspark, unequal = greedy["dspark"], [name for name, row in greedy.items() if not row["exact"]]
    found = [
        ("drafters whose texts differ from the target's", 0, len(unequal), not unequal),
        (
            f"dspark's tokens per step, above {best['drafter']}'s", best["tokens_per_step"], dspark["tokens_per_step"],
            dspark["tokens_per_step"] > best["tokens_per_step"],
        ),
        ("dspark's speed-up, lower end", 1.0, dspark["low"], (dspark["low"] or 0) > 1),
    ]  # fmt: skip
    return [dict(zip(("promise", "wanted", "found", "holds"), row, strict=True)) for row in found]


if __name__ == "__main__":
    main()
