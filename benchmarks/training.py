"""Training compared with a plain loop: tokens per second, peak memory, losses; and a plan's predictions against
measurements.

    python benchmarks/training.py [--answers runs/demo-answers] [--steps 2] [--kinds dspark,dflash,eagle3]
        [--targets demo,wide] [--parts speed,memory,plan] [--out FILE]

The plain loop, `plain_step`, is written here: texts padded to the longest of their batch, one attention mask over all
drafted blocks, logits of all rows at once, their gradients kept until the end.  Both train the same weights on the same
texts in random order, alternating after every step, and restart from equal weights, so that the losses of a step can be
compared.  Every position is drafted from, so no random choice differs.  Seconds are CPU time of one thread, which other
work on the machine hardly changes; passes of the target are not included.  `products`: share of one of our steps in
matrix products, which both loops need; `bound`: speed-up over the plain loop if nothing else took time.  `wide`: the
first four of the demo target's layers with a random vocabulary of 150,000.  Peaks are measured in a process each, above
the memory in use before a second step: weights, gradients, moments and the step's states.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from batch_time import write

from outrider import drafters, load_target
from outrider.config import build
from outrider.data.answers.store import ANSWERS, Answer, read_answers
from outrider.data.batches import TextFeatures
from outrider.data.features.live import LiveFeatures
from outrider.data.packing import packed
from outrider.data.texts import CutAnswers
from outrider.measure import peak_memory
from outrider.nn import blocks
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.drafting import recurrent
from outrider.runs.forecast import training_plan
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers
from outrider.training.step import optimise

KINDS: dict[str, dict[str, Any]] = {
    "dspark": {"layers": 2, "kv_heads": 2, "block": 7, "rank": 64, "confidence": False},
    "dflash": {"layers": 2, "kv_heads": 2, "block": 8},
    "eagle3": {"kv_heads": 2, "ttt": 5},
}
LENGTH = {"demo": 192, "wide": 128}
"""Maximum tokens per text: with the wide vocabulary the plain loop needs gigabytes."""
BATCH = {"demo": 4, "wide": 2}
"""Texts that the plain loop pads at once; a step has two such batches.  Ours keeps half of their tokens in memory."""
SIZES = (6, 12)
"""Rows of the batches against which a plan, which measures four and eight, is checked."""
PLAN_TURNS = 2
WIDE, LAYERS = 150_000, 4
TIMES, SHARE, OFF, NOISE = 2.0, 0.4, 0.15, 1e-4
"""Targets: tokens per second relative to the plain loop, peak memory relative to it, a plan's error, relative error of
a loss."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--answers", type=Path, default=Path("runs/demo-answers"))
    asked.add_argument("--steps", type=int, default=2)
    asked.add_argument("--kinds", default=",".join(KINDS))
    asked.add_argument("--targets", default=",".join(LENGTH))
    asked.add_argument("--parts", default="speed,memory,plan")
    asked.add_argument("--one", help=argparse.SUPPRESS)  # a cell whose memory is measured in this process
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    torch.set_num_threads(1)
    training_plan.clock = time.process_time
    if options.one:
        print(json.dumps(one_peak(options.answers, *options.one.split(","))))
        return
    found: dict[str, Any] = {"speed": [], "memory": [], "plan": []}
    parts = options.parts.split(",")
    for name in options.targets.split(","):
        target = target_of(name)
        for kind in options.kinds.split(","):
            bench = Bench(target, name, kind, options.answers)
            if "speed" in parts:
                found["speed"].append(said(bench.speed(options.steps)))
            if "memory" in parts:
                found["memory"].append(said(memory_of(options.answers, name, kind)))
            if "plan" in parts and name == "demo":
                found["plan"] += [said(row) for row in planned(options.answers, name, kind)]
    found["promises"] = promises(found)
    write(found, options.out)


