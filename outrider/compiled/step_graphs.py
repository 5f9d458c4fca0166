"""Captures of a whole step, and the batch that they belong to: caches and tensors that stay, from call to call.

Captures are made for each number of columns, a multiple of `COLUMNS`; whatever else a step depends on is in tensors
that stay, or in the `Wish` that the batch was made for.  B slots, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider import prepacked
from outrider.decoding import static
from outrider.decoding.draft import node_depths
from outrider.decoding.generate import draft_columns
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request
from outrider.decoding.static import NoStatic, StaticDrafter, StaticSlots
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.static import rule_of
from outrider.targets import cuda_graphs
from outrider.targets.cuda_graphs import Outputs, Recorder
from outrider.targets.static_pass import StaticPass, made

MAX_CAPTURES = 8
"""Captures of a batch that are stored; texts grow, so older ones are seldom used again."""
AHEAD = 1
"""Steps that are launched before the first of them is read."""


def again(function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
    """The recorder of a device without graphs: runs the function again into the same outputs."""
    outputs = function()

    def replay() -> None:
        for there, here in zip(outputs, function(), strict=True):
            there.copy_(here)  # type: ignore[union-attr, arg-type]

    return replay, outputs


class StepGraphs:
    """One step of a batch, captured for each number of columns."""

    def __init__(
        self, slots: StaticSlots, target: StaticPass, drafter: StaticDrafter, rule: static.StaticRule, ends: Tensor,
        recorder: Recorder,
    ):  # fmt: skip
        self.slots, self.target, self.drafter, self.rule, self.ends = slots, target, drafter, rule, ends
        self.recorder = recorder
        self.captures: dict[int, tuple[Callable[[], object], Tensor]] = {}
        self.caches = [(target.cache, 0), *((cache, drafter.room) for cache in drafter.caches)]
        """Every cache, and the columns that it has more than the target's."""
        self._sizes: list[int] = []

    def launch(self, columns: int) -> Tensor:
        """Advance all slots; what `static.step` returns.  columns: none of their texts, with its draft, is longer."""
        columns = min(self.target.cache.length, -(-columns // cuda_graphs.COLUMNS) * cuda_graphs.COLUMNS)
        for cache, more in self.caches:
            cache.reserve(min(cache.length, columns + more))
        sizes = [cache.stacks.columns for cache, _ in self.caches]
        if sizes != self._sizes or len(self.captures) >= MAX_CAPTURES:  # a buffer that has grown lies elsewhere
            self.captures.clear()
        self._sizes = sizes
        if columns not in self.captures:
            self.captures[columns] = self._recorded(columns)
        replay, found = self.captures[columns]
        replay()
        return found

    def _recorded(self, columns: int) -> tuple[Callable[[], object], Tensor]:
        """A recorder runs the step, some more than once: afterwards every slot stands where it stood."""
        self.slots.columns = columns
        state = [*self.slots.tensors, *self.drafter.tensors]
        before = [tensor.clone() for tensor in state]

        def run() -> list[Tensor | list[Tensor]]:
            return [static.step(self.slots, self.target, self.drafter, self.rule, self.ends)]

        replay, [found] = self.recorder(run)
        for tensor, was in zip(state, before, strict=True):
            tensor.copy_(was)
        assert isinstance(found, Tensor)
        return replay, found


class Packets:
    """Carries what steps committed to the host, which waits when it reads and not before."""

    def __init__(self, like: Tensor):
        self.is_cuda, self._next = like.device.type == "cuda", 0
        self._there = [torch.empty(like.shape, dtype=like.dtype, pin_memory=self.is_cuda) for _ in range(AHEAD + 1)]

    def send(self, packet: Tensor) -> Callable[[], list[list[int]]]:
        """Begin the transfer; returns what waits for it and reads it."""
        there, self._next = self._there[self._next], (self._next + 1) % len(self._there)
        there.copy_(packet, non_blocking=True)
        if not self.is_cuda:
            return there.tolist
        sent = torch.cuda.Event()
        sent.record()

        def read() -> list[list[int]]:
            sent.synchronize()
            return there.tolist()

        return read


class Wish(NamedTuple):
    """What the captures of a batch depend on, its drafter aside."""

    target: Any
    slots: int
    is_greedy: bool
    has_seeded: bool
    ends: frozenset[int]
    kernels: Any
    """That draw and accept; see `SamplingJudge.kernels`."""
    recorder: Recorder

    @classmethod
    def of(cls, requests: Sequence[Request], target: Any, state: DecodeState, recorder: Recorder | None) -> Wish:
        judge, settings = state.judge, [request.sampling for request in requests]
        return cls(
            target, len(state.tokens), all(each.temperature == 0 for each in settings),
            state.shared_noise and any(each.seed is not None for each in settings), state.ends,
            judge.kernels if isinstance(judge, SamplingJudge) else None,
            recorder or (cuda_graphs.cuda_graph if target.device.type == "cuda" else again),
        )  # fmt: skip


class GraphBatch:
    """Caches of target and drafter, and the captured steps that read and write them."""

    def __init__(self, wish: Wish, drafter: Drafter, length: int):
        """length: tokens of the longest text.  Raises NoStatic where the step can't be one of tensors alone."""
        self.wish, self.drafter, self.length, target = wish, drafter, length, wish.target
        self.cache = made(target, target.allocate(wish.slots, length + draft_columns(drafter)))
        self.memory: Any = drafter.allocate(self.cache)
        with prepacked.enabled():
            own = drafter.static(self.memory, wish.is_greedy)
        passes = StaticPass(target, self.cache, own.parents, drafter.taps)
        if not passes.is_chain and target.spec.mode != "tree":
            raise NoStatic(f"{target.spec.name} verifies chains alone, and the drafter's tree has branches")
        self.slots = StaticSlots.empty(wish.slots, target.device)
        self.slots.has_seeded = wish.has_seeded
        ends = torch.tensor(sorted(wish.ends), dtype=torch.int64, device=target.device)
        rule = rule_of(wish.is_greedy, wish.kernels)
        self.step = StepGraphs(self.slots, passes, own, rule, ends, wish.recorder)
        self.width = len(own.parents) + 1
        self.reaches = [0, *(1 + above for above in accumulate(node_depths(own.parents), max))]
        """By number of verified nodes, how deep they go."""
        self.packets: Packets | None = None

    def send(self, packet: Tensor) -> Callable[[], list[list[int]]]:
        """As `Packets.send`."""
        if self.packets is None:
            self.packets = Packets(packet)
        return self.packets.send(packet)

    def leave(self, row: int) -> None:
        """The request in this slot is over."""
        self.slots.leave(row)
        self.drafter.free(self.memory, [row])
        self.cache.free([row])

    @classmethod
    def taken(cls, wish: Wish, drafter: Drafter, length: int) -> GraphBatch:
        """The drafter's batch of the call before, where it serves this wish too, or a new one.

        Its holder has it alone, and gives it back to `Drafter.graphs` when all its slots are free.
        """
        before = vars(drafter).pop("graphs", None)  # one of two threads gets it
        if before is not None and before.drafter is drafter and before.wish == wish and before.length >= length:
            return before
        return cls(wish, drafter, min(1 << (length - 1).bit_length(), wish.target.spec.context))
