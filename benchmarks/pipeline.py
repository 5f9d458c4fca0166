"""Pipelined decoding of the demo target: cycles and equivalent length, and stages in two processes beside one.

    python benchmarks/pipeline.py train [--stages 2,4,8] [--seeds 0,1] [--steps 160]
    python benchmarks/pipeline.py cycles [--stages 2,4,8] [--seeds 0,1] [--prompts 12] [--new 88]
    python benchmarks/pipeline.py processes [--prompts 6] [--new 88] [--turns 3]
    python benchmarks/pipeline.py table [--out FILE]

`train`: one drafter for each number of stages and each seed, by recipes/lab/demo-pipeline.yaml.  `cycles`: all stages
in this process; counted are the cycles of `lab.pipeline.cycles`, and n times tokens per cycle is the paper's
equivalent accept length.  Intervals are from a bootstrap over seeds and, within them, prompts.  Its prompts are the
first of benchmarks/methods.py, whose cells of `eagle3` with as many steps it is compared with.

`processes`: two halves of the target.  Prompt by prompt, by turns: plain decoding in one process with one thread and
with two, both halves in one process, both halves in two processes of one thread each with the trained drafter, and with
one that knows the text, which is the most that this schedule can do.  Seconds are those after the first step or cycle.
Steps are not compiled.  `bound`: what the parts, timed alone, allow: a cycle takes at least as long as its longer side.

Every run adds lines to results/pipeline.jsonl; a cell that is there is not measured again.  `table` reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from batch_time import write
from methods import HERE, RECIPES, Bench, cell_of, ratio_of, say
from torch import Tensor

from outrider import load_drafter, load_target
from outrider.decoding.state import Request
from outrider.generation import batch, serve
from outrider.lab.pipeline import PipelineDrafter, Stage, cycles
from outrider.lab.stage_processes import in_processes
from outrider.lab.stages import stages_of
from outrider.measure.config import Config as MeasureConfig
from outrider.measure.tasks.prompts import as_tokens, draw
from outrider.runs.file import load
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

CELLS, RUNS = HERE / "results" / "pipeline.jsonl", HERE.parent / "runs" / "pipeline"
PAPER = {"equivalent_length": 3.39, "speedup": 2.53, "over_eagle3": 3.39 / 2.72}
"""Qwen3.5-4B, temperature 0, 8 stages."""
WANTED = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "cycles", "processes", "table"))
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new", type=int, default=88)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.out = options.out and options.out.absolute()
    os.chdir(HERE.parent)  # recipes name their answers from there
    pairs = [(int(n), int(seed)) for seed in options.seeds.split(",") for n in options.stages.split(",")]
    if options.part == "table":
        write(table(list(found())), options.out)
        return
    torch.set_num_threads(1)
    target = load_target("demo", compile=False)
    if options.part == "train":
        trained(target, pairs, options.steps)
        return
    prompts = prompts_of(target, options.prompts)
    if options.part == "processes":
        keep({"part": "processes", **processes(target, prompts, options.new, options.turns)})
        return
    for (stages, seed), temperature in ((pair, t) for pair in pairs for t in (0.0, 1.0)):
        counted(target, stages, seed, temperature, prompts, options.new)


def trained(target: TransformersTarget, pairs: Sequence[tuple[int, int]], steps: int) -> None:
    bench = Bench(target, MeasureConfig())
    for stages, seed in pairs:
        folder = folder_of(stages, seed)
        if not (folder / "checkpoint").exists():
            changes = [f"drafter.stages={stages}", f"train.seed={seed}"]
            facts = bench.fit(load(RECIPES / "demo-pipeline.yaml", changes)[0], folder, steps)
            say(f"{stages} stages, seed {seed}: {facts}")
            keep({"part": "train", "stages": stages, "seed": seed, **facts})


def prompts_of(target: TransformersTarget, count: int) -> dict[str, list[int]]:
    """The first prompts of benchmarks/methods.py, by their names there."""
    drawn = draw("stdlib", MeasureConfig(prompts=count)).prompts[:count]
    return {one.id: as_tokens(target, one) for one in drawn}


def drafter_of(target: TransformersTarget, stages: int, seed: int) -> Any:
    return load_drafter(str(folder_of(stages, seed) / "checkpoint"), target)


def folder_of(stages: int, seed: int) -> Path:
    return RUNS / f"{stages}-{seed}"


# ── one text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Written:
    text: list[int]
    steps: int
    """Cycles, or steps of the whole target."""
    seconds_per_token: float
    """Of those after the first step."""


class Knows(PipelineDrafter):
    """Knows the texts of all prompts, so that no guess is wrong."""

    def __init__(self, vocabulary: int):
        self.vocabulary, self.text = vocabulary, list[int]()

    def guess(self, memory: Any, state: Any, tokens: Sequence[int], known: Sequence[Tensor]) -> Tensor:
        logits = torch.zeros(1, self.vocabulary)
        logits[0, self.text[len(state.tokens[0]) + len(tokens)]] = 1.0
        return logits


def piped(
    target: TransformersTarget, stages: Sequence[Stage], drafter: PipelineDrafter, prompt: list[int], new: int,
    temperature: float = 0.0, seed: int | None = None,
) -> Written:  # fmt: skip
    state = batch(target, 1, ends=frozenset(), shared_noise=False)
    return timed(cycles(stages, drafter, state, Request(prompt, new, Sampling(temperature, seed=seed))), prompt, state)


def plain(target: TransformersTarget, prompt: list[int], new: int) -> Written:
    state = batch(target, 1, ends=frozenset())
    return timed(serve(target, [Request(prompt, new, Sampling())], state=state), prompt, state)


def timed(run: Iterator[Any], prompt: list[int], state: Any) -> Written:
    next(run)
    began, before, steps = time.perf_counter(), len(state.tokens[0]), 1
    for _ in run:
        steps += 1
    text = state.tokens[0][len(prompt) :]
    return Written(text, steps, (time.perf_counter() - began) / (len(state.tokens[0]) - before))


# ── cycles ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def counted(
    target: TransformersTarget, stages: int, seed: int, temperature: float, prompts: dict[str, list[int]], new: int
) -> None:
    """Add a cell, unless it is there."""
    cell = {"part": "cycles", "stages": stages, "seed": seed, "temperature": temperature}
    if any(cell.items() <= one.items() for one in found()):
        return
    drafter = drafter_of(target, stages, seed)
    room = max(map(len, prompts.values())) + new + stages
    ranges, rows, differ = stages_of(target, stages, room, drafter.taps), [], 0
    for number, (name, prompt) in enumerate(prompts.items()):
        run = piped(target, ranges, drafter, prompt, new, temperature, seed=1000 * seed + number)
        differ += temperature == 0 and run.text != plain(target, prompt, new).text
        rows.append([name, len(run.text), run.steps])
    tokens, steps = (sum(row[i] for row in rows) for i in (1, 2))
    say(f"{cell}: equivalent length {stages * tokens / steps:.2f}, texts that differ {differ}")
    keep(cell | {"texts_that_differ": differ, "per_prompt": rows})


def lengths(cells: Sequence[dict[str, Any]], stages: int) -> dict[str, Any]:
    """Equivalent length over seeds and prompts, with a 95 % interval."""
    by_seed = [[(stages * tokens, steps) for _, tokens, steps in cell["per_prompt"]] for cell in cells]
    return {"seeds": len(cells), "prompts": len(by_seed[0]), **interval(by_seed, quotient)}


def over_eagle3(cells: Sequence[dict[str, Any]], stages: int, temperature: float) -> dict[str, Any] | None:
    """Equivalent length over EAGLE-3's tokens per step, same seeds, prompts and optimiser steps."""
    pairs = []
    for cell in cells:
        other = cell_of("eagle3", cell["seed"], "steps")
        rows = [] if other is None else [row for row in other["rows"] if row["temperature"] == temperature]
        theirs = {name: (tokens, steps) for row in rows for name, tokens, steps in row["per_prompt"]}
        own = cell["per_prompt"]
        pairs.append([((stages * n, s), theirs[name]) for name, n, s in own if name in theirs])
    return interval(pairs, ratio_of) if pairs and all(pairs) else None


