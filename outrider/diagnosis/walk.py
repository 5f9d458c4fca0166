"""Expected tokens per step of a draft model over texts that are already written, without decoding them.

One pass drafts from every position of a text.  A step at a position accepts n tokens with a known probability and then
continues n + 1 positions later, so the number of steps to the end of the text is a sum over positions; it has much less
noise than counting the steps of one decoding.

P positions, D depths, M rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.accept import overlap
from outrider.nn.draft_model import Batch, DraftModel

CHUNK = 1 << 25
"""Logits computed at once."""


class Steps(NamedTuple):
    """The answer of one text."""

    tokens: float
    steps: float
    """Expected steps that generate them."""

    @classmethod
    def of(cls, chances: Tensor, positions: int) -> Steps:
        """chances: as in `expected_steps`; of a sample of the positions, their mean is taken for all."""
        if len(chances) == positions:
            return cls(float(positions), expected_steps(chances))
        return cls(float(positions), float(positions / (1 + chances.cumprod(1).sum(1)).mean()))


def total(texts: Sequence[Steps]) -> float:
    """Tokens per step over these texts."""
    return sum(text.tokens for text in texts) / sum(text.steps for text in texts)


def expected_steps(chances: Tensor) -> float:
    """Expected steps from the first position to the end.

    chances [P, D]: probability that the token of depth d is accepted if those before it are.
    """
    reached = torch.cat([torch.ones(len(chances), 1, dtype=torch.float64), chances.double().cumprod(1)], 1)
    ends = reached - torch.nn.functional.pad(reached[:, 1:], (0, 1))  # [P, D + 1], probability of n accepted tokens
    visits = [0.0] * (len(ends) + ends.shape[1])
    visits[0] = 1.0
    for position, row in enumerate(ends.tolist()):
        for accepted, chance in enumerate(row):
            visits[position + accepted + 1] += visits[position] * chance
    return sum(visits[: len(ends)])


@torch.no_grad()
def chances_by_position(model: DraftModel, batch: Batch, temperature: float) -> Tensor:
    """[P, D], the probability that each drafted token is accepted if those before it are; 0 beyond the text.

    batch: of one text, with a position per trained token.  model: drafts from every position, see `bench.everywhere`.
    A method that trains on a sample of the positions has fewer rows.
    """
    rows = model.predict(batch)
    parts = []
    for draft, target, part in rows.chunks(max(1, CHUNK // rows.vocabulary)):
        served = rows.served(part, draft)
        q, p = (draft if served is None else served).float(), target.float()
        if temperature == 0:
            parts.append((p.argmax(-1) == q.argmax(-1)).float())
        else:
            parts.append(overlap((p / temperature).softmax(-1), (q / temperature).softmax(-1)))
    accepted = torch.cat(parts) * (rows.weight > 0)
    blocks = rows.block.unique_consecutive(return_inverse=True)[1]
    chances = accepted.new_zeros(int(blocks.max()) + 1, int(rows.depth.max()) + 1)
    chances[blocks, rows.depth] = accepted
    length = getattr(model.config, "length", 1)
    if chances.shape[1] == 1 < length:  # a language model: its later tokens are the first tokens of later positions
        chances = torch.nn.functional.pad(chances[:, 0], (0, length - 1)).unfold(0, length, 1)
    return chances.cpu()
