"""Every method that trains: tokens per step on held-out prompts after equal minutes or equal steps, over seeds.

    python benchmarks/methods.py --target smollm2 --minutes 15,60 [--only 'dflash;dflash2'] [--seeds 0,1,2]
    python benchmarks/methods.py --target demo [--minutes 3 | --steps 160]
    python benchmarks/methods.py --table --out benchmarks/results/methods.json

A cell is a target, a method, a budget and a seed; results/methods.jsonl has one per line, with the tokens and steps of
every prompt.  A stopped training run is resumed, existing cells are not rerun, and several commands may run at the same
time on different methods.

Minutes are planned: as many optimiser steps as fit, by the CPU seconds in results/rates.json, which are measured once
per method and stored, so that other work on the machine does not affect any cell.  Data, batch, optimiser and prompts
of a target are the same for all; drafts are verified in full, with `generate`.  Only counts are kept.

The table has mean and spread over seeds, and every comparison of two methods as a ratio of tokens per step with its
95 % interval, from a bootstrap over seeds and, within them, the prompts they share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import write  # noqa: E402
from outrider import generate, load_target  # noqa: E402
from outrider.checkpoint import load_model, manifest_of  # noqa: E402
from outrider.data.answers.store import ANSWERS, iterate_answers  # noqa: E402
from outrider.drafters import method  # noqa: E402
from outrider.loading import with_settings  # noqa: E402
from outrider.measure.tasks.names import INSTRUCTIONS, prompts  # noqa: E402
from outrider.measure.tasks.prompts import as_tokens  # noqa: E402
from outrider.runs import stages  # noqa: E402
from outrider.runs.file import RunConfig, load  # noqa: E402
from outrider.runs.forecast import budget  # noqa: E402
from outrider.targets.hf.transformers import TransformersTarget  # noqa: E402

RECIPES, RESULTS = ROOT / "recipes", ROOT / "benchmarks" / "results"
CELLS, RATES = RESULTS / "methods.jsonl", RESULTS / "rates.json"
MINUTES, STEPS = 3.0, 160
"""Of the demo target's two columns."""


@dataclass(frozen=True)
class Method:
    """A recipe and its changed settings."""

    recipe: str
    changes: tuple[str, ...] = ()
    reference: str | None = None
    """The method with which the selection compares it, at the same seed and budget."""


@dataclass(frozen=True)
class Setup:
    """How the methods of a target are trained and measured."""

    tasks: tuple[str, ...]
    """Kinds of held-out prompts."""
    cores: int
    """A minute is this many minutes of CPU time."""
    temperatures: tuple[float, ...]
    methods: Mapping[str, Method]


@dataclass(frozen=True)
class Claim:
    """A published ordering: `better` reaches at least `ratio` times the tokens per step of `worse`."""

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
    "dflash2": Method("demo-dflash2"),
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
"""Layers with about half the weights, for orderings that do not hold at full size."""
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
    Claim("deer, first layers", "eagle3", 1.0, 0.0, "a diffusion drafter made of the target's first layers"),
    Claim("deer, first layers", "deer, from nothing", 1.0, 0.0, "adapted, not begun anew"),
    Claim("eagle3, gated", "eagle3", 1.0, 0.0, "a gate on what the draft's attention says (Baichuan-M3)"),
    Claim("eagle3, metaquery", "eagle3", 1.0, 0.0, "learned queries over the target's layers (Hyper-Bagel)"),
]
CLAIMS += [
    Claim(f"{claim.better}, {what}", f"{claim.worse}, {what}", 1.0, claim.temperature, claim.said)
    for claim in CLAIMS for what in ("twice the data", "half the drafter") if claim.better in HALVES
]  # fmt: skip


def init(kind: str, *changes: str) -> Method:
    """A kind as `outrider init --minutes` trains it for SmolLM2."""
    settings = {"kind": kind} | budget.sizes(kind, 49_152)
    return Method("smollm2", (f"drafter={json.dumps(settings)}", *changes))


