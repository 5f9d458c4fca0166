"""Stages of a target in separate processes, which communicate with the first over torch.distributed (gloo).

The first process has the first stage, the drafter and the text; the others load the target and run their layers.  A
pass is sent as its width, its start and the states before it; the reply has the states after it, the taps and, from the
last stage, the logits.

S tokens of a pass, T taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from outrider.errors import TargetError
from outrider.lab.pipeline import Stage, StageOutput
from outrider.lab.stages import LayerRange, check, ranges
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.protocol import TargetSpec

LOADING_S, MEETING_S = 300.0, 60.0
"""Timeouts for loading the target in all processes, and for connecting them."""


class RemoteStage(Stage):
    """A stage after the first, run by process `rank`."""

    def __init__(self, rank: int, target: TransformersTarget, layers: range, taps: Sequence[int]):
        self.rank, self.hidden = rank, target.spec.hidden
        self.taps = sum(tap in layers for tap in taps)
        self.logits = target.spec.vocabulary if layers.stop == target.spec.layers else 0
        self.dtype, self._width = target.model.dtype, 0

    def begin(self, tokens: Tensor, states: Tensor | None, start: int) -> None:
        assert states is not None
        self._width = tokens.shape[1]
        dist.send(torch.tensor([self._width, start]), self.rank)
        dist.send(states.contiguous(), self.rank)

    def end(self) -> StageOutput:
        width, hidden = self._width, self.hidden
        received = torch.empty(width * hidden * (1 + self.taps) + self.logits, dtype=self.dtype)
        dist.recv(received, self.rank)
        states, taps, logits = received.split([width * hidden, width * hidden * self.taps, self.logits])
        return StageOutput(
            states.view(1, width, hidden),
            taps.view(1, width, self.taps, hidden) if self.taps else None,
            logits.view(1, 1, -1) if self.logits else None,
        )

    def stop(self) -> None:
        dist.send(torch.tensor([0, 0]), self.rank)


def _run(
    rank: int, world: int, meeting: str, name: str, spec: TargetSpec, loaded: Any, settings: dict[str, Any]
) -> None:
    """A process: load the target, report errors, connect, then run passes until a stop message."""
    torch.set_num_threads(settings.pop("threads"))
    try:
        target = load_target(name, dtype=spec.dtype, compile=False)
    except TargetError as error:
        loaded.put(str(error))
        return
    same = target.spec.weights_hash == spec.weights_hash
    loaded.put(None if same else f"{name} is not the target {spec.name}: its weights are others; name the same model")
    if not same:
        return
    stage, hidden, dtype = LayerRange(target, **settings), target.spec.hidden, target.model.dtype
    _meet(rank, world, meeting)
    header = torch.empty(2, dtype=torch.int64)
    while True:
        dist.recv(header, 0)
        width, start = header.tolist()
        if not width:
            break
        states = torch.empty(1, width, hidden, dtype=dtype)
        dist.recv(states, 0)
        stage.begin(torch.zeros(1, width, dtype=torch.int64), states, start)
        dist.send(torch.cat([part.flatten() for part in stage.end() if part is not None]), 0)
    dist.destroy_process_group()


def _meet(rank: int, world: int, meeting: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=MEETING_S)
    )


@contextmanager
def in_processes(
    target: TransformersTarget, name: str, stages: int, length: int, taps: Sequence[int] = (), threads: int = 1
) -> Iterator[list[Stage]]:
    """A context with the target's stages on a CPU, all but the first in separate processes.

    name: the same model, as for `load_target`, which the other processes load.  threads: of each process.  Raises
    TargetError for a target that can't be split or is on another device, for another model's name, or if a process
    group is open.
    """
    check(target, stages)
    if target.device.type != "cpu":
        raise TargetError(f"stages in processes run on a CPU, but the target is on {target.device}; load it on the CPU")
    if dist.is_initialized():
        raise TargetError("a process group is open already; close it, or run the stages in one process")
    cuts, spawn = ranges(target.spec.layers, stages), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        workers, loaded = [], spawn.Queue()
        for rank, layers in enumerate(cuts[1:], 1):
            settings = {"layers": layers, "length": length, "taps": tuple(taps), "threads": threads}
            args = rank, stages, meeting, name, target.spec, loaded, settings
            workers.append(spawn.Process(target=_run, args=args, daemon=True))
            workers[-1].start()
        problems = [problem for _ in workers if (problem := loaded.get(timeout=LOADING_S)) is not None]
        if problems:
            for worker in workers:
                worker.terminate()
            raise TargetError(f"a stage's process has no target: {problems[0]}")
        _meet(0, stages, meeting)
        remote = [RemoteStage(rank, target, layers, taps) for rank, layers in enumerate(cuts[1:], 1)]
        try:
            yield [LayerRange(target, cuts[0], length, taps), *remote]
        finally:
            for stage in remote:
                stage.stop()
            for worker in workers:
                worker.join(10)
            dist.destroy_process_group()
