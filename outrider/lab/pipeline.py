"""Pipelined decoding: stages of the target work on successive tokens of one text at once; a drafter keeps them busy.
(Speculative Pipeline Decoding, arXiv 2605.30852.)

In every cycle each token in flight passes one stage, and the drafter guesses one more token from the states before the
cycle, so stages and drafter can run side by side.  When a token leaves the last stage, the acceptance rule decides, on
a chain of one, whether the next token stays.  If not, all tokens after it are dropped, and the correction passes
through the stages alone.

A cycle takes as long as a stage.  It commits a token if all guesses are right, and one token in n cycles if all are
wrong: n times tokens per cycle is the paper's equivalent accept length, the speed-up if only stages cost time.

n stages, S tokens of a pass, T taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import max_prefill_chunk
from outrider.decoding.state import DecodeState, Request, Scores


class StageOutput(NamedTuple):
    """A stage's outputs for the tokens that passed it."""

    states: Tensor
    """[1, S, H], for the next stage; after the final norm for the last one."""
    taps: Tensor | None
    """[1, S, T, H] of the taps among its layers; None if there are none."""
    logits: Tensor | None = None
    """[1, 1, V] after the last token; None except for the last stage."""


class Stage(Protocol):
    """Some layers of the target, and a cache that holds what they have read of one text."""

    def begin(self, tokens: Tensor, states: Tensor | None, start: int) -> None:
        """Start to read tokens [1, S] from position `start` on, given the previous stage's `states`; earlier reads from
        there on are dropped."""

    def end(self) -> StageOutput:
        """Wait for this stage's outputs."""


class PipelineDrafter(Drafter):
    """A drafter that also guesses from states of tokens in flight."""

    def guess(
        self, memory: Any, state: DecodeState, tokens: Sequence[int], flight_taps: Sequence[Tensor]
    ) -> Tensor | None:
        """Logits [1, V] of the token after slot 0's text and these tokens in flight; None if there is no guess.

        flight_taps[i]: the taps [1, 1, T, H] available so far of the token before tokens[i].
        """
        raise NotImplementedError


class Room(NamedTuple):
    """The size of a drafter's memory, in place of the target's cache."""

    slots: int
    length: int


@dataclass
class InFlight:
    """A token on its way through the stages."""

    token: int
    q: Tensor | None = None
    """[1, V], the distribution that it was drawn from; None if it was not drawn."""
    depth: int = 0
    """Stages that it has passed."""
    states: Tensor | None = None
    taps: Tensor | None = None
    """[1, 1, T, H] of the stages that it has passed."""

    def passed(self, out: StageOutput) -> Tensor | None:
        """Record one more passed stage; returns that stage's logits."""
        self.depth, self.states = self.depth + 1, out.states
        self.taps = _joined(self.taps, out.taps)
        return out.logits


def cycles(
    stages: Sequence[Stage], drafter: PipelineDrafter, state: DecodeState, request: Request
) -> Iterator[int | None]:
    """Continue one request in slot 0 to its end; yields the token that each cycle commits, or None.

    The text is the one that the whole target would generate, greedy or sampled.
    """
    if not request.max_new_tokens:
        return
    state.admit(0, request)
    room: Any = Room(1, len(request.prompt) + request.max_new_tokens + len(stages))
    drafter.refresh()
    memory = drafter.allocate(room)
    _read_prompt(stages, drafter, memory, state)
    flight = [InFlight(state.tokens[0][-1])]
    while not state.finished[0]:
        anchor_at = len(state.tokens[0]) - 1
        for after, entry in enumerate(flight):
            tokens = torch.tensor([[entry.token]], device=state.device)
            stages[entry.depth].begin(tokens, entry.states, anchor_at + after)
        following = _guessed(drafter, memory, state, flight)
        logits = committed = None
        for entry in reversed(flight):  # the first stage runs in this process, so it comes last
            logits = entry.passed(stages[entry.depth].end())
        if logits is not None:
            committed, stays = _verified(drafter, memory, state, flight, logits)
            flight, following = (flight[1:], following) if stays else ([], InFlight(committed))
        if following is not None:
            flight.append(following)
        yield committed
    drafter.free(memory, [0])
    state.free(0)


def _read_prompt(stages: Sequence[Stage], drafter: Drafter, memory: Any, state: DecodeState) -> None:
    """Read the prompt stage after stage, except its last token, which is the first in flight."""
    while count := min(state.unread(0), max_prefill_chunk(state.device)):
        start = state.prefilled[0]
        tokens = torch.tensor([state.tokens[0][start : start + count]], device=state.device)
        states = taps = None
        for stage in stages:
            stage.begin(tokens, states, start)
            states, stage_taps, logits = stage.end()
            taps = _joined(taps, stage_taps)
        state.prefilled[0] += count
        assert states is not None and logits is not None
        drafter.admit(memory, [0], state, Scores(logits, states, taps), [count])


def _guessed(drafter: PipelineDrafter, memory: Any, state: DecodeState, flight: Sequence[InFlight]) -> InFlight | None:
    """The next token in flight: the likeliest at temperature 0, else drawn; None if there is no room."""
    if len(flight) > state.room[0]:
        return None
    logits = drafter.guess(memory, state, [entry.token for entry in flight[1:]], [entry.taps for entry in flight[:-1]])  # type: ignore[misc]
    if logits is None:
        return None
    drafted = [torch.tensor([entry.token], device=state.device) for entry in flight[1:]]
    logits = state.judge.masked(logits, drafted)
    if state.judge.temperature is None:
        return InFlight(int(logits.argmax(-1)))
    q = state.judge.distribution(logits)
    if not bool(q.isfinite().all()):  # every token is banned
        return None
    return InFlight(int(state.streams.draw(q, len(drafted), Purpose.DRAFT)), q)


def _verified(
    drafter: Drafter, memory: Any, state: DecodeState, flight: Sequence[InFlight], logits: Tensor
) -> tuple[int, bool]:
    """Commit the token after the oldest in flight, which has passed all stages; returns it, and whether the next token
    in flight is that one."""
    oldest, device = flight[0], state.device
    draft = Draft.empty(1, device)
    if len(flight) > 1:
        q = flight[1].q
        draft = Draft.chain(
            torch.tensor([[flight[1].token]], device=device), torch.tensor([1]), None if q is None else q[:, None]
        )
    assert oldest.states is not None
    rows = draft.tokens.shape[1] + 1
    # the rule also needs a row after the drafted token; its draw from that row is not used
    row_scores = Scores(logits.expand(-1, rows, -1), oldest.states.expand(-1, rows, -1), None)
    outcome = state.judge(draft, row_scores, state)
    stays = bool(outcome.paths[0])
    token = flight[1].token if stays else outcome.next_tokens[0]
    nothing = Draft.empty(1, device)
    accepted = state.commit(nothing, Accepted([[]], [token], outcome.invalid))
    scores = Scores(logits, oldest.states, oldest.taps)
    errors = state.judge.observe(accepted, [state.tokens[0]], scores)
    drafter.observe(memory, state, nothing, accepted, scores)
    for error in errors.values():
        raise error
    return token, stays


def _joined(before: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Taps [1, S, T, H] of the stages so far and of one more."""
    if before is None or more is None:
        return more if before is None else before
    return torch.cat([before, more], 2)
