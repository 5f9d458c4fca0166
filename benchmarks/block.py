"""What block verification brings: tokens per step of sampled chains under the acceptance rule and judged as a whole.

    python benchmarks/block.py [--prompts 24] [--tokens 128] [--lengths 2,4,8] [--temperature 1.0] [--out FILE]

The small model that ships drafts for the demo target, in float32, with the same prompts and the same noise both ways,
by turns; both are exact.  `gain` is the ratio of tokens per step, with the standard error of the mean over prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from batch_time import prompts_of, write

from outrider import load_drafter, load_target
from outrider.generation import generate
from outrider.sampling.settings import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="tokens a prompt")
    parser.add_argument("--lengths", default="2,4,8")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = load_target("demo")
    target.ends = frozenset()
    prompts = prompts_of(target, options.prompts)
    rows = [
        row(target, prompts, int(length), options.tokens, options.temperature) for length in options.lengths.split(",")
    ]
    promises = [
        {"promise": f"block verification keeps more, chains of {row['length']}", "wanted": 1.0, "found": row["gain"],
         "holds": row["gain"] > 1} for row in rows
    ]  # fmt: skip
    write({"promises": promises, "temperature": options.temperature, "rows": rows}, options.out)


def row(target: Any, prompts: list[list[int]], length: int, tokens: int, temperature: float) -> dict[str, Any]:
    drafter = load_drafter("small_model", target, length=length)
    found: dict[str, list[float]] = {"standard": [], "block": []}
    for n, prompt in enumerate(prompts):
        for way, kept in found.items():
            sampling = Sampling(temperature, seed=n)
            (one,) = generate(
                target, prompt, drafter, max_new_tokens=tokens, sampling=sampling, policy="fixed", verification=way,
                shared_noise=False,
            )  # fmt: skip
            kept.append(len(one.tokens) / one.steps)
        print(f"length {length}: {n + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    means = {way: statistics.mean(kept) for way, kept in found.items()}
    differences = [more - less for more, less in zip(found["block"], found["standard"], strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 / means["standard"]
    return {
        "length": length,
        "tokens_per_step": means,
        "gain": means["block"] / means["standard"],
        "standard_error": error,
    }


if __name__ == "__main__":
    main()
