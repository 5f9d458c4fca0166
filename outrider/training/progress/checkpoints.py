"""Measurements during training, and the checkpoints that are kept besides the newest.

runs/NAME/checkpoint/            the newest
runs/NAME/checkpoints/step-N/    the last few before it, each complete: training can resume from them
runs/NAME/checkpoints/best/      the one with the most tokens per step, without the state needed to resume
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider import checkpoint
from outrider.nn.draft_model import DraftModel
from outrider.processes import Processes
from outrider.training.config import FREE, Config
from outrider.training.progress.metrics import Metrics, Unwritten

FOLDER, BEST = "checkpoints", "best"
Probe = Callable[[DraftModel], Mapping[str, Any]]


def keep(folder: Path, step: int, most: int) -> None:
    """Copy the run's newest checkpoint to `step-N` for this step, and delete all but the last `most` copies."""
    if not most:
        return
    place = folder / FOLDER
    checkpoint.copy(folder / "checkpoint", place / f"step-{step}")
    by_step = {int(path.name[5:]): path for path in place.glob("step-*") if path.name[5:].isdigit()}
    for old in sorted(by_step)[:-most]:
        checkpoint.discard(by_step[old])


def chosen(folder: Path) -> Path:
    """The checkpoint of a run to use: the best one if it belongs to this training run, otherwise the newest."""
    best, newest = folder / FOLDER / BEST, folder / "checkpoint"
    if not all(map(checkpoint.is_there, (best, newest))):
        return newest
    theirs, mine = (checkpoint.manifest_of(place)["training"] for place in (best, newest))
    is_same = _learnt_by(theirs) == _learnt_by(mine) and theirs["step"] <= mine["step"]
    return best if is_same else newest  # the best checkpoint is left over from an earlier training run in this folder


def _learnt_by(training: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the weights depend on."""
    return {key: value for key, value in (training.get("config") or {}).items() if key not in FREE}


def tokens_per_step(row: Mapping[str, Any]) -> float | None:
    """Tokens per step of a probe: expected over thousands of held-out positions if possible, otherwise decoded on a few
    prompts."""
    held_out = row.get("held_out")
    if held_out and held_out["agreement"]:
        shares = held_out["agreement"]
        return 1 + sum(math.prod(shares[: k + 1]) for k in range(len(shares)))
    probed = row.get("probe_tokens_per_step")
    return None if probed is None else float(probed)


class Probes:
    """Measures a model while it trains, keeps the best checkpoint, and detects when it stops improving."""

    def __init__(
        self, probe: Probe | None, config: Config, folder: Path, metrics: Metrics | Unwritten, processes: Processes
    ):  # fmt: skip
        self.probe, self.config, self.folder, self.metrics = probe, config, folder, metrics
        self.processes = processes

    def is_due(self, step: int) -> bool:
        """Whether the model is measured after this step; if so, its checkpoint is written first."""
        every = self.config.probe_every
        return self.probe is not None and every > 0 and step > 0 and step % every == 0

    @property
    def is_over(self) -> bool:
        """Whether the last `patience` probes all failed to beat the best one before them."""
        by_step = self._found()
        best = max(by_step, key=lambda step: by_step[step], default=0)
        return 0 < self.config.patience <= sum(step > best for step in by_step)

    def look(self, model: DraftModel, step: int) -> None:
        """Measure the model, whose checkpoint is the newest.  The random state is preserved, so training is unaffected.

        The first process measures and sends the result to all.
        """
        if self.probe is None or step in self.metrics.probes:
            return
        state = torch.get_rng_state()
        with self.processes.weights.whole(model) as whole:
            figures = self.processes.same({} if whole is None else dict(self.probe(whole.eval())))
        torch.clear_autocast_cache()  # it holds weights that were cast without a gradient
        model.train()
        torch.set_rng_state(state)
        value = tokens_per_step(figures)
        is_best = value is not None and value > max(self._found().values(), default=0.0)
        if self.config.probe_every and is_best and self.processes.is_first:
            checkpoint.copy(self.folder / "checkpoint", self.folder / FOLDER / BEST, without=(checkpoint.TRAINING,))
        self.metrics.write({"step": step, **figures})

    def _found(self) -> dict[int, float]:
        """Tokens per step of all probes, by step."""
        values = {step: tokens_per_step(row) for step, row in self.metrics.probes.items()}
        return {step: value for step, value in values.items() if value is not None}
