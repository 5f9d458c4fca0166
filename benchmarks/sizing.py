"""A training's steps per second and bytes over the wire on 1, 8 and 32 GPUs, on paper: from shapes and data sheets.

    python -m benchmarks.sizing [--target qwen3-8b] [--drafter dspark] [--texts 512] [--tokens 768] [--out FILE]

Nothing is measured.  Products run at the share of the data sheet's speed that `outrider/plan/hardware.yaml` gives for
training, links at the vendors' figures, and nothing overlaps: each step is its products, then its bytes.

    ddp            each process also reads its texts with the target; float32 gradients are summed once per step
    fsdp           the same; float32 weights are gathered twice, and gradients scattered once, in every batch
    disaggregated  some GPUs read the texts and send states to those that train, which sum gradients as in ddp
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from outrider.data.features import encodings
from outrider.drafters import find
from outrider.plan.paper import drafts, hardware
from outrider.plan.paper.anatomy import Anatomy, of_sketch, sketched
from outrider.plan.paper.weights import stored

POINTS = Path(__file__).with_name("plan_points.yaml")
NODE = 8
"""GPUs per machine."""
LINKS = {
    "machine": (450e9, "NVLink 4, H100 data sheet: 900 GB/s a GPU, half of it each way"),
    "network": (50e9, "InfiniBand NDR, 400 Gb/s: one port a GPU, each way"),
}
"""Bytes per second that a GPU sends, and the source of the figure."""
GRADIENT, WEIGHT, STATE = 4, 4, 2
"""Bytes per number: gradients and weights in float32, states in bfloat16."""


class Run(NamedTuple):
    """A training, described by its sizes."""

    target: Anatomy
    drafter: Anatomy
    taps: int
    rows: int
    """Drafted positions per text: anchors times block."""
    texts: int
    """Texts per step."""
    tokens: int
    """Tokens per text."""
    batch: int
    """Texts processed at once by one process."""

    @property
    def training_flops(self) -> float:
        """FLOPs per text: forward and both gradients of the layers; logits of draft and target, of which only the
        draft's have a gradient."""
        return self.rows * (6.0 * self.drafter.read + 6.0 * self.target.head)

    @property
    def reading_flops(self) -> float:
        """FLOPs per text: one pass of the target's layers."""
        return 2.0 * (self.target.active - self.target.head) * self.tokens

    @property
    def state_bytes(self) -> int:
        """Bytes per token: taps and the final state."""
        return (self.taps + 1) * self.target.hidden * STATE


class Step(NamedTuple):
    """One step, on paper."""

    way: str
    gpus: int
    readers: int
    """GPUs that only read texts."""
    compute_s: float
    wire_bytes: float
    """Maximum that a training GPU sends and receives, one way."""
    wire_s: float

    @property
    def steps_per_s(self) -> float:
        return 1 / (self.compute_s + self.wire_s)


def steps(run: Run, gpus: int, flops: float) -> list[Step]:
    """One step under each scheme.  flops: operations per second of one GPU in training."""
    whole = run.texts * (run.training_flops + run.reading_flops) / (gpus * flops)
    bandwidth = LINKS["machine" if gpus <= NODE else "network"][0]
    if gpus > NODE:  # a ring over machines leaves each through all of its ports, and is split over as many rings
        bandwidth = min(LINKS["machine"][0], NODE * LINKS["network"][0])
    summed = 2 * (gpus - 1) / gpus * run.drafter.parameters * GRADIENT
    batches = math.ceil(run.texts / gpus / run.batch)
    shared = (gpus - 1) / gpus * run.drafter.parameters * (2 * WEIGHT + GRADIENT) * batches
    found = [Step("ddp", gpus, 0, whole, summed, summed / bandwidth)]
    if gpus == 1:
        return found
    return [*found, Step("fsdp", gpus, 0, whole, shared, shared / bandwidth), disaggregated(run, gpus, flops)]


