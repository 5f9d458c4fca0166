"""Captures of a whole step, and the batch that they belong to: caches and tensors that stay, from call to call.

Captures are made for each number of columns, a multiple of `COLUMNS`; whatever else a step depends on is in tensors
that stay, or in the `Wish` that the batch was made for.  B slots, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider import prepacked
from outrider.compiled import Graph, NotCompiled
from outrider.compiled.step_package import LENGTH, SLOTS, CompiledWholeStep, StepPackage
from outrider.contents import Contents
from outrider.decoding.draft import node_depths
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import draft_columns
from outrider.decoding.state import DecodeState, Request
from outrider.decoding.static import Launched, NoStatic, StaticSlots, StaticStep
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.static import rule_of
from outrider.targets import cuda_graphs
from outrider.targets.cuda_graphs import Outputs, Recorder
from outrider.targets.static_pass import StaticPass, made

MAX_CAPTURES = 8
"""Captures of a batch that are stored; texts grow, so older ones are seldom used again."""


def again(function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
    """The recorder of a device without graphs: runs the function again into the same outputs."""
    outputs = function()

    def replay() -> None:
        for there, here in zip(outputs, function(), strict=True):
            there.copy_(here)  # type: ignore[union-attr, arg-type]

    return replay, outputs


class StepGraphs:
    """One step of a batch, captured for each number of columns."""

    ahead = 1
    """Steps that are launched before the first of them is read."""

    def __init__(self, parts: StaticStep, recorder: Recorder):
        self.parts, self.recorder, self.rows = parts, recorder, [*range(len(parts.slots.anchor))]
        self.captures: dict[int, tuple[Callable[[], object], Tensor]] = {}
        self.packets: Packets | None = None
        self._sizes: list[int] = []

    def write_back(self) -> None:
        """Every slot's tensors are always up to date."""

    @torch.inference_mode()
    @prepacked.enabled()
    def launch(self, columns: int, rows: Sequence[int]) -> Launched:
        """Advance all slots, of which `rows` are live.  columns: none of their texts, with its draft, is longer."""
        columns = -(-columns // cuda_graphs.COLUMNS) * cuda_graphs.COLUMNS
        for there in self.parts.caches:
            there.open(columns, self.rows)
        sizes = [there.cache.stacks.columns for there in self.parts.caches]
        if sizes != self._sizes or len(self.captures) >= MAX_CAPTURES:  # a buffer that has grown lies elsewhere
            self.captures.clear()
        self._sizes = sizes
        if columns not in self.captures:
            self.captures[columns] = self._recorded()
        replay, found = self.captures[columns]
        replay()
        if self.packets is None:
            self.packets = Packets(found, self.ahead + 1)
        return self.packets.send(found)

    def _recorded(self) -> tuple[Callable[[], object], Tensor]:
        """A recorder runs the step, some more than once: afterwards every slot stands where it stood."""
        before = [tensor.clone() for tensor in self.parts.tensors]

        def run() -> list[Tensor | list[Tensor]]:
            return [self.parts()]

        replay, [found] = self.recorder(run)
        for tensor, was in zip(self.parts.tensors, before, strict=True):
            tensor.copy_(was)
        assert isinstance(found, Tensor)
        return replay, found


class Packets:
    """Carries what steps committed to the host, which waits when it reads and not before."""

    def __init__(self, like: Tensor, count: int):
        """count: how many may be on their way."""
        self.is_cuda, self._next = like.device.type == "cuda", 0
        self._there = [torch.empty(like.shape, dtype=like.dtype, pin_memory=self.is_cuda) for _ in range(count)]

    def send(self, packet: Tensor) -> Launched:
        """Begin the transfer."""
        there, self._next = self._there[self._next], (self._next + 1) % len(self._there)
        there.copy_(packet, non_blocking=True)
        sent = torch.cuda.Event() if self.is_cuda else None
        if sent is not None:
            sent.record()

        def read() -> dict[int, list[int]]:
            if sent is not None:
                sent.synchronize()
            return dict(enumerate(there.tolist()))

        return read


class Wish(NamedTuple):
    """What the captures of a batch depend on, its drafter aside."""

    target: Any
    slots: int
    is_greedy: bool
    has_seeded: bool
    ends: frozenset[int]
    kernels: Any
    """Of a GPU, that draw and accept; see `SamplingJudge.kernels`.  On a CPU the step's package does."""
    recorder: Recorder | None
    """None: steps are a compiled package."""

    @classmethod
    def of(cls, requests: Sequence[Request], target: Any, state: DecodeState, recorder: Recorder | None) -> Wish:
        judge, settings = state.judge, [request.sampling for request in requests]
        return cls(
            target, len(state.tokens), all(each.temperature == 0 for each in settings),
            state.shared_noise and any(each.seed is not None for each in settings), state.ends,
            judge.kernels if isinstance(judge, SamplingJudge) and target.device.type == "cuda" else None,
            recorder or _recorder(target),
        )  # fmt: skip


def _recorder(target: Any) -> Recorder | None:
    """CUDA's graphs on a CUDA device; on a CPU none where passes are compiled."""
    if target.device.type == "cuda":
        return cuda_graphs.cuda_graph
    return None if isinstance(getattr(getattr(target, "step", None), "graph", None), Graph) else again


class GraphBatch:
    """Caches of target and drafter, and the captured steps that read and write them."""

    def __init__(self, wish: Wish, drafter: Drafter, length: int):
        """length: tokens of the longest text.  Raises NoStatic where the step can't be one of tensors alone."""
        self.wish, self.drafter, self.length, target = wish, drafter, length, wish.target
        self.cache = made(target, target.allocate(wish.slots, length + draft_columns(drafter)))
        drafter.refresh()
        self.memory: Any = drafter.allocate(self.cache)
        with prepacked.enabled():
            own = drafter.static(self.memory, wish.is_greedy)
        passes = StaticPass(target, self.cache, None if own.varies else own.parents, drafter.taps)
        if not passes.is_chain and target.spec.mode != "tree":
            raise NoStatic(f"{target.spec.name} verifies chains alone, and the drafter's tree has branches")
        self.slots = StaticSlots.empty(wish.slots, target.device)
        self.slots.has_seeded = wish.has_seeded
        ends = torch.tensor(sorted(wish.ends), dtype=torch.int64, device=target.device)
        parts = StaticStep(self.slots, passes, own, rule_of(wish.is_greedy, wish.kernels), ends)
        self.step = StepGraphs(parts, wish.recorder) if wish.recorder else StepPackage(parts, self._compiled())
        self.width = own.nodes + 1
        depths = range(own.nodes) if own.varies else node_depths(own.parents)
        self.reaches = [0, *(1 + above for above in accumulate(depths, max))]
        """By `Outcome.size`, how deep the verified nodes go."""
        self.contents = Contents(nn.ModuleList(each for each in (target.model, own.model) if each is not None))
        self.contents.changes()

    def _compiled(self) -> CompiledWholeStep:
        """The package of these steps, which is made where there is none; the drafter stores it for later batches."""
        wish, holder = self.wish, self.drafter if self.drafter.limit else self.wish.target.step
        known = vars(holder).setdefault("whole_steps", {})
        key = wish.is_greedy, wish.has_seeded and not wish.is_greedy
        if key not in known:
            # few slots to trace, and never traced itself
            few = GraphBatch(wish._replace(slots=SLOTS, recorder=again), self.drafter, LENGTH)
            known[key] = CompiledWholeStep(few.step.parts, wish.is_greedy)
        try:
            known[key].get(build=True)
        except NotCompiled as error:
            raise NoStatic(str(error)) from error
        return known[key]

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        """Requests begin in these slots; their prompts were read."""
        self.step.parts.drafter.enter(rows, state)
        for row in rows:
            self.slots.enter(row, state)

    def leave(self, row: int) -> None:
        """The request in this slot is over."""
        self.step.write_back()  # before this writes some of the tensors, and the next request's prompt does
        self.slots.leave(row)
        self.drafter.free(self.memory, [row])
        self.cache.free([row])

    @classmethod
    def taken(cls, wish: Wish, drafter: Drafter, length: int) -> GraphBatch:
        """The drafter's batch of the call before, where it serves this wish too, or a new one.

        Its holder has it alone, and gives it back to `Drafter.graphs` when all its slots are free.
        """
        before = vars(drafter).pop("graphs", None)  # one of two threads gets it
        fits = before is not None and before.drafter is drafter and before.wish == wish and before.length >= length
        if before is not None and fits and not before.contents.changes():
            return before
        return cls(wish, drafter, min(1 << (length - 1).bit_length(), wish.target.spec.context))
