"""Packs texts into the rows of a batch with little padding and within a token budget.

Each text has positions from 0 and attends only to itself: `Batch.documents` distinguishes the texts of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Rows = list[list[int]]
"""The texts of every row of a batch, by number."""


def packed(texts: Sequence[int], lengths: Sequence[int], budget: int) -> list[Rows]:
    """Batches of at most `budget` tokens, including padding; a longer text gets a separate batch.

    lengths: of these texts.  The longest remaining text starts a batch and sets the width of its rows; then every text,
    the longest first, goes into the row that it fills best (best fit decreasing).
    """
    length_of = dict(zip(texts, lengths, strict=True))
    remaining = sorted(texts, key=lambda i: -length_of[i])
    batches: list[Rows] = []
    while remaining:
        rows, free, later = Rows(), list[int](), list[int]()
        width = length_of[remaining[0]]
        most = max(1, budget // width)
        for i in remaining:
            length = length_of[i]
            fits = [row for row, tokens in enumerate(free) if tokens >= length]
            if fits:
                row = min(fits, key=free.__getitem__)
                rows[row].append(i)
                free[row] -= length
            elif len(rows) < most:
                rows.append([i])
                free.append(width - length)
            else:
                later.append(i)
        batches.append(rows)
        remaining = later
    return batches


def side_by_side(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """The texts [n, ...] of each row concatenated, and rows right-padded with zeros: [B, S, ...]."""
    return torch.nn.utils.rnn.pad_sequence(
        [row[0] if len(row) == 1 else torch.cat(list(row)) for row in parts], batch_first=True
    )
