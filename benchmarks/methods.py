"""Every method that trains, on the demo target: tokens per step, acceptance by depth, speed-up, over methods and seeds.

    python benchmarks/methods.py [--only dspark,dflash] [--seeds 0,1,2] [--column minutes,steps] [--table]

A cell is a method, a seed and a column.  Column `minutes`: as many optimiser steps as fit into the same minutes of one
core, timed once and reused for the method's other seeds; column `steps`: the same number of steps for all.  Data,
batch, optimiser and prompts are the same, settings are the recipes'; each cell is a line of results/methods.jsonl, so a
stopped run resumes, and two may run at the same time on different methods.  Time is the process's own CPU time, which
excludes other work; no cell sees its prompts in training.  Measured in interleaved runs of a few methods, at
temperatures 0 and 1, against `generate` and plain decoding.

The table covers all cells: mean and spread over seeds, and every comparison of two methods as a ratio of tokens per
step with its 95 % interval, from a bootstrap over seeds and, within them, prompts that both have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from batch_time import write

from outrider import load_drafter, load_target
from outrider.checkpoint import load_model
from outrider.data.answers import regenerate
from outrider.data.answers.store import read_answers
from outrider.data.features.live import LiveFeatures
from outrider.data.sources import conversations
from outrider.drafters import find
from outrider.measure.config import Config as MeasureConfig
from outrider.measure.record import Entry
from outrider.measure.run import measure
from outrider.nn.draft_model import Batch
from outrider.report.schema import Row
from outrider.runs.file import RunConfig, load
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.trainer import train

HERE = Path(__file__).resolve().parent
RECIPES, CELLS, RUNS = HERE.parent / "recipes", HERE / "results" / "methods.jsonl", HERE.parent / "runs" / "methods"
MINUTES, STEPS = 3.0, 160
"""Minutes of one core for the first column; optimiser steps for the second."""
BATCH = 8
"""Texts per step, overriding the recipe."""
COLUMNS = ("minutes", "steps")
TOGETHER = 8
"""Methods measured in one run, so that an interrupted run keeps what it measured before."""


@dataclass(frozen=True)
class Method:
    """A recipe and its changed settings."""

    recipe: str
    changes: tuple[str, ...] = ()
    reference: str | None = None
    """The method with which the selection compares it, at the same seed and column."""


@dataclass(frozen=True)
class Claim:
    """A published order: `better` reaches at least `ratio` times the tokens per step of `worse`."""

    better: str
    worse: str
    ratio: float
    temperature: float
    said: str


SMALL = (
    "drafter.layers=1",
    "drafter.init_from_layers=null",
    "drafter.heads=2",
    "drafter.kv_heads=1",
    "drafter.intermediate=128",
)
"""A drafter too small to learn all its training data."""
TENTH = (
    "drafter.new.layers=2", "drafter.new.hidden=128", "drafter.new.intermediate=384",
    "drafter.new.heads=4", "drafter.new.kv_heads=2", "drafter.new.head_dim=32",
)  # fmt: skip
"""A language model with about a tenth of the target's weights."""

SOFT = ("train.loss={kl: 1.0}",)
TREE = ("drafter.length=4", "drafter.width=3", "drafter.nodes=7")
"""As many nodes as the block drafters' recipes verify at temperature 0."""

METHODS: dict[str, Method] = {
    "dspark": Method("demo"),
    "dflash": Method("demo-dflash"),
    "dflash, paper's layout": Method("demo-dflash", ("drafter.anchor_predicts=false",)),
    "dflash, 5 layers": Method("demo-dflash", ("drafter.layers=5", "drafter.init_from_layers=[0, 3, 7, 11, 15]")),
    "dspark, d-pace": Method("demo", ("train.position={dpace: 0.5}",)),
    "domino": Method("demo-domino", SOFT),
    "deer": Method("lab/demo-deer", SOFT),
    "eagle3": Method("demo-eagle3", TREE),
    "eagle3, gated": Method("demo-eagle3", (*TREE, "drafter.gated=true")),
    "eagle3, metaquery": Method("demo-eagle3", (*TREE, "drafter.aggregate=metaquery")),
    "confu": Method("lab/demo-confu", TREE),
    "eagle": Method("demo-eagle", TREE),
    "peagle": Method("demo-peagle"),
    "specblock": Method("lab/demo-specblock", ("drafter.nodes=7",)),
    "medusa": Method("demo-medusa", ("drafter.sequential=false", "drafter.head=own", "drafter.nodes=7")),
    "hydra": Method("demo-medusa", ("drafter.nodes=7",)),
    "mtp": Method("demo-mtp", (*SOFT, *TREE)),
    "small_model": Method("demo-small_model", TREE),
    "small_model, hard labels": Method("demo-small_model", (*TREE, "train.loss={ce: 1.0}")),
    "small_model, adaspec": Method("demo-small_model", (*TREE, "train.select=0.4"), "small_model"),
    "tenth": Method("demo-small_model", (*TENTH, *TREE)),
    "tenth, adaspec": Method("demo-small_model", (*TENTH, *TREE, "train.select=0.4"), "tenth"),
    "limited, kl": Method("demo-dflash", (*SMALL, *SOFT)),
    "limited, lk_lambda": Method("demo-dflash", (*SMALL, "train.loss={lk_lambda: 1.0}")),
    "limited, lk_alpha": Method("demo-dflash", (*SMALL, "train.loss={lk_alpha: 1.0}")),
}

