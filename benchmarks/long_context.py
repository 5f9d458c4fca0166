"""Drafters at positions beyond those they were trained on, and long texts mixed into what they learn from.

    python benchmarks/long_context.py [--work runs/long] [--steps 20] [--set KEY=VALUE …] [--out FILE]

The demo's target goes on training on windows of 8,192 tokens, which is its context then.  Two drafters of the same
recipe (`recipes/demo.yaml`) learn in as many steps: one from 512 short prompts, one from 488 of them and 24 of 2 to 7
thousand tokens.  Both are measured on prompts of three lengths from modules that nobody was trained on; tokens per step
by the position at which a step begins, at temperature 0.  A run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import make_demo  # noqa: E402  (scripts, run without an install too)
from batch_time import write  # noqa: E402
from second_target import ids_of  # noqa: E402

import outrider  # noqa: E402
from outrider import demo  # noqa: E402
from outrider.report.schema import Report  # noqa: E402

CONTEXT = 8192
SHORT, LONG = 600, (8_000, 22_000)
"""Characters of a prompt; the demo's tokenizer takes 3 for a token."""
MIXES = {"short texts": (512, 0), "short and long texts": (488, 24)}
MEASURED = {600: 8, 7_000: 8, 20_000: 6}
"""Prompts that are measured, by their characters."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--work", type=Path, default=Path("runs/long"), help="where target, prompts and runs go")
    asked.add_argument("--steps", type=int, default=20, help="of the target, 8,192 tokens each")
    asked.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both runs")
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    target = trained(options)
    prompts(options.work / "measured.jsonl", measured())
    prompts(options.work / "held_out.jsonl", cut(demo.package_modules(["numpy"]), [SHORT] * 24 + [14_000] * 8, "held"))
    found = {name: run(name, mix, target, options) for name, mix in MIXES.items()}
    write(
        {"target": json.loads((options.work / "long.json").read_text()), "mixes": MIXES, "drafters": found}, options.out
    )


def trained(options: argparse.Namespace) -> Path:
    """The folder of the target, trained unless it is there."""
    folder: Path = options.work / "long"
    if not (options.work / "long.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.TARGET, model_max_length=CONTEXT)
        texts = {split: ids_of(split, tokenizer) for split in ("train", "held_out")}
        model = Qwen3ForCausalLM.from_pretrained(demo.TARGET, max_position_embeddings=CONTEXT, dtype=torch.float32)
        ours = dict(
            device="cpu", no_compile=True, seed=0, weight_decay=0.1, step_tokens=CONTEXT, length=CONTEXT, lr=2e-3
        )  # a warm-up of 100 steps: at most 1e-4
        passes = options.steps * CONTEXT / len(texts["train"])
        settings = argparse.Namespace(work=options.work, **ours)
        make_demo.fit("long", model, texts["train"], texts["held_out"][: CONTEXT + 1], passes, settings)
        tokenizer.save_pretrained(folder)
    return folder


def cut(modules: Iterable[demo.Module], sizes: list[int], seed: str) -> Iterator[str]:
    """For each size a piece of a module of its own that has as many characters, from the beginning of a line."""
    order = random.Random(seed)
    whole = [module.text for module in modules]
    order.shuffle(whole)
    for size in sizes:
        at = next(n for n, text in enumerate(whole) if len(text) >= size)
        text = whole.pop(at)
        begin = text.rfind("\n", 0, order.randrange(len(text) - size + 1) + 1) + 1
        yield text[begin : begin + size].rpartition("\n")[0] + "\n"


def measured() -> Iterator[str]:
    """Of modules that neither target nor drafter has seen; a long one may give several prompts."""
    modules = list(demo.modules("held_out"))
    for size, count in MEASURED.items():
        long = [module for module in modules if len(module.text) >= size]
        for n in range(0, count, len(long)):
            yield from cut(long, [size] * min(len(long), count - n), f"{size} {n}")


def prompts(path: Path, texts: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def run(name: str, mix: tuple[int, int], target: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a drafter trained on this mix accepts, by position, and how long its training took."""
    short, long = mix
    order = random.Random(name)
    sizes = [SHORT] * short + [order.randint(*LONG) for _ in range(long)]
    slug = name.replace(" ", "-")
    texts = list(cut(demo.package_modules(["torch", "transformers"]), sizes, "trained"))
    brief, last = texts[:short], texts[short:]  # what is answered beside a long text takes its memory and time
    order.shuffle(brief)
    file = prompts(options.work / f"{slug}.jsonl", [*brief, *last])
    given = [
        f"target.name={target}", f"name=long-{slug}", f"prepare.conversations={file}", f"prepare.count={len(texts)}",
        f"prepare.held_out.path={options.work / 'held_out.jsonl'}", f"prepare.length={CONTEXT}",
        f"prepare.folder={options.work / slug}", "prepare.slots=16", f"train.tokens={CONTEXT}",
        f"evaluate.tasks=[{options.work / 'measured.jsonl'}]", f"evaluate.prompts={sum(MEASURED.values())}",
        "evaluate.temperatures=[0.0]", "evaluate.baselines=[]", "evaluate.repeats=1",
    ]  # fmt: skip
    report = outrider.run(ROOT / "recipes" / "demo.yaml", [*given, *options.set])
    assert report is not None
    steps = [json.loads(line) for line in Path("runs", f"long-{slug}", "metrics.jsonl").read_text().splitlines()]
    minutes = max(step.get("seconds", 0) for step in steps) / 60
    return {
        "training_minutes": minutes,
        "training_tokens": max(step.get("tokens", 0) for step in steps),
        "rows": rows_of(report),
    }


def rows_of(report: Report) -> list[dict[str, Any]]:
    return [
        {
            "drafter": row.drafter, "tokens_per_step": row.tokens_per_step, "exact": row.exact,
            "compared_tokens": row.compared_tokens,
            "by_position": [part.model_dump(mode="json") for part in row.by_position],
        } for row in report.rows
    ]  # fmt: skip


if __name__ == "__main__":
    main()
