"""A drafter that looks the end of each slot's text up in a memory of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import trees
from outrider.retrieval.texts import Text, Tries


class Lookup(Drafter, ABC):
    """A method says what a request's text is looked up in; it is made when first asked for and goes with the request."""

    def __init__(self, limit: int, tries: Tries):
        self.limit, self.tries = limit, tries

    @abstractmethod
    def text(self, tenant: str) -> Text:
        """For a new text of this tenant."""

    def allocate(self, cache: Cache) -> list[Text | None]:
        return [None] * cache.slots

    def propose(self, memory: list[Text | None], state: DecodeState, budget: Tensor) -> Draft:
        found = [
            self._read(memory, state, row).propose(state.tokens[row], min(most, self.limit))
            for row, most in zip(state.rows, budget.tolist(), strict=True)
        ]
        return trees.of_lists([own.tokens for own in found], [own.parents for own in found], state.device)

    def observe(self, memory: list[Text | None], state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        """Others find what was committed at once, also where the text ends here."""
        if self.tries.shared:
            for row in state.rows:
                self._read(memory, state, row)

    def free(self, memory: list[Text | None], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None

    def _read(self, memory: list[Text | None], state: DecodeState, row: int) -> Text:
        """The slot's text, everything committed read."""
        text = memory[row] = memory[row] or self.text(state.requests[row].tenant)
        text.read(state.tokens[row])
        return text