DEER = "drafter={kind: deer, layers: 6, init_from_layers: null, block: 4, anchors: 48}"
"""At the masks' own cross entropy, as in the paper: no pass of the target."""
REAL = {
    **{kind: init(kind) for kind in ("dspark", "dflash", "dflash2", "domino", "eagle", "eagle3", "peagle", "medusa")},
    "dflash2, pairs by the text": init("dflash2", "drafter.selector_loss=ce"),
    "dspark, d-pace": init("dspark", "train.position={dpace: 0.5}"),
    "deer, first layers": Method("smollm2", (DEER.replace("null", "[0, 1, 2, 3, 4, 5]"), "train.loss={ce: 1.0}")),
    "deer, from nothing": Method("smollm2", (DEER, "train.loss={ce: 1.0}")),
}
SETUPS = {
    "demo": Setup(("stdlib",), 1, (0.0, 1.0), METHODS),
    "smollm2": Setup(tuple(INSTRUCTIONS), 2, (0.0,), REAL),
}
COLUMNS = {
    "minutes": ("demo", MINUTES), "steps": ("demo", None), "smollm2, 5 minutes": ("smollm2", 5.0),
    "smollm2, 15 minutes": ("smollm2", 15.0), "smollm2, 60 minutes": ("smollm2", 60.0),
}  # fmt: skip
"""Of the table: target, and minutes; None for `STEPS`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=list(SETUPS), default="smollm2")
    parser.add_argument("--minutes", type=lambda text: [float(each) for each in text.split(",")], default=[])
    parser.add_argument(
        "--steps", type=int, nargs="?", const=STEPS, help=f"for all methods, in place of minutes: {STEPS}"
    )
    parser.add_argument("--answers", type=int, help="train on the first so many; needs a store of its own")
    parser.add_argument("--cells", type=Path, default=CELLS, help="the store")
    parser.add_argument("--only", help="methods, separated by semicolons")
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=16, help="of each kind")
    parser.add_argument("--new", type=int, default=96, help="tokens a prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="measure nothing, say what the cells say")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out, options.cells = options.out and options.out.absolute(), options.cells.absolute()
    os.chdir(ROOT)  # recipes name their answers relative to this folder
    if not options.table:
        setup = SETUPS[options.target]
        names = options.only.split(";") if options.only else [name for name in setup.methods if name not in STUDIES]
        if unknown := [name for name in names if name not in setup.methods]:
            parser.error(f"unknown: {', '.join(unknown)}; known: {'; '.join(setup.methods)}")
        if (options.answers or options.steps not in (None, STEPS)) and options.cells == CELLS:
            parser.error("--answers and other --steps make cells that the store's can't be compared with; give --cells")
        bench = Bench(options.target, setup, options)
        budgets = (
            [None] if options.steps is not None else options.minutes or [MINUTES if options.target == "demo" else 15.0]
        )
        for minutes, seed, name in itertools.product(budgets, options.seeds, names):
            if cell_of(options.cells, options.target, name, minutes, seed) is None:
                bench.run(name, minutes, seed)
    write(table(list(cells(options.cells))), options.out)


# ── one cell ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """Trains and measures the cells of one target."""

    def __init__(self, name: str, setup: Setup, options: argparse.Namespace):
        self.name, self.setup, self.options = name, setup, options
        self.target: TransformersTarget = load_target(name, compile=False)
        self.prompts = {
            task.rpartition(":")[2]: [(one.id, as_tokens(self.target, one)) for one in prompts(task, options.prompts)]
            for task in setup.tasks
        }

    def run(self, name: str, minutes: float | None, seed: int) -> None:
        """Train and measure a cell, and add it to the store."""
        facts, checkpoint = self.train(name, minutes, seed)
        model = load_model(checkpoint, self.target)
        rows = [
            {"draft": draft, "temperature": temperature, "kind": kind, **self.measured(drafter, texts, temperature)}
            for draft, drafter in ways(model).items()
            for temperature in self.setup.temperatures
            for kind, texts in self.prompts.items()
        ]
        cell = {"target": self.name, "method": name, "minutes": minutes, "seed": seed, **facts, "rows": rows}
        with self.options.cells.open("a") as lines:
            lines.write(json.dumps(cell, separators=(",", ":")) + "\n")
        say(f"{name}, seed {seed}: " + "; ".join(f"{r['draft']}, {r['kind']} {r['tokens_per_step']:.2f}" for r in rows))

    def train(self, name: str, minutes: float | None, seed: int) -> tuple[dict[str, Any], Path]:
        """Train a method, resuming if possible; returns the cell's fields about it, and the checkpoint."""
        own = self.setup.methods[name]
        file, changes = RECIPES / f"{own.recipe}.yaml", [*own.changes, f"train.seed={seed}"]
        if own.reference is not None:
            changes.append(f"train.reference={self.train(own.reference, minutes, seed)[1]}")
        budgeted = "steps" if minutes is None else f"{minutes:g}"
        if self.options.answers:
            changes.append(f"prepare.count={self.options.answers}")
        changes.append(f"name=methods/{re.sub('[^a-z0-9]+', '-', f'{self.name} {name}')}-{budgeted}-{seed}")
        settings, _ = load(file, changes)
        if not (settings.answers / ANSWERS).exists() or len(self.answers(settings)) < (settings.prepare.count or 0):
            stages.run(file, changes, stages=["prepare"])
        steps, rates = self.options.steps, self.rates(name, settings) if minutes is not None else None
        if rates is not None:
            steps = planned(minutes * self.setup.cores, len(self.answers(settings)), rates)
        changes += [f"train.steps={steps}", "train.save_every=50", f"train.log_every={steps}"]
        say(f"{name}, seed {seed}: {steps} steps")
        stages.run(file, changes, stages=["train"])
        checkpoint = settings.folder / "checkpoint"
        model, manifest = load_model(checkpoint, self.target), manifest_of(checkpoint)
        return {
            "commit": version(), "steps": steps, "cpu_seconds": rates and round(steps * rates["step"], 1),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "texts": len(self.answers(settings)), "held_out": manifest.get("held_out"),
        }, checkpoint  # fmt: skip

    def answers(self, settings: RunConfig) -> list[Any]:
        return list(itertools.islice(iterate_answers(settings.answers / ANSWERS), settings.prepare.count))

    def rates(self, name: str, settings: RunConfig) -> dict[str, float]:
        """CPU seconds of reading a text and of a training step on one thread, measured once and kept."""
        kept = json.loads(RATES.read_text()) if RATES.exists() else {}
        if name not in kept.setdefault(self.name, {}):
            say(f"{name}: timing its steps")
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            some = self.answers(settings)[:48]
            read, step = budget.training_rates(settings, self.target, some, clock=time.process_time)
            torch.set_num_threads(threads)
            kept[self.name][name] = {"read": round(read, 4), "step": round(step, 4)}
            RATES.write_text(json.dumps(kept, indent=1) + "\n")
        rates: dict[str, float] = kept[self.name][name]
        return rates

    def measured(self, drafter: Any, texts: Sequence[tuple[str, list[int]]], temperature: float) -> dict[str, Any]:
        texts_tokens, new = [tokens for _, tokens in texts], self.options.new
        found = generate(
            self.target, texts_tokens, drafter, max_new_tokens=new, temperature=temperature, seed=0, policy="fixed"
        )
        tokens, steps = sum(len(one.tokens) for one in found), sum(one.steps for one in found)
        return {
            "tokens": tokens,
            "steps": steps,
            "tokens_per_step": tokens / steps,
            "accepted_by_depth": by_depth([kept for one in found for kept in one.accepted]),
            "per_prompt": [[key, len(one.tokens), one.steps] for (key, _), one in zip(texts, found, strict=True)],
        }


