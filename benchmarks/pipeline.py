"""Whether stages on devices of their own, or in two processes on two cores, can gain: a bound from measured times.

    python benchmarks/pipeline.py --out benchmarks/results/pipeline.json

Speculative Pipeline Decoding (arXiv 2605.30852) on one thread, stage after stage, with the real stages and the real
drafter's time; of its guesses a given share is right.  A clock then advances in every cycle by the slowest of what ran
side by side: all active stages and the drafter on devices of their own, or in two processes the first half with the
drafter beside the second.  Times are medians of CPU time by stage, and only ratios of them are kept: speed over a plain
pass, which takes as long as all stages.  Two threads that share a plain pass halve its time at best.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import write  # noqa: E402
from outrider import demo, generate, load_target  # noqa: E402
from outrider.generation import batch, requests  # noqa: E402
from outrider.lab.drafters import pipeline  # noqa: E402
from outrider.lab.pipeline import PipelineDrafter, Stage, cycles  # noqa: E402
from outrider.lab.stages import stages_of  # noqa: E402
from outrider.sampling.settings import Sampling  # noqa: E402

DRAFTER = -1


class Clock:
    """CPU seconds of every part in every cycle: stages by number, and DRAFTER."""

    def __init__(self) -> None:
        self.cycles: list[dict[int, float]] = [{}]

    @contextmanager
    def measuring(self, part: int) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.cycles[-1][part] = time.thread_time() - began


class Timed(Stage):
    def __init__(self, stage: Stage, number: int, clock: Clock):
        self.stage, self.number, self.clock = stage, number, clock

    def begin(self, *inputs: Any) -> None:
        self.stage.begin(*inputs)

    def end(self) -> Any:
        with self.clock.measuring(self.number):
            return self.stage.end()


class Right(PipelineDrafter):
    """A drafter of which this share of guesses is right, and which takes the time of a real one."""

    def __init__(self, real: PipelineDrafter, text: Sequence[int], share: float, clock: Clock, seed: int):
        self.real, self.text, self.share, self.clock = real, text, share, clock
        self.is_over = False
        self.draw, self.taps, self.limit = random.Random(seed), real.taps, real.limit
        for name in ("allocate", "admit", "observe", "free", "refresh"):
            setattr(self, name, getattr(real, name))

    def guess(self, memory: Any, state: Any, tokens: Sequence[int], flight_taps: Sequence[torch.Tensor]) -> Any:
        with self.clock.measuring(DRAFTER):
            logits = self.real.guess(memory, state, tokens, flight_taps)
        at = len(state.tokens[0]) + len(tokens)
        if logits is None or at >= len(self.text):
            self.is_over = True  # the pipeline drains, which is not counted
            return None
        is_right = self.draw.random() < self.share
        return torch.nn.functional.one_hot(torch.tensor([self.text[at] + (not is_right)]), logits.shape[1]).float()


class Run(NamedTuple):
    tokens: int
    cycles: list[dict[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--shares", default="0.41,0.81,1", help="of guesses that are right")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(options.target, compile=False)
    prompts = [target.encode(text) for _, text in demo.prompts("held_out", options.prompts, characters=200)]
    texts = [one.tokens for one in generate(target, prompts, max_new_tokens=options.new)]
    rows = []
    for stages in map(int, options.stages.split(",")):
        drafter = pipeline.Model(pipeline.Config(stages=stages), target).to(torch.bfloat16).eval().drafter()
        for share in map(float, options.shares.split(",")):
            runs = [
                run(target, drafter, stages, prompt, text, share, seed)
                for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
            ]
            rows.append(row(stages, share, runs))
            print(rows[-1], file=sys.stderr, flush=True)
    write({"target": options.target, "prompts": len(prompts), "new": options.new, "rows": rows}, options.out)


def run(target: Any, drafter: Any, stages: int, prompt: list[int], text: list[int], share: float, seed: int) -> Run:
    """Decode one text through the stages.  Raises SystemExit for a text that is not the target's."""
    clock = Clock()
    own = Right(drafter, [*prompt, *text], share, clock, seed)
    state = batch(target, 1, ends=frozenset())
    (request,) = requests(target, prompt, len(text), Sampling())
    parts = [
        Timed(stage, number, clock)
        for number, stage in enumerate(stages_of(target, stages, len(prompt) + len(text) + stages + 2, own.taps))
    ]
    counted = tokens = 0
    for committed in cycles(parts, own, state, request):
        clock.cycles.append({})
        if not own.is_over:
            counted, tokens = len(clock.cycles) - 1, tokens + (committed is not None)
    if state.tokens[0][len(prompt) :] != text:
        raise SystemExit(f"another text with {stages} stages: {state.tokens[0]} for {text}")
    return Run(tokens - 1, clock.cycles[stages:counted])  # the first token's cycles have filled the pipeline


def row(stages: int, share: float, runs: Sequence[Run]) -> dict[str, Any]:
    """Equivalent length with a 95 % interval over texts, and speed by the clock over a plain pass."""
    seconds = {
        part: statistics.median(cycle[part] for one in runs for cycle in one.cycles if part in cycle)
        for part in range(DRAFTER, stages)
    }
    plain = sum(seconds[number] for number in range(stages))
    tokens, counted = sum(one.tokens for one in runs), [cycle for one in runs for cycle in one.cycles]
    own = sum(max(seconds[part] for part in cycle) for cycle in counted)
    halves = [[part for part in seconds if (part < stages // 2) == is_first] for is_first in (True, False)]
    both = sum(max(sum(seconds[part] for part in half if part in cycle) for half in halves) for cycle in counted)
    noise = random.Random(0)
    drawn = sorted(length(stages, noise.choices(runs, k=len(runs))) for _ in range(2000))
    return {
        "stages": stages, "right": share, "equivalent_length": length(stages, runs), "low": drawn[50],
        "high": drawn[-50], "slowest_stage": max(seconds[n] for n in range(stages)) / plain,
        "drafter": seconds[DRAFTER] / plain, "own_devices": tokens * plain / own,
        "two_processes": tokens * plain / both, "two_processes_over_two_threads": tokens * plain / both / 2,
    }  # fmt: skip


def length(stages: int, runs: Sequence[Run]) -> float:
    return stages * sum(one.tokens for one in runs) / sum(len(one.cycles) for one in runs)


if __name__ == "__main__":
    main()
