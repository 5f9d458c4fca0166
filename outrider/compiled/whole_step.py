"""A whole step captured once and replayed: draft, verify, accept, commit and observe without the host between them.

The host launches a step, then reads what the step before it committed: it is one step late and waits for no step that
it has just launched.  What a slot wrote after its text had ended for the host, by a stop string, is dropped.  On a
device without graphs the step runs again in place of a replay, with the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.compiled.step_graphs import GraphBatch, Wish
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import Progress, prefill
from outrider.decoding.state import DecodeState, Request
from outrider.decoding.static import Launched, NoStatic, Outcome
from outrider.sampling.judge import SamplingJudge, error_of
from outrider.sampling.settings import Sampling
from outrider.targets.cuda_graphs import Recorder


@dataclass
class WholeStep:
    """Serves requests by captured steps; `advance` is `decoding.scheduler.advance` in their place."""

    target: Any
    drafter: Drafter
    state: DecodeState
    recorder: Recorder | None = None
    """CUDA's graphs on a CUDA device and, where passes are compiled, a package on a CPU; else `again`."""
    late: deque[tuple[dict[int, int], Launched]] = field(default_factory=deque)
    """Launched steps that are not read: whose request each slot served, and what reads the packet."""

    @torch.inference_mode()
    def open(self, requests: Sequence[Request]) -> None:
        """Make caches, and all tensors that stay, or take those of the call before.  Raises NoStatic where these
        requests need the host."""
        refuse(requests, self.state)
        wish = Wish.of(requests, self.target, self.state, self.recorder)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        self.batch = GraphBatch.taken(wish, self.drafter, min(longest, self.state.context))

    def advance(self, requests: Sequence[Request]) -> Iterator[Progress]:
        """Serve these requests, for which it was opened; a step's progress comes when the next one is under way."""
        queue = deque((i, request) for i, request in enumerate(requests) if request.max_new_tokens > 0)
        serving: dict[int, int] = {}
        while queue or serving:
            if queue and len(serving) < len(self.state.tokens):
                self._admit(queue, serving)
            if any(self.state.left_of(row) > self._unread(number, row) for row, number in serving.items()):
                self._launch(serving)
                if len(self.late) <= self.batch.step.ahead:
                    continue
            for progress in self._read(serving):
                if progress.finish_reason:
                    with torch.inference_mode():
                        self.batch.leave(progress.row)
                yield progress
                if progress.finish_reason:
                    del serving[progress.row]
                    self.state.free(progress.row)
        self.late.clear()
        self.drafter.graphs = self.batch

    def _unread(self, number: int, row: int) -> int:
        """Launched steps of a slot's request that are not read; each commits at least a token."""
        return sum(served.get(row) == number for served, _ in self.late)

    @torch.inference_mode()
    def _admit(self, queue: deque[tuple[int, Request]], serving: dict[int, int]) -> None:
        state, batch = self.state, self.batch
        rows = [row for row in range(len(state.tokens)) if row not in serving][: len(queue)]
        self._set_lengths(serving)
        for row in rows:
            serving[row], request = queue.popleft()
            state.admit(row, request)
        prefill(self.target, self.drafter, batch.cache, batch.memory, state, rows)
        batch.enter(rows, state)

    def _set_lengths(self, serving: dict[int, int]) -> None:
        """Tell all caches how long their texts are at most, of which the host knows what it has read."""
        for there in self.batch.step.parts.caches:
            for row, number in serving.items():
                there.cache.lengths[row] = self._most(row, number)

    def _most(self, row: int, number: int) -> int:
        """Tokens of a slot before its anchor, at most."""
        held = len(self.state.tokens[row]) - 1
        return held + min(self._unread(number, row) * self.batch.width, self.state.left_of(row))

    def _launch(self, serving: dict[int, int]) -> None:
        self._set_lengths(serving)
        columns = max(self._most(row, number) for row, number in serving.items()) + self.batch.width
        self.late.append((dict(serving), self.batch.step.launch(columns, self.state.rows)))

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
            depth, (text, _) = self.batch.reaches[out.size], state.judge.told(row, pushed, True)
            yield Progress(number, row, tokens, min(out.accepted, pushed), out.size, depth, reason, text)


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
