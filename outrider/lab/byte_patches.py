"""What the rows of a pass over bytes know of a text: positions, and where patches end.

Both depend only on earlier bytes, so a text is never patched again.  A row of a pass sees earlier bytes through notes,
which are cached like keys, and its attention mask; so a chain, a branch of a tree and a row after a text are the same
case.

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


def free_rows(width: int) -> int:
    """How many of the first of `width` rows of a pass are not held."""
    return max(0, width - _held.get())


class Known(NamedTuple):
    """What the rows of a pass attend to."""

    allowed: Tensor
    """[R or 1, n, K] bool, their attention mask; each attends to itself."""
    positions: Tensor
    """[R, K] int64, of the columns."""

    @classmethod
    def of(cls, allowed: Tensor, notes: Tensor) -> Known:
        """notes [R, K, 2], as `notes_of` makes them."""
        high, low = notes.long().unbind(-1)  # before the sum, which bfloat16 would round
        return cls(allowed, high * HALF + low)

    def within(self, positions: Tensor, window: int) -> Tensor:
        """The mask [R, n, K] of rows at positions [R, n] that attend to the last `window` of them."""
        return self.allowed & (self.positions[:, None] > positions[..., None] - window)

    def of_patch(self, positions: Tensor, ended: Tensor) -> Tensor:
        """The mask [R, n, K] of rows that attend to their own patch.  ended [R, K]: ends of patches."""
        earlier = self.allowed & ended[:, None] & (self.positions[:, None] < positions[..., None])
        last = torch.where(earlier, self.positions[:, None], -1).amax(-1, keepdim=True)
        return self.allowed & (self.positions[:, None] > last)


def notes_of(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, n, 2] of bytes at positions [R, n]."""
    return torch.stack([positions // HALF, positions % HALF], -1).to(dtype)


def noted(cache: Any, layer: int, notes: Tensor) -> Tensor:
    """Store notes [R, n, w] as keys of this layer; returns those of all columns, [R, K, w]."""
    if cache is None:
        return notes
    stored: Tensor = cache.update(notes[:, None], notes.new_zeros(*notes[:, None].shape[:3], 1), layer)[0]
    return stored[:, 0]
