"""A request may say what its answer is likely to repeat, such as the file that it asks to change: draft that first.

The draft follows the prediction from its first token on, as long as the text does.  Where the text has left it, the end
of the text is looked up in the prediction, as prompt lookup does (Saxena 2023): the longest match counts, and of equals
the nearest to where the text left.  Where that gives nothing, and in slots without a prediction, another drafter is
asked.

A slot's draft comes from one of the two.  The other drafter observes all that was committed: what the prediction
drafted is to it what another member of an ensemble drafted, see `nn.drafting.ensemble`.
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
"""Most tokens of a prediction that are drafted in one step where there is no drafter."""
INNER = 0  # the only member of the ensemble


@dataclass(kw_only=True)
class Memory(EnsembleMemory):
    """The inner drafter's memory, and where the text of each slot with a prediction stands in it."""

    alignments: dict[int, Alignment] = field(default_factory=dict)


class Predicted(Ensemble):
    """Drafts from a request's prediction, and otherwise with `drafter`, which may be None.

    vocabulary: the target's, ids outside it are not drafted.  limit: most tokens of a prediction drafted in one step.
    Where no live slot has a prediction, a step is the inner drafter's own.  Raises ConfigError for a drafter with a
    probe.
    """

    def __init__(self, drafter: Drafter | None, vocabulary: int, limit: int = 16):
        self.inner = Drafter() if drafter is None else drafter
        super().__init__([self.inner], max(limit, self.inner.limit))
        self.vocabulary, self.most = vocabulary, limit
        self.taps, self.confidence_before_draw = self.inner.taps, self.inner.confidence_before_draw

    def allocate(self, cache: Cache) -> Memory:
        return Memory(**vars(super().allocate(cache)))

    def static(self, memory: Memory, is_greedy: bool) -> StaticDrafter:
        """The inner drafter's own: a request with a prediction has no whole steps."""
        has_drafts = bool(self.inner.limit)
        drafter: StaticDrafter = self.inner.static(memory.parts[INNER], is_greedy) if has_drafts else StaticDrafter()
        return drafter

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        memory.drafts.clear()
        predicted = self._predicted(memory, state, budget)
        if not any(predicted):
            return self._asked(memory, state, budget)
        rest = [0 if tokens else most for tokens, most in zip(predicted, budget.tolist(), strict=True)]
        rest_draft = Draft.checked(self._asked(memory, state, torch.tensor(rest)), len(rest)).first(torch.tensor(rest))
        rest_draft = memory.drafts[INNER] = replace(rest_draft, origin=None)  # its nodes are numbered in their order
        draft = Draft.chain(padded(predicted, 0, state.device), torch.tensor([len(tokens) for tokens in predicted]))
        return self.join(memory, INNER, draft, rest_draft, budget, state.seeded)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        if not self.inner.limit:
            return  # whatever it observes, it drafts nothing
        if INNER in memory.drafts:
            self.tell(memory, state, draft, accepted, scores)
        else:
            self.inner.observe(memory.parts[INNER], state, draft, accepted, scores)

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        memory.drafts.clear()  # of a step that did not end
        for row in rows:
            memory.alignments.pop(row, None)

    def _asked(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        """The inner drafter's draft."""
        most = budget.clamp(max=self.inner.limit)
        if not max(most.tolist()):
            return Draft.empty(len(state.rows), state.device)
        return self.inner.propose(memory.parts[INNER], state, most)

    def _predicted(self, memory: Memory, state: DecodeState, budget: Tensor) -> list[list[int]]:
        """What is drafted for each live slot from its prediction; nothing at all where no slot has one."""
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
    """Where a growing text stands in its prediction."""

    SHORTEST, LONGEST = 3, 32
    """Tokens of the shortest match that counts, and of the longest that is looked for."""
    DOUBT = 2
    """Tokens by which the shortest match grows after one that did not go on by a single token."""
    CANDIDATES = 64
    """Most matches that are compared."""

    def __init__(self, prediction: Sequence[int], begin: int):
        """begin: tokens of the text before the prediction's first."""
        self.prediction = list(prediction)
        self.at: int | None = 0
        """The prediction's token that is expected next; None where the text has left it."""
        self._read, self._left, self._shortest = begin, 0, self.SHORTEST
        """How much of the text was read; where it left the prediction; tokens of a match that counts."""
        self._goes_on = True
        """Whether the last match went on by a token at least."""
        self._letters = ""
        """The prediction as a string of one letter a token, which is searched quickly; made when first searched."""

    def following(self, text: list[int], most: int) -> list[int]:
        """The next tokens by the prediction, at most `most`; none where the text is not found in it."""
        for token in text[self._read :]:
            self._follow(token)
        self._read = len(text)
        if self.at is None:
            self.at = self._found(text)
        return [] if self.at is None else self.prediction[self.at : self.at + most]

    def _follow(self, token: int) -> None:
        if self.at is None:
            return
        if self.at < len(self.prediction) and self.prediction[self.at] == token:
            self.at, self._goes_on = self.at + 1, True
            return
        self._shortest = self.SHORTEST if self._goes_on else min(self._shortest + self.DOUBT, self.LONGEST)
        self._left, self.at = self.at, None

    def _found(self, text: list[int]) -> int | None:
        """How much of the prediction ends as the text does."""
        if len(text) < self.SHORTEST:
            return None
        matches = [(self._match(text, end), -abs(end - self._left), end) for end in self._near(text)]
        length, _, end = max(matches, default=(0, 0, 0))
        if length < self._shortest:
            return None
        self._goes_on = False
        return end

    def _near(self, text: list[int]) -> list[int]:
        """The ends of the shortest matches before the prediction's own end: those nearest to where the text left."""
        self._letters = self._letters or _letters(self.prediction[:-1])
        pattern, ends = _letters(text[-self.SHORTEST :]), list[int]()
        left = at = max(0, self._left - self.SHORTEST)
        while (at := self._letters.find(pattern, at)) >= 0 and len(ends) < self.CANDIDATES // 2:
            ends.append(at + self.SHORTEST)
            at += 1
        at = left
        while (at := self._letters.rfind(pattern, 0, at + self.SHORTEST - 1)) >= 0 and len(ends) < self.CANDIDATES:
            ends.append(at + self.SHORTEST)
        return ends

    def _match(self, text: list[int], end: int) -> int:
        """How many last tokens of the text are those before `end` in the prediction, where the shortest match is."""
        longest = min(self.LONGEST, len(text), end)
        size = self.SHORTEST
        while size < longest and text[-1 - size] == self.prediction[end - 1 - size]:
            size += 1
        return size


def _letters(tokens: Sequence[int]) -> str:
    """One letter a token; ids beyond all letters, which no vocabulary has, share one."""
    return "".join(chr(token if 0 <= token < sys.maxunicode else sys.maxunicode) for token in tokens)


def with_predictions(drafter: Drafter, vocabulary: int) -> Drafter:
    """The same drafter for requests that say what their answers repeat, too."""
    return drafter if drafter.probe_rows else Predicted(drafter, vocabulary, drafter.limit or PREDICTED)
