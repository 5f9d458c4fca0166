"""Steps that are one call each beside steps of several, compiled both: texts and time, by turns.

    python benchmarks/one_call.py [--target demo] [--tokens 100000] [--batches 1,4,16] [--seed 0] [--out FILE]

The small target or `smollm2`, plain and with the checkpoint that was trained for it last, greedy and at temperature 0.8
with seeds.  A round draws prompts of 5 to 200 tokens that no drafter was trained on, twice as many as slots, and asks
for 20 to 200 tokens each, so that slots are used again and end one by one.  Every round is written both ways,
`policy="fixed"`; a text that differs is a mismatch, or a tie where its first other token's logit is within rounding.
Rounds go on until so many tokens were compared.  Ratios are of medians of rounds, prompts included.  Prints JSON; exits
with 1 on a mismatch.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from batch_time import CHECKPOINTS, parties, prompts_of, write

from outrider import generate
from outrider.fast.runner import is_tie, using
from outrider.sampling.settings import Sampling

TEMPERATURES = (0.0, 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", choices=CHECKPOINTS)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    target, drafters = parties(["dspark"], name=options.target)
    cells = {
        cell: Cell(target, *cell, drafters) for cell in itertools.product(("plain", *drafters), TEMPERATURES, batches)
    }
    noise, pool, compared = random.Random(options.seed), prompts_of(target, 64), 0
    for cell in cells.values():
        cell.round(noise, pool)  # compiles, and warms up
        cell.forget()
    while compared < options.tokens:
        compared = 0
        for cell in cells.values():
            cell.round(noise, pool)
            compared += cell.tokens
        print(f"{compared} of {options.tokens} tokens", file=sys.stderr, flush=True)
    rows = [cell.says() for cell in cells.values()]
    mismatches = sum(row["mismatches"] for row in rows)
    promises = [
        {"promise": "tokens compared", "wanted": options.tokens, "found": compared,
         "holds": compared >= options.tokens},
        {"promise": "texts that differ, ties aside", "wanted": 0, "found": mismatches, "holds": not mismatches},
    ]  # fmt: skip
    write({"target": options.target, "promises": promises, "rows": rows, "seed": options.seed}, options.out)
    sys.exit(bool(mismatches))


class Cell:
    """A drafter at a temperature and a batch size."""

    def __init__(self, target: Any, drafter: str, temperature: float, batch: int, drafters: dict[str, Any]):
        self.target, self.name, self.drafter = target, drafter, drafters.get(drafter)
        self.temperature, self.batch = temperature, batch
        self.forget()

    def forget(self) -> None:
        self.tokens = self.texts = self.mismatches = self.ties = 0
        self.seconds: dict[bool, list[float]] = {False: [], True: []}

    def round(self, noise: random.Random, pool: list[list[int]]) -> None:
        prompts = [noise.choice(pool)[: noise.randint(5, 200)] for _ in range(2 * self.batch)]
        new = noise.randint(20, 200)
        seed = noise.randrange(2**31) if self.temperature else None
        given = {"max_new_tokens": new, "slots": self.batch, "policy": "fixed"}
        sampling = Sampling(temperature=self.temperature, seed=seed)
        texts = {}
        for way in noise.sample([False, True], 2):
            began = time.perf_counter()
            with using("built" if way else "none"):
                found = generate(self.target, prompts, self.drafter, sampling=sampling, **given)
            self.seconds[way].append(time.perf_counter() - began)
            texts[way] = [one.tokens for one in found]
        for prompt, one, other in zip(prompts, texts[False], texts[True], strict=True):
            self.texts += 1
            self.tokens += len(one)
            if one != other:
                at = next(i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)
                is_rounding = max(at - len(one), at - len(other)) < 0 and not self.temperature and is_tie(
                    self.target, [*prompt, *one[:at]], one[at], other[at]
                )  # fmt: skip
                self.ties += is_rounding
                self.mismatches += not is_rounding

    def says(self) -> dict[str, Any]:
        median = {way: statistics.median(taken) for way, taken in self.seconds.items()}
        each = sorted(one / other for one, other in zip(self.seconds[True], self.seconds[False], strict=True))
        return {
            "drafter": self.name, "temperature": self.temperature, "batch": self.batch, "rounds": len(each),
            "texts": self.texts, "tokens": self.tokens, "mismatches": self.mismatches, "ties": self.ties,
            "time_over_several_calls": sum(self.seconds[True]) / sum(self.seconds[False]),
            "median_round": statistics.median(each), "seconds": median[True],
        }  # fmt: skip


if __name__ == "__main__":
    main()