def quotient(rows: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in rows) / sum(steps for _, steps in rows)


def interval(by_seed: Sequence[Sequence[Any]], figure: Callable[[Sequence[Any]], float]) -> dict[str, Any]:
    noise = random.Random(7)
    drawn = sorted(
        figure([noise.choice(own) for own in noise.choices(by_seed, k=len(by_seed)) for _ in own]) for _ in range(4000)
    )
    return {"figure": figure([row for own in by_seed for row in own]), "interval": [drawn[100], drawn[-101]]}


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def processes(target: TransformersTarget, prompts: dict[str, list[int]], new: int, turns: int) -> dict[str, Any]:
    drafter, oracle = drafter_of(target, 2, 0), Knows(target.spec.vocabulary)
    room = max(map(len, prompts.values())) + new + 2
    here = stages_of(target, 2, room, drafter.taps)
    seconds: dict[str, list[float]] = {}
    tokens_per_cycle, differ = [], 0
    with in_processes(target, "demo", 2, room, drafter.taps) as apart:
        ways: dict[str, Callable[[list[int]], Written]] = {
            "one process, one thread": lambda prompt: plain(target, prompt, new),
            "one process, two threads": lambda prompt: plain(target, prompt, new),
            "two halves, one process": lambda prompt: piped(target, here, drafter, prompt, new),
            "two processes": lambda prompt: piped(target, apart, drafter, prompt, new),
            "two processes, no wrong guess": lambda prompt: piped(target, apart, oracle, prompt, new),
        }
        for number, prompt in enumerate([*list(prompts.values())[:1], *list(prompts.values()) * turns]):
            oracle.text = prompt + plain(target, prompt, new + 4).text
            for name, way in ways.items():
                torch.set_num_threads(2 if "two threads" in name else 1)
                run = way(prompt)
                if number:  # the first is a warm-up
                    seconds.setdefault(name, []).append(run.seconds_per_token)
                    differ += run.text != oracle.text[len(prompt) :][:new]
                    if name == "two processes":
                        tokens_per_cycle.append(len(run.text) / run.steps)
            torch.set_num_threads(1)
        parts = timed_parts(target, here, drafter, next(iter(prompts.values())))
    first = seconds["one process, one thread"]
    rows = [
        {"way": name, "ms_per_token": 1e3 * statistics.median(own),
         **over({"one_thread": first, "two_threads": seconds["one process, two threads"]}, own)}
        for name, own in seconds.items()
    ]  # fmt: skip
    longer, longest = max(parts["first"] + parts["guess"], parts["second"]), max(parts["first"], parts["second"])
    per_cycle = statistics.mean(tokens_per_cycle)
    return {
        "texts": len(first), "texts_that_differ": differ, "tokens_per_cycle": per_cycle,
        "rows": rows, "parts_ms": parts,
        "bound": {
            "trained": per_cycle * parts["whole"] / longer, "no_wrong_guess": parts["whole"] / longest,
            "no_cost_but_stages": 2 * per_cycle,
        },
    }  # fmt: skip


