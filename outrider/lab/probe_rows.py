"""Rows of a probe after each row of a pass: their mask and positions."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_after(mask: Tensor, depths: Tensor, count: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention mask [B, n * count, m + n * count] bool and depths [B, n * count] of `count` rows after each of n rows,
    which have depths [B, n] and mask [B, n, m].

    They see what their row sees and the rows after the same row: all of them, or if causal those up to themselves.
    """
    slots, rows = depths.shape
    of = torch.arange(rows, device=depths.device).repeat_interleave(count)
    place = torch.arange(count, device=depths.device).repeat(rows)
    is_same_row = of[:, None] == of
    if causal:
        is_same_row = is_same_row & (place[:, None] >= place)
    mask = torch.cat([mask.repeat_interleave(count, 1), is_same_row.expand(slots, -1, -1)], 2)
    return mask, depths.repeat_interleave(count, 1) + 1 + place