def said(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def target_of(name: str) -> TransformersTarget:
    target = load_target("demo")
    if name == "demo":
        return target
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = LAYERS, WIDE, True
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    torch.manual_seed(0)
    return load_target(type(target.model)(config).eval().requires_grad_(False))


class Bench:
    """One method on one target, and the texts of its steps."""

    def __init__(self, target: TransformersTarget, name: str, kind: str, answers: Path):
        self.target, self.name, self.kind = target, name, kind
        module = drafters.find(kind)
        torch.manual_seed(0)
        settings = build(module.Config, {"kind": kind, "anchors": LENGTH[name], **KINDS[kind]}, "drafter")
        self.model: DraftModel = module.Model(settings, target).float().train()
        length, size = LENGTH[name], BATCH[name]
        texts = CutAnswers(read_answers(answers / ANSWERS), length)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
        self.texts: list[Answer] = [texts[i] for i in order[: 64 * size]]
        self.budget = size * length // 2
        self.config = Config(steps=100, loss={"kl": 1.0}, dtype="float32", optimizer="adamw", lr=1e-4, batch=size)
        self.source = LiveFeatures(target, self.texts, self.model.taps, batch=size, length=length, budget=self.budget)
        self.size = size

    def learner(self) -> tuple[DraftModel, Optimizers]:
        model = copy.deepcopy(self.model, {id(self.target): self.target})  # the target is shared
        return model, Optimizers(model, "adamw", self.target.spec.vocabulary, 0.0, torch.float32)

    def plain(self, step: int) -> list[Batch]:
        """Two batches of texts in random order, each padded to its longest."""
        return [self._batch([[i] for i in range(n * self.size, (n + 1) * self.size)]) for n in (2 * step, 2 * step + 1)]

    def packed(self, step: int) -> list[Batch]:
        """The same texts, with half as many tokens at once as a padded batch may have."""
        texts = range(2 * step * self.size, 2 * (step + 1) * self.size)
        lengths = [len(self.texts[i].tokens) for i in texts]
        return [self._batch(rows) for rows in packed(texts, lengths, self.budget)]

    def _batch(self, rows: list[list[int]]) -> Batch:
        return TextFeatures._joined(self.source, rows)

    def speed(self, steps: int) -> dict[str, Any]:
        """Seconds and losses of interleaved steps, from equal weights."""
        (mine, own), (theirs, other) = self.learner(), self.learner()
        seconds: dict[str, list[float]] = {"ours": [], "plain": []}
        losses, errors, fills = [], [], []
        tokens = 0
        for step in range(steps + 1):
            packed, padded = self.packed(step), self.plain(step)
            began = time.process_time()
            ours = optimise(mine, own, packed, self.config, step, False)["loss"]
            between = time.process_time()
            with plain_attention():
                plain = plain_step(theirs, other, padded, self.config, step)
            ended = time.process_time()
            losses.append([ours, plain])
            errors.append(abs(ours - plain) / abs(plain))
            if step:  # the first one is a warm-up
                seconds["ours"].append(between - began)
                seconds["plain"].append(ended - between)
                tokens += sum(int((batch.documents > 0).sum()) for batch in packed)
                fills.append([fill(packed), fill(padded)])
        share = self.share_of_products(mine, own, steps + 1)
        pace = {name: tokens / sum(own) for name, own in seconds.items()}
        ratios = [b / a for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
        return {
            "target": self.name, "kind": self.kind, "steps": steps, "tokens": tokens,
            "tokens_per_s": {name: round(value, 1) for name, value in pace.items()},
            "times": round(statistics.median(ratios), 2), "least_times": round(min(ratios), 2),
            "products": round(share, 3), "bound": round(statistics.median(ratios) / share, 2),
            "filled": [round(statistics.mean(column), 3) for column in zip(*fills, strict=True)],
            "losses": losses, "worst_loss_error": max(errors),
        }  # fmt: skip

    def share_of_products(self, model: DraftModel, optimizer: Optimizers, step: int) -> float:
        """Share of one of our steps spent in matrix products, which both loops need."""
        batches = self.packed(step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimise(model, optimizer, batches, self.config, step, False)
        parts = {one.key: one.self_cpu_time_total for one in profile.key_averages()}
        return sum(parts.get(f"aten::{name}", 0.0) for name in ("mm", "addmm", "bmm")) / sum(parts.values())


def fill(batches: Sequence[Batch]) -> float:
    """Share of the tokens that are text."""
    return sum(int((one.documents > 0).sum()) for one in batches) / sum(one.tokens.numel() for one in batches)


@contextmanager
def plain_attention() -> Any:
    """One mask over all drafted blocks, or all rollouts."""
    before = blocks.BLOCK_ROWS, recurrent.ROWS
    blocks.BLOCK_ROWS, recurrent.ROWS = {"cpu": 10**9}, 10**9
    try:
        yield
    finally:
        blocks.BLOCK_ROWS, recurrent.ROWS = before


def plain_step(model: DraftModel, optimizer: Optimizers, batches: Sequence[Batch], config: Config, step: int) -> float:
    """The step in its usual form.  Returns its loss."""
    optimizer.zero_grad()
    total = weight = 0.0
    for batch in batches:
        rows = model.predict(batch)
        for draft, target, part in rows.chunks(10**12):  # all of them
            each = torch.nn.functional.kl_div(
                draft.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
            loss = (rows.weight[part] * each).sum()
            loss.backward()
            total += loss.item()
            weight += float(rows.weight[part].sum())
        rows.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= weight
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    warm = max(1, round(config.warmup * config.last_step))
    share = (
        (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (config.last_step - warm)))
    )
    optimizer.step(config.lr * share)
    return total / weight


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def memory_of(answers: Path, name: str, kind: str) -> dict[str, Any]:
    found = {way: in_a_process(answers, name, kind, way) for way in ("ours", "plain")}
    return {
        "target": name, "kind": kind, "peak_bytes": found,
        "share": round(found["ours"] / found["plain"], 3),
    }  # fmt: skip


def in_a_process(answers: Path, *cell: str) -> Any:
    command = [sys.executable, __file__, "--answers", str(answers), "--one", ",".join(cell)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def one_peak(answers: Path, name: str, kind: str, way: str, rows: str = "") -> Any:
    bench = Bench(target_of(name), name, kind, answers)
    if way == "plan":
        return prediction(bench)
    if way == "rows":
        return real_step(bench, int(rows))
    (model, optimizer), first = bench.learner(), True
    for step in range(2):
        batches = bench.packed(step) if way == "ours" else bench.plain(step)
        if not first:
            peak_memory.reset(bench.target.device)
            before = peak_memory.peak_bytes(bench.target.device) or 0
        if way == "ours":
            optimise(model, optimizer, batches, bench.config, step, False)
        else:
            with plain_attention():
                plain_step(model, optimizer, batches, bench.config, step)
        first = False
    return (peak_memory.peak_bytes(bench.target.device) or 0) - before


# ── the plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def planned(answers: Path, name: str, kind: str) -> list[dict[str, Any]]:
    """Predictions of two small measured steps for larger ones, and the measured times; interleaved, and the minimum is
    used, since other programs on the machine come and go."""
    turns = [
        (in_a_process(answers, name, kind, "plan"),
         {str(rows): in_a_process(answers, name, kind, "rows", str(rows)) for rows in SIZES})
        for _ in range(PLAN_TURNS)
    ]  # fmt: skip
    found = []
    for rows in SIZES:
        told, actual = (
            {key: min(turn[side][str(rows)][key] for turn in turns) for key in ("peak_bytes", "seconds")}
            for side in (0, 1)
        )
        off = {key: told[key] / actual[key] - 1 for key in told}
        found.append({"target": name, "kind": kind, "rows": rows, "predicted": told, "found": actual, "off": off})
    return found


def prediction(bench: Bench) -> dict[str, Any]:
    costs = training_plan.costs(bench.model, bench.config, bench.texts, LENGTH[bench.name])
    return {str(rows): {"peak_bytes": costs.peak_bytes(rows), "seconds": costs.seconds(rows)} for rows in SIZES}


def real_step(bench: Bench, rows: int) -> dict[str, Any]:
    """A step over this many rows of texts, other than the plan's."""
    texts = range(len(bench.texts) // 2, len(bench.texts))
    lengths = [len(bench.texts[i].tokens) for i in texts]
    batch, (model, optimizer) = bench._batch(packed(texts, lengths, rows * max(lengths))[0]), bench.learner()
    optimise(model, optimizer, [batch], bench.config, 0, False)
    found = training_plan.step_of(model, optimizer, bench.config, batch)
    return {"peak_bytes": found.peak_bytes, "seconds": found.seconds}


def promises(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[tuple[str, float, float, bool]] = []
    for row in found["speed"]:
        where = f"{row['kind']}, {row['target']}"
        rows.append((f"times the plain loop's tokens a second, {where}", TIMES, row["times"], row["times"] >= TIMES))
        error = row["worst_loss_error"]
        rows.append((f"relative error of the losses, {where}", NOISE, error, error <= NOISE))
    for row in found["memory"]:
        share = row["share"]
        rows.append((f"of the plain loop's peak, {row['kind']}, {row['target']}", SHARE, share, share <= SHARE))
    for row in found["plan"]:
        for key, off in row["off"].items():
            name = f"a plan's error of {key}, {row['kind']}, {row['rows']} rows"
            rows.append((name, OFF, abs(off), abs(off) <= OFF))
    return [dict(zip(("promise", "wanted", "found", "holds"), row, strict=True)) for row in rows]


if __name__ == "__main__":
    main()
