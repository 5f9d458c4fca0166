"""Short convolutions around a sublayer, whose coefficients depend on each row's input.  (DFlash 2, Inco AI 2026.)

Before and after the sublayer, every row is mixed channel by channel with the rows just before it in its block.  The
coefficients are a learnt kernel plus a projection of the sublayer's input, shared by the channels of a group.  They
reduce the loss of accuracy towards a block's end, where rows would otherwise see each other only through attention.

B sequences, n rows, H hidden size, T taps, G groups of g channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outrider.errors import DrafterError


class DynamicConvolution(nn.Module):
    """The convolutions before and after one sublayer, initially the identity.  Parameter names follow the released
    drafts."""

    def __init__(self, hidden: int, taps: int, group: int, width: int):
        """taps: number of rows mixed, including the row itself.  width: rows of a block; blocks are not mixed.

        Raises DrafterError for groups that don't divide the hidden size.
        """
        super().__init__()
        if hidden % group:
            raise DrafterError(
                f"conv_group {group} does not divide the hidden size of {hidden}; choose a number that does"
            )
        self.taps, self.group, self.width = taps, group, width
        kernel = torch.zeros(2, taps, hidden)
        kernel[:, 0] = 1.0
        self.base_kernel = nn.Parameter(kernel)
        """[2, T, H]: before and after the sublayer; tap 0 is the row itself, tap 1 the one before it."""
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, n, H], whole blocks, determines both sets of coefficients; returns [B, n, H]."""
        added = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        mixed = sublayer(self._mixed(x, 0, added))
        return self._mixed(mixed, 1, added)

    def _mixed(self, x: Tensor, side: int, added: Tensor) -> Tensor:
        """Rows of x mixed by the coefficients before (side 0) or after (1).  added [B, n, 2, T, G]."""
        kernel = self.base_kernel[side].to(x.dtype).unflatten(-1, (-1, self.group))
        blocks = x.unflatten(-1, (-1, self.group)).unflatten(1, (-1, self.width))
        coefficients = added[:, :, side].to(x.dtype).unflatten(1, (-1, self.width))[..., None]
        total = (kernel[0] + coefficients[:, :, :, 0]) * blocks
        for tap in range(1, self.taps):
            before = pad(blocks, (0, 0, 0, 0, tap, 0))[:, :, : self.width]
            total = total + (kernel[tap] + coefficients[:, :, :, tap]) * before
        return total.flatten(1, 2).flatten(-2)
