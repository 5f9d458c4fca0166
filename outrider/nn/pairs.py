"""Pairs of a position's feature and the token behind it: what drafters in EAGLE's manner read.  (Li et al. 2401.15077.)

Pair i holds the taps of position i and token i + 1, stands at rotary position i, and is known once that token is: the newest
one ends in the anchor.  A draft from pair i guesses token i + 2 first.

B sequences, S tokens, S - 1 pairs, A pairs drafted from, D depths, T taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.draft import padded
from outrider.decoding.state import DecodeState
from outrider.nn.draft_model import Batch, DraftModel, drawn, labelled
from outrider.nn.serving import FeatureBuffer
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target

# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PairBuffer(FeatureBuffer):
    """Pairs of every slot that no pass has read yet: the features wait, their tokens are the text's."""

    def __init__(self, slots: int, taps: int, target: Target, dtype: torch.dtype):
        super().__init__(slots, taps, target, dtype)
        self.read = [0] * slots
        """Pairs of each slot that were taken."""

    def within(self, rows: Sequence[int], budget: Tensor) -> Tensor:
        """The budget [B], 0 where there is no pair yet: before a text's second token.  A Draft's sizes."""
        known = [bool(self.read[row] or self.count(row)) for row in rows]
        return budget.clamp(min=0) * torch.tensor(known)

    def pairs(self, rows: Sequence[int], state: DecodeState, leave: int = 0) -> tuple[Tensor, Tensor, list[int]]:
        """All that waits but the last `leave` pairs: taps [B, C, T, H], tokens [B, C], right-padded, and how many are real."""
        taps, counts = self.take(rows, [max(0, self.count(row) - leave) for row in rows])
        spans = [(row, self.read[row] + 1, count) for row, count in zip(rows, counts, strict=True)]
        tokens = [state.tokens[row][begin : begin + count] for row, begin, count in spans]
        for row, _, count in spans:
            self.read[row] += count
        return taps, padded(tokens, 0, state.device), counts

    def free(self, rows: Sequence[int]) -> None:
        super().free(rows)
        for row in rows:
            self.read[row] = 0


class PairMemory:
    """Keys and values of what every slot has read, and pairs that no pass has read yet."""

    def __init__(self, slots: int, length: int, layers: int, model: DraftModel):
        self.kept = SlotCache(slots, length, model.target.device, layers)
        self.waiting = PairBuffer(slots, max(1, len(model.taps)), model.target, model.dtype)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Drawn(NamedTuple):
    """Pairs that a batch is drafted from."""

    at: Tensor
    """[B, A] int64, ascending."""
    labels_at: Tensor
    """[B, A, D] int64, where the token that each depth guesses stands; somewhere in the text where there is none."""
    learnt: Tensor
    """[B, A, D] bool: it is of the pair's own text and one to learn, and so are those of all depths before."""


def draw(batch: Batch, most: int, depths: int) -> Drawn:
    """Up to `most` pairs a text from which there is something to learn, drawn without replacement."""
    texts = batch.documents
    follows = batch.loss_mask[:, 2:] & _whole(texts)[:, :-1] & (texts[:, 2:] == texts[:, :-2])
    at, live = drawn(follows, most)
    labels_at, learnt = labelled(batch, at, 2, depths)
    return Drawn(at, labels_at, learnt & live[..., None])


def sight(documents: Tensor) -> Tensor:
    """Which pairs a pair may look at, [B, S - 1, S - 1] bool: itself, and those before it of its own text.

    A pair whose token is another text's, or padding, is no pair: it sees itself alone and is never seen.
    """
    whole, text = _whole(documents), documents[:, 1:]
    place = torch.arange(text.shape[1], device=text.device)
    before = (text[:, :, None] == text[:, None, :]) & whole[:, None, :] & whole[:, :, None] & (place[:, None] >= place)
    return before | (place[:, None] == place)


def _whole(documents: Tensor) -> Tensor:
    """[B, S - 1] bool: position and the token behind it are of one text."""
    return (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
