"""What drafters remember that read one state a slot: the target's, before the anchor.

B live slots, R rows of a pass, S tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.targets.protocol import Target


class LastStates:
    """The target's hidden state of the last token that it read in every slot."""

    def __init__(self, slots: int, target: Target, dtype: torch.dtype):
        self.hidden = torch.zeros(slots, target.spec.hidden, device=target.device, dtype=dtype)
        """[slots, H]; 0 before the first token."""
        self.known = [False] * slots

    def admit(self, rows: Sequence[int], scores: Scores, lengths: Sequence[int]) -> None:
        """Of a prompt's chunk, of which lengths[i] tokens are real."""
        self._keep(rows, scores.hidden, [length - 1 for length in lengths])

    def observe(self, rows: Sequence[int], scores: Scores, accepted: Accepted) -> None:
        """Of the verified pass, the last row that stays."""
        self._keep(rows, scores.hidden, [accepted.rows(b)[-1] for b in range(len(rows))])

    def within(self, rows: Sequence[int], budget: Tensor) -> Tensor:
        """The budget [B], 0 where no state is known yet: behind a text's first token."""
        return budget * torch.tensor([self.known[row] for row in rows])

    def free(self, rows: Sequence[int]) -> None:
        self.hidden[list(rows)] = 0
        for row in rows:
            self.known[row] = False

    def _keep(self, rows: Sequence[int], states: Tensor, at: Sequence[int]) -> None:
        """Remember states[b, at[b]] of [R, S, H]."""
        self.hidden[list(rows)] = states[list(range(len(rows))), list(at)].to(self.hidden)
        for row in rows:
            self.known[row] = True


class StateDrafter(Drafter):
    """A drafter that begins with these states; its memory is `LastStates`."""

    def admit(
        self, memory: LastStates, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        memory.admit(rows, scores, lengths)

    def observe(self, memory: LastStates, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        memory.observe(state.rows, scores, kept)

    def free(self, memory: LastStates, rows: Sequence[int]) -> None:
        memory.free(rows)
