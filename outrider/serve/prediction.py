"""Predicted outputs: drafts from a text that the request expects its answer to repeat, such as a file to be edited.

The draft follows the prediction from its first token on, as long as the text does.  Once the text has diverged, its end
is looked up in the prediction, as in prompt lookup (Saxena 2023): the longest match wins, and on a tie the one nearest
to the divergence.  If there is no match, and in slots without a prediction, another drafter drafts.

A slot's draft comes from one of the two.  The other drafter observes everything that was committed: to it, the
prediction's drafts come from another member of an ensemble, see `nn.drafting.ensemble`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.fast.static.step import StaticDrafter
from outrider.nn.drafting.ensemble import Ensemble, EnsembleMemory

PREDICTED = 8
"""Maximum number of tokens of a prediction drafted in one step if there is no other drafter."""
INNER = 0  # the only member of the ensemble


@dataclass(kw_only=True)
class Memory(EnsembleMemory):
    """The inner drafter's memory, and the alignment of each slot that has a prediction."""

    alignments: dict[int, Alignment] = field(default_factory=dict)


class Predicted(Ensemble):
    """Drafts from a request's prediction, and otherwise with `drafter`, which may be None.

    vocabulary: the target's; ids outside it are not drafted.  limit: most tokens of a prediction drafted in one step.
    If no live slot has a prediction, the inner drafter drafts alone.  Raises ConfigError for a drafter with a probe.
    """

    def __init__(self, drafter: Drafter | None, vocabulary: int, limit: int = 16):
        self.inner = Drafter() if drafter is None else drafter
        super().__init__([self.inner], max(limit, self.inner.limit))
        self.vocabulary, self.most = vocabulary, limit
        self.taps, self.confidence_before_draw = self.inner.taps, self.inner.confidence_before_draw

    def allocate(self, cache: Cache) -> Memory:
        return Memory(**vars(super().allocate(cache)))

    def static(self, memory: Memory, is_greedy: bool) -> StaticDrafter:
        """That of the inner drafter: a request with a prediction does not use static steps."""
        if not self.inner.limit:
            return StaticDrafter()
        drafter: StaticDrafter = self.inner.static(memory.parts[INNER], is_greedy)
        return drafter

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        memory.drafts.clear()
        predicted = self._predicted(memory, state, budget)
        if not any(predicted):
            return self._inner_draft(memory, state, budget)
        rest = torch.tensor([0 if tokens else most for tokens, most in zip(predicted, budget.tolist(), strict=True)])
        inner = Draft.checked(self._inner_draft(memory, state, rest), len(rest)).first(rest)
        inner = memory.drafts[INNER] = replace(inner, origin=None)  # its nodes are numbered in their order
        draft = Draft.chain(padded(predicted, 0, state.device), torch.tensor([len(tokens) for tokens in predicted]))
        return self.join(memory, INNER, draft, inner, budget, state.seeded)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        if not self.inner.limit:
            return  # it drafts nothing
        if INNER in memory.drafts:
            self.tell(memory, state, draft, accepted, scores)
        else:
            self.inner.observe(memory.parts[INNER], state, draft, accepted, scores)

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        memory.drafts.clear()  # left by an unfinished step
        for row in rows:
            memory.alignments.pop(row, None)

    def _inner_draft(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        """The inner drafter's draft."""
        most = budget.clamp(max=self.inner.limit)
        if not max(most.tolist()):
            return Draft.empty(len(state.rows), state.device)
        return self.inner.propose(memory.parts[INNER], state, most)

    def _predicted(self, memory: Memory, state: DecodeState, budget: Tensor) -> list[list[int]]:
        """Each live slot's draft from its prediction; [] if no slot has a prediction."""
        requests = [state.requests[row] for row in state.rows]
        if not any(len(request.prediction) for request in requests):
            return []
        drafts: list[list[int]] = []
        for row, request, most in zip(state.rows, requests, budget.tolist(), strict=True):
            if not len(request.prediction):
                drafts.append([])
                continue
            if row not in memory.alignments:
                memory.alignments[row] = Alignment(request.prediction, len(request.prompt))
            tokens = memory.alignments[row].following(state.tokens[row], min(most, self.most))
            wrong = next((n for n, token in enumerate(tokens) if not 0 <= token < self.vocabulary), len(tokens))
            drafts.append(tokens[:wrong])
        return drafts


class Alignment:
    """The position of a growing text in its prediction."""

    SHORTEST, LONGEST = 3, 32
    """Minimum and maximum number of tokens of a match."""
    DOUBT = 2
    """Tokens by which the minimum grows after a match that did not continue."""
    CANDIDATES = 64
    """Maximum number of matches that are compared."""

    def __init__(self, prediction: Sequence[int], begin: int):
        """begin: tokens of the text before the prediction."""
        self.prediction = list(prediction)
        self.at: int | None = 0
        """Index of the next token in the prediction; None after the text has diverged."""
        self._read = begin
        """Tokens of the text read so far."""
        self._left = 0
        """Where the text diverged from the prediction."""
        self._shortest = self.SHORTEST
        """Minimum number of tokens of the next match."""
        self._goes_on = True
        """The last match continued by at least one token."""
        self._letters = ""
        """The prediction as a string with one letter per token, for fast search; built on first use."""

    def following(self, text: list[int], most: int) -> list[int]:
        """The next tokens according to the prediction, at most `most`; none without a match."""
        for token in text[self._read :]:
            self._follow(token)
        self._read = len(text)
        if self.at is None:
            self.at = self._match_end(text)
        return [] if self.at is None else self.prediction[self.at : self.at + most]

    def _follow(self, token: int) -> None:
        if self.at is None:
            return
        if self.at < len(self.prediction) and self.prediction[self.at] == token:
            self.at, self._goes_on = self.at + 1, True
            return
        self._shortest = self.SHORTEST if self._goes_on else min(self._shortest + self.DOUBT, self.LONGEST)
        self._left, self.at = self.at, None

    def _match_end(self, text: list[int]) -> int | None:
        """Where the best match of the text's last tokens ends in the prediction."""
        if len(text) < self.SHORTEST:
            return None
        matches = [(self._match(text, end), -abs(end - self._left), end) for end in self._near(text)]
        length, _, end = max(matches, default=(0, 0, 0))
        if length < self._shortest:
            return None
        self._goes_on = False
        return end

    def _near(self, text: list[int]) -> list[int]:
        """Where the shortest matches end, before the prediction's end, nearest to the divergence first."""
        self._letters = self._letters or _letters(self.prediction[:-1])
        pattern = _letters(text[-self.SHORTEST :])
        ends: list[int] = []
        left = at = max(0, self._left - self.SHORTEST)
        while (at := self._letters.find(pattern, at)) >= 0 and len(ends) < self.CANDIDATES // 2:
            ends.append(at + self.SHORTEST)
            at += 1
        at = left
        while (at := self._letters.rfind(pattern, 0, at + self.SHORTEST - 1)) >= 0 and len(ends) < self.CANDIDATES:
            ends.append(at + self.SHORTEST)
        return ends

    def _match(self, text: list[int], end: int) -> int:
        """Length of the match that ends at `end`, at least SHORTEST."""
        longest = min(self.LONGEST, len(text), end)
        size = self.SHORTEST
        while size < longest and text[-1 - size] == self.prediction[end - 1 - size]:
            size += 1
        return size


def _letters(tokens: Sequence[int]) -> str:
    """One letter per token; ids beyond Unicode, which no vocabulary has, share one."""
    return "".join(chr(token if 0 <= token < sys.maxunicode else sys.maxunicode) for token in tokens)


def with_predictions(drafter: Drafter, vocabulary: int) -> Drafter:
    """The drafter, extended to draft from predictions if it has no probe."""
    return drafter if drafter.probe_rows else Predicted(drafter, vocabulary, drafter.limit or PREDICTED)