def disaggregated(run: Run, gpus: int, flops: float) -> Step:
    """As many readers as keep the others busy; their states go over the network."""
    share = run.reading_flops / (run.reading_flops + run.training_flops)
    readers = min(gpus - 1, max(1, round(gpus * share)))
    trainers = gpus - readers
    compute = run.texts * max(run.training_flops / trainers, run.reading_flops / readers) / flops
    states = run.texts * run.tokens * run.state_bytes / trainers
    summed = 2 * (trainers - 1) / trainers * run.drafter.parameters * GRADIENT
    received = summed / min(LINKS["machine"][0], NODE * LINKS["network"][0])
    return Step("disaggregated", gpus, readers, compute, states + summed, states / LINKS["network"][0] + received)


def known(target: str, drafter: str, texts: int, tokens: int, batch: int) -> Run:
    """A run of a target listed in `plan_points.yaml`."""
    fields = yaml.safe_load(POINTS.read_text(encoding="utf-8"))["models"][target]
    sketch = sketched(fields, target)
    own = drafts.on_paper(drafter, sketch)
    assert own.model is not None, f"{drafter} has no weights to train"
    module = find(drafter)
    with torch.device("meta"):
        model = module.Model(module.Config(kind=drafter), sketch)
    rows = min(model.config.anchors, tokens) * model.config.block
    target_on_paper = of_sketch(sketch, stored(fields, None, target))
    return Run(target_on_paper, own.model, len(model.taps), rows, texts, tokens, batch)


def table(run: Run, gpus: list[int], accelerator: str) -> str:
    """The table of docs/many_devices.md."""
    flops = hardware.find(accelerator).flops["bf16"] * hardware.efficiency().training
    lines = [
        "| GPUs | way | steps/s | texts/s | products, s | on the wire, s | bytes of a training GPU, one way |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for count in gpus:
        for step in steps(run, count, flops):
            readers = f", {step.readers} read" if step.readers else ""
            lines.append(
                f"| {count} | {step.way}{readers} | {step.steps_per_s:.2f} | {step.steps_per_s * run.texts:,.0f} | "
                f"{step.compute_s:.2f} | {step.wire_s:.3f} | {step.wire_bytes / 1e9:.1f} GB |"
            )
    return "\n".join(lines)


def stored_bytes(run: Run) -> dict[str, float]:
    """Bytes of a token's states on the wire or on a disk, by encoding."""
    kinds: tuple[encodings.Kind, ...] = ("bf16", "int8", "int4")
    return {kind: encodings.bytes_per_token(kind, run.target.hidden, run.taps) for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", help="a model of plan_points.yaml")
    parser.add_argument("--drafter", default="dspark")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--texts", type=int, default=512, help="of a step")
    parser.add_argument("--tokens", type=int, default=768, help="of a text")
    parser.add_argument("--batch", type=int, default=8, help="texts of one process at once")
    parser.add_argument("--gpus", default="1,8,32")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    run = known(options.target, options.drafter, options.texts, options.tokens, options.batch)
    gpus = [int(part) for part in options.gpus.split(",")]
    print("Computed, not measured.\n")
    print(table(run, gpus, options.hardware))
    flops = hardware.find(options.hardware).flops["bf16"] * hardware.efficiency().training
    print(
        f"\n{run.drafter.parameters / 1e6:,.0f} M weights train; a text takes {run.training_flops / 1e12:.1f} TFLOP to "
        f"learn and {run.reading_flops / 1e12:.1f} to read; a token's states "
        + ", ".join(f"{size / 1e3:.1f} kB in {kind}" for kind, size in stored_bytes(run).items())
    )
    if options.out:
        found = [step._asdict() | {"steps_per_s": step.steps_per_s} for n in gpus for step in steps(run, n, flops)]
        options.out.write_text(json.dumps({"computed": True, "run": options.__dict__ | {"out": None}, "steps": found}))


if __name__ == "__main__":
    main()