def over(bases: dict[str, list[float]], own: list[float]) -> dict[str, Any]:
    """How many times as fast as each base: the median over texts, with a 95 % interval from a bootstrap."""
    noise, told = random.Random(7), {}
    for name, base in bases.items():
        ratios = [before / after for before, after in zip(base, own, strict=True)]
        drawn = sorted(statistics.median(noise.choices(ratios, k=len(ratios))) for _ in range(2000))
        told[name] = {"figure": statistics.median(ratios), "interval": [drawn[50], drawn[-51]]}
    return told


@torch.inference_mode()
def timed_parts(target: TransformersTarget, stages: Any, drafter: Any, prompt: list[int]) -> dict[str, float]:
    """Milliseconds of a plain step, of each half, and of a guess, each alone and in turns: medians of 60."""
    found: dict[str, list[float]] = {"whole": [], "first": [], "second": [], "guess": []}
    state = batch(target, 1, ends=frozenset())
    guess = drafter.guess
    drafter.guess = lambda *given: clocked(found["guess"], lambda: guess(*given))
    ends = [stage.end for stage in stages]
    for name, stage, end in zip(("first", "second"), stages, ends, strict=True):
        stage.end = lambda name=name, end=end: clocked(found[name], end)
    try:
        list(cycles(stages, drafter, state, Request(prompt, 60, Sampling())))
    finally:
        del drafter.guess
        for stage in stages:
            del stage.end
    run = serve(target, [Request(prompt, 61, Sampling())], state=batch(target, 1, ends=frozenset()))
    next(run)
    for _ in range(60):
        clocked(found["whole"], lambda: next(run))
    run.close()  # type: ignore[attr-defined]
    return {name: statistics.median(own[2:]) for name, own in found.items()}


def clocked(into: list[float], what: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = what()
    into.append(1e3 * (time.perf_counter() - began))
    return result


# ── all cells ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def keep(cell: dict[str, Any]) -> None:
    with CELLS.open("a") as lines:
        lines.write(json.dumps(cell, separators=(",", ":")) + "\n")


def found() -> Iterator[dict[str, Any]]:
    if CELLS.exists():
        yield from map(json.loads, CELLS.read_text().splitlines())


def table(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = []
    counted_ = [cell for cell in every if cell["part"] == "cycles"]
    for stages, temperature in sorted({(cell["stages"], cell["temperature"]) for cell in counted_}):
        own = [cell for cell in counted_ if (cell["stages"], cell["temperature"]) == (stages, temperature)]
        all_rows = [row for cell in own for row in cell["per_prompt"]]
        rows.append(
            {"stages": stages, "temperature": temperature,
             "cycles": sum(row[2] for row in all_rows), "tokens": sum(row[1] for row in all_rows),
             "equivalent_length": lengths(own, stages), "over_eagle3": over_eagle3(own, stages, temperature)}
        )  # fmt: skip
    timed_ = [cell for cell in every if cell["part"] == "processes"]
    differ = sum(cell["texts_that_differ"] for cell in (*counted_, *timed_))
    promises = [
        {"promise": "texts that differ from plain decoding's", "wanted": 0, "found": differ, "holds": differ == 0}
    ]
    for cell in timed_[-1:]:
        faster = {row["way"]: row["one_thread"]["figure"] for row in cell["rows"]}["two processes"]
        promises.append(
            {"promise": "two processes over one, of two halves", "wanted": WANTED, "found": faster,
             "holds": faster >= WANTED}
        )  # fmt: skip
    return {
        "promises": promises, "paper": PAPER, "training": [cell for cell in every if cell["part"] == "train"],
        "cycles": rows, "processes": timed_[-1] if timed_ else None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
