"""One of several processes that train tiny models together.

Jobs are keyword arguments for `bench.fit`, with `name` of the run's folder, and `batch`; further keys are
`stop_at`: the step after which the last process asks for a stop, and `tokens`: the budget of a packed batch.  Every row
says how many collective `calls` there were from the step before.
"""

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from outrider.data.features.live import LiveFeatures
from outrider.processes import ALONE, Processes
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.parallel.distributed import joined
from outrider.training.trainer import train
from training.bench import SETTINGS, TAPS, make_answers, make_model
from training.long_text import gradients

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list",
    "reduce_scatter_tensor", "gather", "barrier",
)  # fmt: skip
calls: list[str] = []
"""Collectives of this process, by name."""


def count_calls() -> None:
    """Write down every collective from here on."""

    def counted(name: str) -> Any:
        original = getattr(distributed, name)

        def call(*args: Any, **named: Any) -> Any:
            calls.append(name)
            return original(*args, **named)

        return call

    for name in COLLECTIVES:
        setattr(distributed, name, counted(name))


def trained(
    target: TransformersTarget, folder: Path, job: Mapping[str, Any], processes: Processes = ALONE
) -> list[dict[str, Any]]:  # fmt: skip
    """Train one job in `folder`/name, or go on there; what every step found."""
    settings = {key: value for key, value in job.items() if key not in ("name", "kind", "stop_at", "probe")}
    config, found = Config(**(SETTINGS | {"batch": 4} | settings)), list[dict[str, Any]]()
    model = make_model(target, job.get("kind", "vanilla"))
    source = LiveFeatures(
        target, make_answers(), TAPS if model.taps else (), batch=config.batch, length=64, budget=config.tokens
    )

    def on_step(step: int, row: Mapping[str, Any]) -> None:
        found.append({"step": step, "calls": list(calls), **row})
        calls.clear()
        if step == job.get("stop_at") and processes.rank == processes.count - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def probe(model: Any) -> dict[str, Any]:
        assert processes.is_first
        return {"probe_tokens_per_step": 2.0 - sum(float(w.detach().abs().mean()) for w in model.parameters()) / 100}

    with contextlib.suppress(KeyboardInterrupt):
        train(
            model, source, config, folder / job["name"], on_step=on_step, processes=processes,
            probe=probe if job.get("probe") else None,
        )  # fmt: skip
    return found


def gathered(processes: Processes) -> dict[str, Any]:
    """What a small and a large value bring, and in how many calls."""
    calls.clear()
    small = processes.gather(("given by", processes.rank))
    counts = [len(calls)]
    large = processes.gather(b"x" * 100_000 * processes.rank)
    counts.append(len(calls) - counts[0])
    calls.clear()
    return {
        "small": small, "small_calls": counts[0], "large": [len(each) for each in large], "large_calls": counts[1],
    }  # fmt: skip


def main(target: TransformersTarget, folder: Path, jobs: list[dict[str, Any]]) -> None:
    count_calls()
    with joined() as processes:
        torch.save(gradients(target, processes.stripe(2)), folder / f"split.{processes.rank}.pt")
        (folder / f"gathered.{processes.rank}.json").write_text(json.dumps(gathered(processes)))
        for job in jobs:
            found = trained(target, folder, job, processes)
            (folder / f"{job['name']}.{processes.rank}.json").write_text(json.dumps(found))