TWICE = ("prepare.count=1024", "prepare.folder=runs/twice-answers")
HALVES = {
    "eagle": ("drafter.heads=2", "drafter.kv_heads=1", "drafter.intermediate=352"),
    "eagle3": ("drafter.heads=2", "drafter.kv_heads=1", "drafter.intermediate=352"),
    "tenth": ("drafter.new.hidden=64", "drafter.new.intermediate=192", "drafter.new.head_dim=16"),
    "tenth, adaspec": ("drafter.new.hidden=64", "drafter.new.intermediate=192", "drafter.new.head_dim=16"),
    "limited, kl": ("drafter.heads=1", "drafter.intermediate=64"),
    "limited, lk_lambda": ("drafter.heads=1", "drafter.intermediate=64"),
}
"""Layers with about half the weights, for orders that do not hold at their size."""
STUDIES = {
    f"{name}, {what}": Method(
        METHODS[name].recipe,
        (*METHODS[name].changes, *changes),
        METHODS[name].reference and f"{METHODS[name].reference}, {what}",
    )
    for name in HALVES
    for what, changes in (("twice the data", TWICE), ("half the drafter", HALVES[name]))
}
METHODS |= STUDIES

CLAIMS = [
    Claim("dspark", "dflash", 1.10, 0.0, "a Markov head on the block"),
    Claim("dspark", "dflash", 1.10, 1.0, "a Markov head on the block"),
    Claim("domino", "dflash", 1.08, 0.0, "a prefix GRU on the block"),
    Claim("domino", "dflash", 1.08, 1.0, "a prefix GRU on the block"),
    Claim("dspark", "dflash, 5 layers", 1.0, 0.0, "two layers with the head, five without"),
    Claim("dspark", "dflash, 5 layers", 1.0, 1.0, "two layers with the head, five without"),
    Claim("limited, lk_lambda", "limited, kl", 1.0, 1.0, "acceptance as the loss of a drafter that can't learn all"),
    Claim("tenth, adaspec", "tenth", 1.0, 0.0, "only what can still be learnt"),
    Claim("small_model, adaspec", "small_model", 1.0, 0.0, "the same, begun from a model that writes already"),
    Claim("eagle3", "eagle", 1.0, 0.0, "taps and unrolled training, no feature loss"),
    Claim("eagle3", "eagle", 1.0, 1.0, "taps and unrolled training, no feature loss"),
    Claim("confu", "eagle3", 1.08, 0.0, "contemplate rows in the target's pass"),
    Claim("confu", "eagle3", 1.08, 1.0, "contemplate rows in the target's pass"),
    Claim("eagle3, gated", "eagle3", 1.0, 0.0, "a gate on what the draft's attention says (Baichuan-M3)"),
    Claim("eagle3, metaquery", "eagle3", 1.0, 0.0, "learned queries over the target's layers (Hyper-Bagel)"),
]
CLAIMS += [
    Claim(f"{claim.better}, {what}", f"{claim.worse}, {what}", 1.0, claim.temperature, claim.said)
    for claim in CLAIMS for what in ("twice the data", "half the drafter") if claim.better in HALVES
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="methods, separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--column", default="minutes,steps")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=88, help="tokens a prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="measure nothing, say what the cells say")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = options.only.split(";") if options.only else [name for name in METHODS if name not in STUDIES]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {'; '.join(METHODS)}")
    options.out = options.out and options.out.absolute()
    os.chdir(HERE.parent)  # recipes name their answers relative to this folder
    if not options.table:
        measured = MeasureConfig(prompts=options.prompts, max_new_tokens=options.new, traced_prompts=0)
        bench = Bench(load_target("demo", compile=False), measured)
        for column, seed in itertools.product(options.column.split(","), map(int, options.seeds.split(","))):
            wanted = [name for name in names if cell_of(name, seed, column) is None]
            for start in range(0, len(wanted), TOGETHER):
                bench.run(wanted[start : start + TOGETHER], seed, column)
    write(table(list(cells())), options.out)


