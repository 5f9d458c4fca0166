"""Tokens per second by batch, plain and speculative, and whether Adaptive follows the better of the two.

    python benchmarks/batch.py [--batches 1,4,16,64] [--drafter dspark] [--new 128] [--queue 4] [--rounds 3] [--out
    FILE]

On the demo target, greedy, prefill left out.  In every round plain, Fixed and Adaptive serve the same prompts one after
the other.  Adaptive keeps what it has learnt from round to round, as a server's does; its first round is a warm-up, as
theirs is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from batch_time import Served, parties, prompts_of, serve, write

from outrider.decoding.protocols import Policy
from outrider.policies.adaptive import Adaptive
from outrider.policies.fixed import Fixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--drafter", default="dspark", choices=["dspark", "ngram", "small_model"])
    parser.add_argument("--new", type=int, default=128, help="tokens a prompt")
    parser.add_argument(
        "--queue", type=int, default=4, help="prompts a slot, so that slots are used again as they fall free"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain-path", action="store_true", help="without compiled steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    target, drafters = parties([options.drafter], compiled=not options.plain_path)
    drafter = drafters[options.drafter]
    rows = []
    for batch in batches:
        prompts = prompts_of(target, max(options.queue * batch, 8))
        # per batch, as many policies as ways: what one has learnt is not the other's
        ways: dict[str, tuple[Any, Policy | None]] = {
            "plain": (None, None), "fixed": (drafter, Fixed(drafter.limit)), "adaptive": (drafter,
            Adaptive(drafter.limit)),
        }  # fmt: skip
        sums = {name: Served() for name in ways}
        texts: dict[str, list[list[int]]] = {}
        for number in range(options.rounds + 1):
            for name, (rider, policy) in ways.items():
                served, texts[name] = serve(target, prompts, options.new, rider, policy, slots=batch)
                if number:
                    sums[name] += served
        differ = sum(a != b for name in ways for a, b in zip(texts[name], texts["plain"], strict=True))
        rate = {name: served.tokens / served.seconds for name, served in sums.items()}
        best = max(rate["plain"], rate["fixed"])
        rows.append({
            "batch": batch, "prompts": len(prompts), "texts_that_differ": differ,
            "speedup": rate["fixed"] / rate["plain"],
            "adaptive_over_better": rate["adaptive"] / best, **{name: served.says() for name, served in sums.items()},
        })  # fmt: skip
        print(
            f"batch {batch}: {rows[-1]['speedup']:.2f}x, adaptive {rate['adaptive'] / best:.3f}",
            file=sys.stderr,
            flush=True,
        )
    promises = [
        {"promise": f"adaptive over the better of plain and fixed at batch {row['batch']}", "wanted": 0.95,
         "found": row["adaptive_over_better"], "holds": row["adaptive_over_better"] >= 0.95}
        for row in rows
    ]  # fmt: skip
    path = "plain" if options.plain_path else "compiled"
    write(
        {"path": path, "drafter": options.drafter, "new_tokens": options.new, "promises": promises, "rows": rows},
        options.out,
    )


if __name__ == "__main__":
    main()
