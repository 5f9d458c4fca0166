"""Tokens per second by batch, plain and speculative, and whether Auto follows the better of the two.

    python benchmarks/batch.py [--target smollm2] [--batches 1,4,16,64] [--drafter dspark] [--new 128] [--queue 4]
                               [--minutes 2] [--out FILE]

Greedy, prefill left out.  In every round plain, Fixed and Auto serve the same prompts one after
the other, in another order each time; rounds go on for so many minutes a batch, five at least.  Auto keeps what it
has learnt from round to round, as a server's does; its first round is a warm-up, as theirs is.  The ratio is that of
all tokens per second, its interval a bootstrap over rounds.  FILE is written after every batch; with the same settings
the batches that are not asked for stay in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batch_time import Served, parties, promise, prompts_of, serve, write

from outrider.decoding.protocols import Policy
from outrider.policies.auto import Auto
from outrider.policies.fixed import Fixed
from outrider.report.bootstrap import ratio_of_totals

LEAST = 5
"""Rounds a batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", choices=["smollm2", "demo"])
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--drafter", default="dspark", choices=["dspark", "ngram", "small_model"])
    parser.add_argument("--new", type=int, default=64, help="tokens a prompt")
    parser.add_argument(
        "--queue", type=int, default=2, help="prompts a slot, so that slots are used again as they fall free"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="a batch")
    parser.add_argument("--plain-path", action="store_true", help="without compiled steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    print(f"about {1 + len(batches) * options.minutes:.0f} minutes", file=sys.stderr, flush=True)
    target, drafters = parties([options.drafter], compiled=not options.plain_path, name=options.target)
    settings = {
        "path": "plain" if options.plain_path else "compiled", "target": options.target, "drafter": options.drafter,
        "new_tokens": options.new, "queue": options.queue, "minutes": options.minutes,
    }  # fmt: skip
    rows = earlier(options.out, settings, batches)
    for batch in batches:
        rows.append(measured(target, drafters[options.drafter], batch, options))
        said = "auto {auto_over_better:.3f} ({interval[0]:.3f} to {interval[1]:.3f})".format(**rows[-1])
        print(f"batch {batch}: {rows[-1]['speedup']:.2f}x, {said}", file=sys.stderr, flush=True)
        rows.sort(key=lambda row: row["batch"])
        promises = [
            promise(
                f"auto over the better of plain and fixed at batch {row['batch']}, lower end",
                0.98,
                row["interval"][0],
            )
            for row in rows
        ]
        write({**settings, "promises": promises, "rows": rows}, options.out)


def earlier(out: Path | None, settings: dict[str, Any], batches: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the file with the same settings, but those that are measured again."""
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text())
    is_same = all(found.get(name) == value for name, value in settings.items())
    return [row for row in found["rows"] if row["batch"] not in batches] if is_same else []


def measured(target: Any, drafter: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One batch.  It has policies of its own: what one has learnt in another batch is not this one's."""
    prompts = prompts_of(target, max(options.queue * batch, 8))
    ways: dict[str, tuple[Any, Policy | None]] = {
        "plain": (None, None), "fixed": (drafter, Fixed(drafter.limit)), "auto": (drafter, Auto(drafter.limit)),
    }  # fmt: skip
    rounds: dict[str, list[Served]] = {name: [] for name in ways}
    texts: dict[str, list[list[int]]] = {}
    began, order = time.monotonic(), list(ways)
    while len(rounds["plain"]) <= LEAST or time.monotonic() - began < 60 * options.minutes:
        order = order[1:] + order[:1]
        for name in order:
            rider, policy = ways[name]
            served, texts[name] = serve(target, prompts, options.new, rider, policy, slots=batch)
            rounds[name].append(served)
    sums = {name: sum(own[2:], own[1]) for name, own in rounds.items()}  # without the warm-up
    differ = sum(a != b for name in ways for a, b in zip(texts[name], texts["plain"], strict=True))
    rate = {name: served.tokens / served.seconds for name, served in sums.items()}
    best = max("plain", "fixed", key=rate.__getitem__)
    # every round writes the same tokens, so that a ratio of speeds is one of seconds
    ratio = ratio_of_totals(*([served.seconds for served in rounds[name][1:]] for name in (best, "auto")))
    return {
        "batch": batch, "prompts": len(prompts), "rounds": len(rounds[best]) - 1, "texts_that_differ": differ,
        "speedup": rate["fixed"] / rate["plain"], "better": best,
        "auto_over_better": ratio.center, "interval": [ratio.low, ratio.high],
        **{name: served.says() for name, served in sums.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
