"""Rows of a probe behind each row of a pass: what they see, and where they stand."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_after(mask: Tensor, depths: Tensor, count: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention mask [B, n * count, m + n * count] bool and depths [B, n * count] of `count` rows behind each of n
    rows, which stand at depths [B, n] and see mask [B, n, m].

    They see what the row before them sees, and of one another those of the same row: all, or where causal those up to
    their own place.
    """
    slots, rows = depths.shape
    of = torch.arange(rows, device=depths.device).repeat_interleave(count)
    place = torch.arange(count, device=depths.device).repeat(rows)
    is_same_row = of[:, None] == of
    if causal:
        is_same_row = is_same_row & (place[:, None] >= place)
    mask = torch.cat([mask.repeat_interleave(count, 1), is_same_row.expand(slots, -1, -1)], 2)
    return mask, depths.repeat_interleave(count, 1) + 1 + place
