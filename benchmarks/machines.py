"""The demo's training here, and on an emulated machine without bfloat16 units: `python benchmarks/machines.py --out
FILE`.

Each turn is a process of its own: the first steps of recipes/demo.yaml on pieces of the standard library, in the type
that `train.dtype: auto` takes there; once more in bfloat16 where units are missing, which is what a forced choice
costs.  The emulation is torch's and oneDNN's own AVX2 code: no bfloat16 instructions, and products that torch
multiplies number by number. Float32 products may stay faster than an older CPU's.  Steps a second by turns, their
medians, and ratios to the native choice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.replay import processor
from outrider.measure.fingerprint import fingerprint

ROOT = Path(__file__).resolve().parent.parent
EMULATED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
WAYS: dict[str, tuple[dict[str, str], str, int]] = {
    "native, auto": ({}, "auto", 12),
    "emulated, auto": (EMULATED, "auto", 12),
    "emulated, bfloat16": (EMULATED, "bfloat16", 2),
}
"""Environment, train.dtype, timed steps."""
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turn", nargs=2, metavar=("DTYPE", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(turn(options.turn[0], int(options.turn[1]))))
        return
    found = compare(options.rounds)
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def compare(rounds: int) -> dict[str, Any]:
    """Every way `rounds` times, by turns."""
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, (environment, dtype, steps) in WAYS.items():
            command = [sys.executable, __file__, "--turn", dtype, str(steps)]
            done = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
            )
            turns[way].append(json.loads(done.stdout.splitlines()[-1]))
    rates = {way: statistics.median(one["steps_per_s"] for one in own) for way, own in turns.items()}
    native = next(iter(rates))
    return {
        "ways": {
            way: {"steps_per_s": rates[way], "of_native": rates[way] / rates[native], "turns": turns[way]}
            for way in WAYS
        },
        "machine": fingerprint() | processor(),
    }


def turn(dtype: str, steps: int) -> dict[str, Any]:
    """Steps a second of the demo's training, features read before."""
    import torch

    from outrider import demo, machine
    from outrider.data.answers.store import Answer
    from outrider.data.features.live import LiveFeatures
    from outrider.drafters import find
    from outrider.runs.file import load
    from outrider.targets.load import load_target
    from outrider.training.optimizers import Optimizers
    from outrider.training.step import optimise
    from outrider.training.trainer import with_dtype

    settings, _ = load(ROOT / "recipes" / "demo.yaml", [f"train.dtype={dtype}"])
    assert settings.train is not None
    target = load_target("demo", compile=False)
    config = with_dtype(settings.train, ROOT / "nowhere", target.device)
    texts = [target.encode(text)[:220] for _, text in demo.prompts("train", config.batch * (WARM_UP + steps))]
    answers = [Answer(str(i), text, [(60, len(text))]) for i, text in enumerate(texts)]
    torch.manual_seed(0)
    model = find(settings.drafter["kind"]).Model(settings.drafter_config, target).float().train()
    source = LiveFeatures(target, answers, model.taps, batch=config.batch, length=384, dtype=config.dtype)
    optimizer = Optimizers(model, config.optimizer, target.spec.vocabulary, 0.0, getattr(torch, config.dtype))
    model.begin(source.counts)
    batches, taken = [source.batch(step) for step in range(WARM_UP + steps)], []
    for step, batch in enumerate(batches):
        began = time.perf_counter()
        optimise(model, optimizer, [batch], config, step, False)
        taken.append(time.perf_counter() - began)
    return {
        "dtype": config.dtype, "steps_per_s": 1 / statistics.median(taken[WARM_UP:]),
        "products_ms": machine.matmul_times().ms,
    }  # fmt: skip


if __name__ == "__main__":
    main()
