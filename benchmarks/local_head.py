"""What a local head adds to an existing block drafter: tokens per step with and without it, on the same prompts.

    python -m outrider run recipes/demo-dflash.yaml
    python -m outrider run recipes/lab/demo-local_head.yaml
    python benchmarks/local_head.py [--base runs/demo-dflash/checkpoint] [--head runs/demo-local_head/checkpoint]
                                    [--weights 0.3:0,0.3:0.3,0.6:0.3] [--prompts 24] [--out FILE]

Greedy, with every draft verified in full; only counts are measured, so other work on the machine has no effect.  Ratios
have 95 % intervals from a bootstrap over prompts.  The best weights are chosen on the same prompts as the reported
figures.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import write  # noqa: E402
from outrider import generate, load_drafter, load_target  # noqa: E402
from outrider.measure.tasks.names import prompts  # noqa: E402
from outrider.measure.tasks.prompts import as_tokens  # noqa: E402

Counts = list[tuple[int, int]]
"""Tokens and steps of every prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--base", default="runs/demo-dflash/checkpoint")
    parser.add_argument("--head", default="runs/demo-local_head/checkpoint")
    parser.add_argument("--weights", default="0.3:0,0.3:0.3,0.6:0.3", help="local:prior of each way")
    parser.add_argument("--task", default="stdlib")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = load_target(options.target)
    texts = [as_tokens(target, one) for one in prompts(options.task, options.prompts)]

    def counts(drafter: Any) -> Counts:
        texts_drafted = generate(target, texts, drafter, max_new_tokens=88, policy="fixed")
        return [(len(text.tokens), text.steps) for text in texts_drafted]

    base = counts(load_drafter(options.base, target))
    rows = [row("base", base, base), row("head alone", counts(load_drafter(options.head, target)), base)]
    for pair in options.weights.split(","):
        local, prior = map(float, pair.split(":"))
        fused = load_drafter(
            "local_head", target, base=options.base, head=options.head, local=local, prior=prior
        )  # fmt: skip
        rows.append(row(f"base with head, local {local:g}, prior {prior:g}", counts(fused), base))
    write({"target": options.target, "prompts": len(texts), "rows": rows}, options.out)


def row(way: str, counts: Counts, base: Counts) -> dict[str, Any]:
    noise = random.Random(0)
    drawn = [noise.choices(range(len(base)), k=len(base)) for _ in range(2000)]
    ratios = sorted(rate([counts[i] for i in some]) / rate([base[i] for i in some]) for some in drawn)
    return {
        "way": way, "tokens_per_step": rate(counts), "over_base": rate(counts) / rate(base),
        "low": ratios[50], "high": ratios[-50],
    }  # fmt: skip


def rate(counts: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in counts) / sum(steps for _, steps in counts)


if __name__ == "__main__":
    main()