# ── one seed ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Bench:
    """Trains and measures cells on one target; features are computed once for all of them."""

    target: TransformersTarget
    config: MeasureConfig
    sources: dict[int, LiveFeatures] = field(default_factory=dict)

    def run(self, names: Sequence[str], seed: int, column: str) -> None:
        """Train these methods and measure them in one interleaved run."""
        trained = {name: self.train(name, seed, column) for name in names}
        entries = [
            Entry(name, load_drafter(str(folder_of(name, seed, column) / "checkpoint"), self.target), temperature)
            for name in trained
            for temperature in (0.0, 1.0)
        ]
        say(f"measuring {', '.join(trained)}")
        outcome = measure(self.target, entries, self.config)
        for name, facts in trained.items():
            rows = [row for row in outcome.rows if row.drafter == name]
            cell = {"method": name, "seed": seed, "column": column, **facts, "rows": [short(row) for row in rows]}
            with CELLS.open("a") as lines:
                lines.write(json.dumps(cell, separators=(",", ":")) + "\n")

    def train(self, name: str, seed: int, column: str) -> dict[str, Any]:
        """Train one cell, or load a complete one from an earlier run.  Returns the cell's fields about its training."""
        folder = folder_of(name, seed, column)
        done = folder / "cell.json"
        if done.exists():
            return dict(json.loads(done.read_text()))
        method = METHODS[name]
        changes = [*method.changes, f"train.seed={seed}"]
        if method.reference is not None:
            self.train(method.reference, seed, column)
            changes.append(f"train.reference={folder_of(method.reference, seed, column) / 'checkpoint'}")
        settings, _ = load(RECIPES / f"{method.recipe}.yaml", changes)
        facts = self.fit(settings, folder, STEPS if column == "steps" else self._affordable(name, settings, folder))
        say(f"{name}, seed {seed}, {column}: {facts}")
        done.write_text(json.dumps(facts))
        return facts

    def _affordable(self, name: str, settings: RunConfig, folder: Path) -> int:
        """Steps in the given minutes: those of an earlier seed, else from the fastest of three short trials."""
        for seed in range(10):
            if cell := cell_of(name, seed, "minutes"):
                return int(cell["steps"])
        trials = [self.fit(settings, folder.with_name(folder.name + "-trial"), 30) for _ in range(3)]
        return round(60 * MINUTES / min(trial["seconds_per_step"] for trial in trials))

    def fit(self, settings: RunConfig, folder: Path, steps: int) -> dict[str, Any]:
        """Train this many steps into a folder.  Returns the cell's fields about it."""
        assert settings.train is not None
        given = {"steps": steps, "batch": BATCH, "save_every": steps, "log_every": steps}
        config = settings.train.model_copy(update=given)
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(config.seed)
        model = find(settings.drafter["kind"]).Model(settings.drafter_config, self.target)
        reference = load_model(config.reference, self.target) if config.reference else None
        source = Tapped(self._source(settings), model.taps)
        clock: list[float] = []
        train(model, source, config, folder, on_step=lambda *_: clock.append(time.process_time()), reference=reference)
        apart = (clock[-1] - clock[2]) / (len(clock) - 3)
        return {
            "commit": version(),
            "steps": steps,
            "seconds_per_step": round(apart, 4),
            "cpu_seconds": round(apart * steps, 1),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "texts": source.manifest.texts,
        }

    def _source(self, settings: RunConfig) -> LiveFeatures:
        """Features of the texts, with every layer that any method taps."""
        assert settings.train is not None
        count = settings.prepare.count or 0
        if count not in self.sources:
            asked = list(conversations.read(settings.prepare))
            path = regenerate.prepare(self.target, self.target.tokenizer, asked, settings.answers, settings.prepare)
            self.sources[count] = LiveFeatures(
                self.target, read_answers(path), tuple(range(self.target.spec.layers)), batch=BATCH,
                length=settings.prepare.length, cache_bytes=1 << 33,
            )  # fmt: skip
            say("reading the texts once for all methods")
            for step in range(self.sources[count].steps_per_pass):
                self.sources[count].batch(step)
        self.sources[count].seed = settings.train.seed
        return self.sources[count]


class Tapped:
    """The same features reduced to one method's taps."""

    def __init__(self, source: LiveFeatures, taps: tuple[int, ...]):
        self.source, self.taps = source, list(taps)
        self.manifest = replace(source.manifest, taps=taps)
        self.counts = source.counts

    def batch(self, step: int) -> Batch:
        batch = self.source.batch(step)
        return replace(batch, taps=batch.taps[:, :, self.taps])


def folder_of(name: str, seed: int, column: str) -> Path:
    return RUNS / f"{slug(name)}-{seed}-{column}"


def cell_of(name: str, seed: int, column: str) -> dict[str, Any] | None:
    wanted = name, seed, column
    return next((cell for cell in cells() if (cell["method"], cell["seed"], cell["column"]) == wanted), None)