def planned(minutes: float, texts: int, rates: Mapping[str, float]) -> int:
    """Steps in these minutes of CPU time, after reading every text once."""
    return max(1, int((60 * minutes - texts * rates["read"]) / rates["step"]))


def ways(model: Any) -> dict[str, Any]:
    """How a trained model drafts: as configured and as a chain; if it scores pairs, also with and without pairs, as a
    chain and as a tree of the same number of nodes."""
    kind, config = model.config.kind, model.config
    found = {"default": model.drafter()}
    if chain := method(kind).chain:
        found["chain"] = with_settings(model, chain, kind).drafter()
    if "candidates" in type(config).model_fields:
        names = {"walk": (0, 1.0), "unary": (0, 0.0), "tree": (config.block, 1.0), "marginal tree": (config.block, 0.0)}
        for name, (nodes, share) in names.items():
            changed: Any = with_settings(model, {"nodes": nodes}, kind)
            changed.candidate_selector.share.fill_(share)
            found[name] = changed.drafter()
    return found


def by_depth(accepted: Sequence[int]) -> list[float]:
    """Share of the steps that accept a token of each depth."""
    depths = range(1, max(accepted, default=0) + 1)
    return [sum(kept >= depth for kept in accepted) / len(accepted) for depth in depths]


def version() -> str:
    """The commit this runs from."""
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ── all cells ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def cells(store: Path = CELLS) -> Iterator[dict[str, Any]]:
    """The store."""
    if store.exists():
        yield from map(json.loads, store.read_text().splitlines())


