"""Pairs of a position's feature and the token behind it: what drafters in EAGLE's manner read.  (Li et al. 2401.15077.)

Pair i holds the taps of position i and token i + 1, stands at rotary position i, and is known once that token is: the newest
one ends in the anchor.  A draft from pair i guesses token i + 2 first.

B sequences, S tokens, S - 1 pairs, A pairs drafted from, D depths, T taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.decoding.accept import Kept
from outrider.decoding.parties import Scores, Target
from outrider.decoding.state import DecodeState
from outrider.nn.draft_model import Batch, drawn, picked

# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Waiting:
    """Pairs of every slot that no pass has read yet."""

    def __init__(self, slots: int, taps: int, target: Target, dtype: torch.dtype):
        self.read = [0] * slots
        """Pairs of each slot that were taken."""
        self._taps: list[list[Tensor]] = [[] for _ in range(slots)]
        self._none = torch.empty(0, taps, target.spec.hidden, device=target.device, dtype=dtype)

    def admit(self, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        """Taps of a prompt's chunk, as a drafter's `admit` gets them."""
        assert scores.taps is not None
        for b, row in enumerate(rows):
            self._taps[row].append(scores.taps[b, : state.prefilled[row] - self.read[row] - self.count(row)])

    def observe(self, state: DecodeState, kept: Kept, scores: Scores) -> None:
        """Taps of the old anchor and of what was kept behind it; of a text's last token none is waited for."""
        assert scores.taps is not None
        for b, row in enumerate(state.rows):
            at = [0, *(node + 1 for node in kept.paths[b])][: len(state.tokens[row]) - 1 - self.read[row] - self.count(row)]
            is_straight = at == list(range(len(at)))
            self._taps[row].append(scores.taps[b, : len(at)] if is_straight else scores.taps[b, at])

    def count(self, row: int) -> int:
        return sum(map(len, self._taps[row]))

    def within(self, rows: Sequence[int], budget: Tensor) -> Tensor:
        """The budget [B], 0 where there is no pair yet: before a text's second token.  A Draft's sizes."""
        known = [bool(self.read[row] or self.count(row)) for row in rows]
        return budget.clamp(min=0) * torch.tensor(known)

    def take(self, rows: Sequence[int], state: DecodeState, leave: int = 0) -> tuple[Tensor, Tensor, list[int]]:
        """All that waits but the last `leave` pairs: taps [B, C, T, H], tokens [B, C], right-padded, and how many are real."""
        taps, tokens = [], []
        for row in rows:
            parts = self._taps[row] or [self._none]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            count, begin = max(0, len(whole) - leave), self.read[row] + 1
            taps.append(whole[:count])
            tokens.append(state.tokens[row][begin : begin + count])
            self._taps[row] = [whole[count:]] if leave else []
            self.read[row] += count
        counts = [len(own) for own in taps]
        padded = [own + [0] * (max(counts) - len(own)) for own in tokens]
        ids = torch.tensor(padded, dtype=torch.int64, device=state.device).view(len(counts), max(counts))
        return nn.utils.rnn.pad_sequence(taps, batch_first=True), ids, counts

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.read[row], self._taps[row] = 0, []


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
    length, texts = batch.tokens.shape[1], batch.documents
    follows = batch.loss_mask[:, 2:] & _whole(texts)[:, : max(0, length - 2)] & (texts[:, 2:] == texts[:, :-2])
    at, live = drawn(follows, most)
    wanted = at[..., None] + 2 + torch.arange(depths, device=at.device)
    labels_at = wanted.clamp(max=length - 1)
    own = picked(texts, labels_at) == texts.gather(1, at)[..., None]
    learnt = picked(batch.loss_mask, labels_at) & own & (wanted < length) & live[..., None]
    return Drawn(at, labels_at, learnt.cumprod(-1).bool())


def whole_blocks(block: Tensor, rows: int) -> Iterator[slice]:
    """Chunks of about `rows` rows, none of which splits a block; block [M], rows of one block side by side."""
    ends = [*(block.diff().nonzero().flatten() + 1).tolist(), len(block)]
    start = 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if end > start and (following is None or following - start > rows):
            yield slice(start, end)
            start = end


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
