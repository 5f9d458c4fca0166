"""A whole step captured once and replayed: draft, verify, accept, commit and observe without the host between them.

The host launches a step, then reads what the step before it committed: it is one step late and waits for no step that
it has just launched.  What a slot wrote after its text had ended for the host, by a stop string, is dropped.  Captures
are made for each number of columns, a multiple of `COLUMNS`; whatever else a step depends on is in tensors that stay.

On a device without graphs the step runs again in place of a replay, with the same tokens.

B slots, N nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outrider import prepacked
from outrider.decoding import static
from outrider.decoding.draft import node_depths
from outrider.decoding.generate import Progress, draft_columns, prefill
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request
from outrider.decoding.static import NoStatic, Outcome, StaticDrafter, StaticSlots
from outrider.sampling.judge import SamplingJudge, error_of
from outrider.sampling.settings import Sampling
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


@dataclass
class WholeStep:
    """Serves requests by captured steps; `advance` is `decoding.generate.advance` in their place."""

    target: Any
    drafter: Drafter
    state: DecodeState
    recorder: Recorder | None = None
    """CUDA's graphs on a CUDA device, else `again`."""
    late: deque[tuple[dict[int, int], Callable[[], list[list[int]]]]] = field(default_factory=deque)
    """Launched steps that are not read: whose request each slot served, and what reads the packet."""

    @torch.inference_mode()
    def open(self, requests: Sequence[Request]) -> None:
        """Make caches, and all tensors that stay.  Raises NoStatic where these requests need the host."""
        state, target, drafter = self.state, self.target, self.drafter
        refuse(requests, state)
        slots, judge = len(state.tokens), state.judge
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        length = min(longest, state.context) + draft_columns(drafter)
        self.cache = made(target, target.allocate(slots, length))
        self.memory: Any = drafter.allocate(self.cache)
        rule = rule_of(requests, judge.kernels if isinstance(judge, SamplingJudge) else None)
        is_greedy = all(request.sampling.temperature == 0 for request in requests)
        with prepacked.enabled():
            own = drafter.static(self.memory, is_greedy)
        passes = StaticPass(target, self.cache, own.parents, drafter.taps)
        if not passes.is_chain and target.spec.mode != "tree":
            raise NoStatic(f"{target.spec.name} verifies chains alone, and the drafter's tree has branches")
        self.slots = StaticSlots.empty(slots, target.device)
        self.slots.has_seeded = state.shared_noise and any(each.sampling.seed is not None for each in requests)
        ends = torch.tensor(sorted(state.ends), dtype=torch.int64, device=target.device)
        recorder = self.recorder or (cuda_graphs.cuda_graph if target.device.type == "cuda" else again)
        self.step = StepGraphs(self.slots, passes, own, rule, ends, recorder)
        self.width = len(own.parents) + 1
        self.packets: Packets | None = None
        self.reaches = [0, *(1 + above for above in accumulate(node_depths(own.parents), max))]
        """By number of verified nodes, how deep they go."""

    def advance(self, requests: Sequence[Request]) -> Iterator[Progress]:
        """Serve these requests, for which it was opened; a step's progress comes when the next one is under way."""
        queue = deque((i, request) for i, request in enumerate(requests) if request.max_new_tokens > 0)
        serving: dict[int, int] = {}
        while queue or serving:
            self._admit(queue, serving)
            if any(self.state.left_of(row) > self._unread(number, row) for row, number in serving.items()):
                self._launch(serving)
                if len(self.late) <= AHEAD:
                    continue
            for progress in self._read(serving):
                if progress.finish_reason:
                    self._free(progress.row)
                yield progress
                if progress.finish_reason:
                    del serving[progress.row]
                    self.state.free(progress.row)
        self.late.clear()

    def _unread(self, number: int, row: int) -> int:
        """Launched steps of a slot's request that are not read; each commits at least a token."""
        return sum(served.get(row) == number for served, _ in self.late)

    @torch.inference_mode()
    def _admit(self, queue: deque[tuple[int, Request]], serving: dict[int, int]) -> None:
        state, rows = self.state, list[int]()
        self._set_lengths(serving)
        for row in [row for row in range(len(state.tokens)) if row not in serving][: len(queue)]:
            serving[row], request = queue.popleft()
            state.admit(row, request)
            rows.append(row)
        if not rows:
            return
        prefill(self.target, self.drafter, self.cache, self.memory, state, rows)
        for cache, _ in self.step.caches:  # a compiled pass over the prompts may have moved them
            cache.gather([*range(len(state.tokens))])
        self.step.drafter.enter(rows, state)
        for row in rows:
            self.slots.enter(row, state)

    def _set_lengths(self, serving: dict[int, int]) -> None:
        """Tell all caches how long their texts are at most, of which the host knows what it has read."""
        for cache, _ in self.step.caches:
            for row, number in serving.items():
                cache.lengths[row] = self._most(row, number)

    def _most(self, row: int, number: int) -> int:
        """Tokens of a slot before its anchor, at most."""
        held = len(self.state.tokens[row]) - 1
        return held + min(self._unread(number, row) * self.width, self.state.left_of(row))

    @torch.inference_mode()
    def _launch(self, serving: dict[int, int]) -> None:
        self._set_lengths(serving)
        columns = max(self._most(row, number) for row, number in serving.items()) + self.width
        with prepacked.enabled():
            packet = self.step.launch(columns)
        if self.packets is None:
            self.packets = Packets(packet)
        self.late.append((dict(serving), self.packets.send(packet)))

    def _read(self, serving: dict[int, int]) -> Iterator[Progress]:
        """What the oldest launched step did to the requests that are still there."""
        served, read = self.late.popleft()
        state, found = self.state, read()
        for row, number in served.items():
            if serving.get(row) != number:
                continue
            out = Outcome.read(found[row])
            if out.is_wrong:
                raise error_of(float("nan"), False, state.requests[row], f"after {len(state.tokens[row])} tokens")
            state.invalid += out.invalid
            pushed = state.push(row, out.tokens)
            tokens, reason = out.tokens[:pushed], state.finished[row]
            by_host = pushed < len(out.tokens)  # a stop string; all other ends are found on the device
            assert not by_host or (reason == "stop" and tokens[-1] not in state.ends), "the device missed an end"
            yield Progress(number, row, tokens, min(out.accepted, pushed), self.reaches[out.size], reason)

    @torch.inference_mode()
    def _free(self, row: int) -> None:
        self.slots.leave(row)
        self.drafter.free(self.memory, [row])
        self.cache.free([row])


def refuse(requests: Sequence[Request], state: DecodeState) -> None:
    """Raises NoStatic for requests that set more than a temperature and a seed, or a rule of their own."""
    judge = state.judge
    if not isinstance(judge, SamplingJudge) or judge.rule is not None:
        raise NoStatic("its verification is another than `standard`")
    for request in requests:
        sampling = request.sampling
        plain = Sampling(temperature=sampling.temperature, seed=sampling.seed)
        if sampling != plain or request.max_draft is not None:
            raise NoStatic("a request sets more than temperature and seed")
