"""Texts side by side in the rows of a batch, so that little of a batch is padding and none is larger than a budget.

Each text keeps positions from 0 and attends to itself alone: `Batch.documents` tells the texts of a row apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Rows = list[list[int]]
"""The texts of every row of a batch, by number."""


def packed(texts: Sequence[int], lengths: Sequence[int], budget: int) -> list[Rows]:
    """Batches of at most `budget` tokens, padding included, of these texts; a longer text has a batch of its own.

    lengths: of these texts.  The longest text that is left begins a batch, whose rows are as long as it; then every
    text, the longest first, goes into the row that it fills best (best fit decreasing).
    """
    length_of = dict(zip(texts, lengths, strict=True))
    left = sorted(texts, key=lambda i: -length_of[i])
    found: list[Rows] = []
    while left:
        rows, room, later = Rows(), list[int](), list[int]()
        width = length_of[left[0]]
        most = max(1, budget // width)
        for i in left:
            length = length_of[i]
            fits = [row for row, free in enumerate(room) if free >= length]
            if fits:
                row = min(fits, key=room.__getitem__)
                rows[row].append(i)
                room[row] -= length
            elif len(rows) < most:
                rows.append([i])
                room.append(width - length)
            else:
                later.append(i)
        found.append(rows)
        left = later
    return found


def side_by_side(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Rows of texts [n, ...] joined and right-padded with zeros: [B, S, ...]."""
    return torch.nn.utils.rnn.pad_sequence(
        [row[0] if len(row) == 1 else torch.cat(list(row)) for row in parts], batch_first=True
    )
