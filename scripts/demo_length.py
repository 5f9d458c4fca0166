"""How long `make demo` takes on this machine: the run files' usual minutes, scaled by the speed of matrix products.

python scripts/demo_length.py recipes/demo-dflash.yaml recipes/demo.yaml
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch

from outrider import machine
from outrider.machine import TRAINING, MatmulTimes
from outrider.runs.file import RunConfig, load

TRIED = MatmulTimes(
    {"float32": {"8": 1.6, "64": 8.0, TRAINING: 5.6}, "bfloat16": {"8": 0.54, "64": 1.8, TRAINING: 0.69}}
)
"""Milliseconds of the machine where the minutes were measured: two threads of an AMD EPYC with AVX-512 in bfloat16."""
STAGES = {"prepare": "answers", "train": "training", "evaluate": "measuring"}


def minutes(files: Sequence[RunConfig], here: MatmulTimes) -> dict[str, float]:
    """Minutes of each stage over all files; files that share their answers write them once."""
    scale = {"prepare": _decoding(here) / _decoding(TRIED), "train": _training(here) / _training(TRIED)}
    scale["evaluate"] = scale["prepare"]
    answers = {run.answers: run.usual_minutes.get("prepare", 0.0) for run in files}
    found = {stage: sum(run.usual_minutes.get(stage, 0.0) for run in files) for stage in ("train", "evaluate")}
    return {stage: scale[stage] * value for stage, value in ({"prepare": sum(answers.values())} | found).items()}


def line(found: dict[str, float], where: str) -> str:
    parts = ", ".join(f"{STAGES[stage]} {_rounded(value)}" for stage, value in found.items() if value)
    return f"demo      about {_rounded(sum(found.values()))} minutes on this machine: {parts}; {where}"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 3 else f"{value:.1f}"


def _decoding(times: MatmulTimes) -> float:
    """A target in float32: passes of a few rows and of many."""
    return statistics.geometric_mean([times.ms["float32"][rows] for rows in ("8", "64")])


def _training(times: MatmulTimes) -> float:
    """The faster of the two number types, which training takes."""
    return min(times.ms[name][TRAINING] for name in ("float32", "bfloat16"))


def main() -> None:
    machine.set_up_process()
    files = [load(path)[0] for path in sys.argv[1:]]
    has_gpu = torch.cuda.is_available()
    where = machine.describe("cuda" if has_gpu else "cpu")
    found = minutes(files, TRIED if has_gpu else machine.matmul_times())
    print(line(found, where + ("; where it was tried, on a CPU" if has_gpu else "")))
    print("          goes on where it was stopped; what an earlier demo has done is not done again")


if __name__ == "__main__":
    main()