def slug(name: str) -> str:
    return name.replace(",", "").replace("'", "").replace(" ", "-")


def short(row: Row) -> dict[str, Any]:
    """The fields of a report's row that a cell keeps."""
    kept = (
        "temperature",
        "prompts",
        "tokens",
        "steps",
        "tokens_per_step",
        "accepted_by_depth",
        "speedup",
        "exact",
        "share",
    )
    prompts = [[one.id, one.tokens, one.steps] for one in row.per_prompt]
    return row.model_dump(mode="json", include=set(kept)) | {"per_prompt": prompts}


def version() -> str:
    """The commit this runs from."""
    found = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ── all cells ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def cells() -> Iterator[dict[str, Any]]:
    if CELLS.exists():
        yield from map(json.loads, CELLS.read_text().splitlines())


def table(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for column in COLUMNS:
        for name in METHODS:
            own = [cell for cell in found if (cell["method"], cell["column"]) == (name, column)]
            if own:
                rows.append(summary(name, column, own))
    orders = [order(claim, column, found) for column in COLUMNS for claim in CLAIMS]
    return {
        "training_minutes_of_one_core": MINUTES, "training_steps": STEPS, "cells": len(found),
        "exact": all(row["exact"] is not False for cell in found for row in cell["rows"]),
        "rows": rows, "orders": [one for one in orders if one is not None],
    }  # fmt: skip


def summary(name: str, column: str, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method in one column: mean and spread over its seeds."""
    said: dict[str, Any] = {
        "method": name, "column": column, "seeds": len(own), "parameters": own[0]["parameters"],
        "training_steps": round(statistics.mean(cell["steps"] for cell in own)),
        "training_cpu_seconds": round(statistics.mean(cell["cpu_seconds"] for cell in own)),
    }  # fmt: skip
    for temperature in (0.0, 1.0):
        rows = [row for cell in own for row in cell["rows"] if row["temperature"] == temperature]
        if not rows:
            said[f"temperature_{temperature:g}"] = None
            continue
        per_step = [row["tokens_per_step"] for row in rows]
        said[f"temperature_{temperature:g}"] = {
            "tokens_per_step": statistics.mean(per_step),
            "spread": statistics.stdev(per_step) if len(per_step) > 1 else None,
            "speedup": statistics.mean(row["speedup"] for row in rows),
            "accepted_by_depth": mean_by_depth([row["accepted_by_depth"] for row in rows]),
            "exact": all(row["exact"] for row in rows) if temperature == 0 else None,
            "tokens": sum(row["tokens"] for row in rows),
        }
    return said


def mean_by_depth(found: Sequence[Sequence[float | None]]) -> list[float]:
    """Mean over seeds; a depth that a seed never reached counts as 0."""
    deepest = max(map(len, found), default=0)
    return [statistics.mean((shares[k] or 0.0) if k < len(shares) else 0.0 for shares in found) for k in range(deepest)]


def order(claim: Claim, column: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Whether a published order holds here; None if one of the two was not measured."""
    sides = [per_prompt(found, name, column, claim.temperature) for name in (claim.better, claim.worse)]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    if not seeds:
        return None
    pairs = {
        seed: [
            (sides[0][seed][prompt], sides[1][seed][prompt]) for prompt in sides[0][seed] if prompt in sides[1][seed]
        ]
        for seed in seeds
    }
    ratio = ratio_of([pair for of in pairs.values() for pair in of])
    noise = random.Random(7)
    drawn = sorted(
        ratio_of([noise.choice(pairs[seed]) for seed in noise.choices(seeds, k=len(seeds)) for _ in pairs[seed]])
        for _ in range(4000)
    )
    low, high = drawn[100], drawn[-101]
    return {
        "better": claim.better, "worse": claim.worse, "why": claim.said, "temperature": claim.temperature,
        "column": column,
        "seeds": len(seeds), "wanted": claim.ratio, "ratio": ratio, "interval": [low, high],
        "differs": low > 1 or high < 1, "holds": ratio >= claim.ratio and low > 1,
    }  # fmt: skip


def per_prompt(
    found: Sequence[Mapping[str, Any]], name: str, column: str, temperature: float
) -> dict[int, dict[str, tuple[int, int]]]:
    """Seed to prompt to (tokens, steps)."""
    return {
        cell["seed"]: {prompt: (tokens, steps) for prompt, tokens, steps in row["per_prompt"]}
        for cell in found
        if (cell["method"], cell["column"]) == (name, column)
        for row in cell["rows"]
        if row["temperature"] == temperature
    }


def ratio_of(pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Tokens per step of the first over those of the second."""
    first, second = ([sum(column) for column in zip(*side, strict=True)] for side in zip(*pairs, strict=True))
    return (first[0] / first[1]) / (second[0] / second[1])


if __name__ == "__main__":
    main()
