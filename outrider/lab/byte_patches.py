"""Ends of patches of bytes: after the first byte that is not part of a word, and after a number of bytes of one kind.

The end depends only on earlier bytes, not on a model or later bytes, so a text is never patched again.  A row of a pass
sees earlier bytes through notes, which are cached like keys, and its attention mask; so a chain, a branch of a tree and
a row after a text are the same case.  (SpaceByte, arXiv 2404.14408; BLT, arXiv 2412.09871, ends a patch where a small
model is uncertain about the next byte.)

R rows of a batch, n bytes a row of the pass, K columns that they may attend to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.targets.hf import hooks

ALL = 2**31
"""A number above the rows of any pass."""
HALF = 128
"""Positions are stored in two numbers below 256, which are exact in bfloat16."""

_held: ContextVar[int] = ContextVar("held", default=0)


@contextmanager
def held(rows: int = ALL) -> Iterator[None]:
    """Within this context, the last `rows` rows of every pass in this thread end no patch and keep the last latent."""
    with hooks.during(_held, rows):
        yield


def of_words(ids: Tensor) -> Tensor:
    """Whether bytes are letters, digits, `_` or part of a character beyond ASCII; any shape, bool."""
    lower = ids | 32
    letters = (lower >= 97) & (lower <= 122) & (ids < 128)
    return letters | ((ids >= 48) & (ids <= 57)) | (ids == 95) | ((ids >= 128) & (ids < 256))


class Known(NamedTuple):
    """What the rows of a pass attend to."""

    allowed: Tensor
    """[R or 1, n, K] bool, their attention mask; each attends to itself."""
    positions: Tensor
    """[R, K] int64, of the columns."""
    words: Tensor
    """[R, K] bool, True for columns with a byte of a word."""

    @classmethod
    def of(cls, allowed: Tensor, notes: Tensor) -> Known:
        """notes [R, K, 2], as `notes_of` makes them."""
        high, low = notes.long().unbind(-1)  # before the sum, which bfloat16 would round
        return cls(allowed, high * HALF + low.abs() - 1, low > 0)

    def within(self, positions: Tensor, window: int) -> Tensor:
        """The mask [R, n, K] of rows at positions [R, n] that attend to the last `window` of them."""
        return self.allowed & (self.positions[:, None] > positions[..., None] - window)

    def ends(self, positions: Tensor, words: Tensor, size: int) -> Tensor:
        """[R, n] bool, True for the last row of a patch, except for rows that are held."""
        first = self._at(self.allowed, ALL).amin(-1)
        others = self._at(self.allowed & (self.words[:, None] != words[..., None]), -1).amax(-1)
        run = positions - torch.maximum(others, first - 1)  # bytes of this kind up to the row's own
        is_last = torch.where(words, run % size == 0, (run - 1) % size == 0)
        return is_last & (torch.arange(is_last.shape[1], device=is_last.device) < is_last.shape[1] - _held.get())

    def last_ended(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The column [R, n] of the last patch that ended for each row, and whether there is one.  ends [R, K]."""
        latest = self._at(self.allowed & ends[:, None], -1).max(-1)
        return latest.indices, latest.values >= 0

    def _at(self, chosen: Tensor, otherwise: int) -> Tensor:
        """Positions [R, n, K] of the chosen columns, and this number in place of the others'."""
        return torch.where(chosen, self.positions[:, None], otherwise)


def notes_of(positions: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, n, 2] of bytes at positions [R, n]."""
    low = positions % HALF + 1
    return torch.stack([positions // HALF, torch.where(words, low, -low)], -1).to(dtype)


def noted(cache: Any, layer: int, notes: Tensor) -> Tensor:
    """Store notes [R, n, w] as keys of this layer; returns those of all columns, [R, K, w]."""
    if cache is None:
        return notes
    stored: Tensor = cache.update(notes[:, None], notes.new_zeros(*notes[:, None].shape[:3], 1), layer)[0]
    return stored[:, 0]