def cell_of(store: Path, target: str, name: str, minutes: float | None, seed: int) -> dict[str, Any] | None:
    key = target, name, minutes, seed
    return next((c for c in cells(store) if (c["target"], c["method"], c["minutes"], c["seed"]) == key), None)


def table(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for column, budgeted in COLUMNS.items():
        for name in SETUPS[budgeted[0]].methods:
            own = [cell for cell in found if is_in(cell, column) and cell["method"] == name]
            if own:
                rows.append(summary(name, column, own))
    orders = [order(claim, column, found) for column in COLUMNS for claim in CLAIMS]
    return {
        "training_minutes_of_one_core": MINUTES, "training_steps": STEPS, "cells": len(found), "rows": rows,
        "orders": [one for one in orders if one is not None], "lattices": lattices(found),
    }  # fmt: skip


def is_in(cell: Mapping[str, Any], column: str) -> bool:
    return (cell["target"], cell["minutes"]) == COLUMNS[column]


def summary(name: str, column: str, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method in one column: mean and spread over its seeds."""
    seconds = [cell["cpu_seconds"] for cell in own if cell["cpu_seconds"] is not None]
    said: dict[str, Any] = {
        "method": name, "column": column, "seeds": len(own), "parameters": own[0]["parameters"],
        "training_steps": round(statistics.mean(cell["steps"] for cell in own)),
        "training_cpu_seconds": seconds and round(statistics.mean(seconds)),
    }  # fmt: skip
    for temperature in (0.0, 1.0):
        rows = [rows for cell in own if (rows := rows_of(cell, "default", temperature))]
        per_step = [per_step_of(rows) for rows in rows]
        said[f"temperature_{temperature:g}"] = {
            "tokens_per_step": statistics.mean(per_step),
            "spread": statistics.stdev(per_step) if len(per_step) > 1 else None,
            "by_kind": {
                kind: statistics.mean(per_step_of(rows_of(cell, "default", temperature, kind)) for cell in own)
                for kind in {row["kind"] for row in rows[0]}
            },
            "accepted_by_depth": mean_by_depth([row["accepted_by_depth"] for one in rows for row in one]),
            "tokens": sum(row["tokens"] for one in rows for row in one),
        } if rows else None  # fmt: skip
    return said


def rows_of(cell: Mapping[str, Any], draft: str, temperature: float, kind: str | None = None) -> list[Any]:
    return [
        row for row in cell["rows"]
        if (row["draft"], row["temperature"]) == (draft, temperature) and kind in (None, row["kind"])
    ]  # fmt: skip


def per_step_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per step of all kinds together."""
    return float(sum(row["tokens"] for row in rows) / sum(row["steps"] for row in rows))


def mean_by_depth(found: Sequence[Sequence[float | None]]) -> list[float]:
    """Mean over seeds; a depth that a seed never reached counts as 0."""
    deepest = max(map(len, found), default=0)
    return [statistics.mean((shares[k] or 0.0) if k < len(shares) else 0.0 for shares in found) for k in range(deepest)]


def order(claim: Claim, column: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Whether a published ordering holds here; None if one of the two was not measured."""
    better, worse = (
        per_prompt(found, name, column, claim.temperature, "default") for name in (claim.better, claim.worse)
    )
    if (ratio := compared(better, worse)) is None:
        return None
    return {
        "better": claim.better, "worse": claim.worse, "why": claim.said, "temperature": claim.temperature,
        "column": column, "wanted": claim.ratio, **ratio,
        "differs": ratio["interval"][0] > 1 or ratio["interval"][1] < 1,
        "holds": ratio["ratio"] >= claim.ratio and ratio["interval"][0] > 1,
    }  # fmt: skip


def lattices(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Drafts of the same drafters at equal verified nodes, one over another."""
    pairs = [("walk", "unary"), ("tree", "walk"), ("tree", "marginal tree")]
    rows = []
    for column, (better, worse) in itertools.product(COLUMNS, pairs):
        for name in sorted({cell["method"] for cell in found if is_in(cell, column)}):
            sides = [per_prompt(found, name, column, 0.0, draft) for draft in (better, worse)]
            if ratio := compared(*sides):
                rows.append({"method": name, "column": column, "better": better, "worse": worse, **ratio})
    return rows


Counts = dict[int, dict[str, tuple[int, int]]]
"""Seed to prompt to (tokens, steps)."""


def compared(better: Counts, worse: Counts) -> dict[str, Any] | None:
    """Tokens per step of one over another on the seeds and prompts of both, with its 95 % interval; None if there are
    none."""
    pairs = {
        seed: [(better[seed][prompt], worse[seed][prompt]) for prompt in better[seed] if prompt in worse[seed]]
        for seed in sorted(better.keys() & worse.keys())
    }
    if not any(pairs.values()):
        return None
    noise, seeds = random.Random(7), list(pairs)
    drawn = sorted(
        ratio_of([noise.choice(pairs[seed]) for seed in noise.choices(seeds, k=len(seeds)) for _ in pairs[seed]])
        for _ in range(4000)
    )
    ratio = ratio_of([pair for of_seed in pairs.values() for pair in of_seed])
    return {"seeds": len(seeds), "ratio": ratio, "interval": [drawn[100], drawn[-101]]}


def per_prompt(found: Sequence[Mapping[str, Any]], name: str, column: str, temperature: float, draft: str) -> Counts:
    """The counts of a method's cells."""
    return {
        cell["seed"]: {
            prompt: (tokens, steps)
            for row in rows_of(cell, draft, temperature) for prompt, tokens, steps in row["per_prompt"]
        }
        for cell in found if cell["method"] == name and is_in(cell, column) and rows_of(cell, draft, temperature)
    }  # fmt: skip


def ratio_of(pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Tokens per step of the first over those of the second."""
    first, second = ([sum(column) for column in zip(*side, strict=True)] for side in zip(*pairs, strict=True))
    return (first[0] / first[1]) / (second[0] / second[1])


if __name__ == "__main__":
    main()
