"""Round matrices to the blocks of GGUF files.

Q8_0, Q4_0 and Q5_0 are rounded by llama.cpp's own library.  Q4_K, which it can't write, is rounded as llama.cpp does
without an importance matrix: of 21 scales for each 32 weights, the one with the least weighted squared error is chosen,
each with the scale and minimum of a weighted least-squares fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.blocks import BLOCKS

MODES = ("q8_0", "q4_0", "q4_k")
ENDS = "Q8_0"
"""The type of the embedding and output layer, which suffer most from fewer bits."""
NARROW = {"Q4_K": "Q5_0"}
"""The type for rows that are not a whole number of blocks."""
STEPS = torch.arange(21) / 10 - 1 + 15
"""Largest numbers with which the scales of Q4_K are tried."""
TOGETHER = 2**22
"""Maximum number of weights rounded in one call."""


def kind_of(mode: str, is_end: bool, columns: int) -> str | None:
    """The type for a matrix with rows of this many weights; None if none fits."""
    kind = ENDS if is_end else mode.upper()
    kind = NARROW.get(kind, kind) if columns % BLOCKS[kind].values else kind
    return None if columns % BLOCKS[kind].values else kind


def rounded(kind: str, weight: Tensor) -> Tensor:
    """The blocks uint8 [R, bytes] of a matrix [R, C]."""
    rows = max(1, TOGETHER // weight.shape[1])
    return torch.cat([_rounded(kind, part.detach().cpu().float()) for part in weight.split(rows)])


def _rounded(kind: str, weight: Tensor) -> Tensor:
    if kind == "Q4_K":
        return _q4_k(weight.reshape(-1, 8, 32)).view(len(weight), -1)
    import gguf.quants  # takes a moment to load

    return torch.from_numpy(gguf.quants.quantize(weight.contiguous().numpy(), gguf.GGMLQuantizationType[kind]))


def _q4_k(x: Tensor) -> Tensor:
    """x [n, 8, 32] to blocks [n, 144]."""
    scales, mins = _fitted(x)
    d, six = _six_bits(scales)
    dmin, six_mins = _six_bits(mins)
    scale, low = d.float() * six, dmin.float() * six_mins
    numbers = torch.where(scale[..., None] == 0, 0.0, (x + low[..., None]) / scale[..., None])
    numbers = numbers.round().clamp(0, 15).to(torch.uint8).view(-1, 4, 2, 32)
    packed = (numbers[:, :, 0] | numbers[:, :, 1] << 4).flatten(1)
    return torch.cat([d.view(torch.uint8), dmin.view(torch.uint8), _twelve_bytes(six, six_mins), packed], 1)


def _fitted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8], 0 or above: x is about number * scale - min, numbers from 0 to 15."""
    weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    lowest, highest = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    extent = highest - lowest
    scale, low = extent / 15, lowest
    best = _error(x, _numbers(x, low, scale), scale, low, weights)
    total, of_x = weights.sum(-1, keepdim=True), (weights * x).sum(-1, keepdim=True)
    for step in STEPS:
        numbers = _numbers(x, lowest, extent / step)
        of_numbers = (weights * numbers).sum(-1, keepdim=True)
        squares, both = (weights * numbers**2).sum(-1, keepdim=True), (weights * numbers * x).sum(-1, keepdim=True)
        determinant = total * squares - of_numbers**2
        fitted_low = (squares * of_x - of_numbers * both) / determinant
        is_above = fitted_low > 0
        fitted_scale = torch.where(is_above, both / squares, (total * both - of_x * of_numbers) / determinant)
        fitted_low = torch.where(is_above, 0.0, fitted_low)
        error = _error(x, numbers, fitted_scale, fitted_low, weights)
        is_better = (determinant > 0) & (error < best)
        best, scale, low = (
            torch.where(is_better, new, old)
            for new, old in ((error, best), (fitted_scale, scale), (fitted_low, low))
        )  # fmt: skip
    return scale[..., 0].clamp(min=0), -low[..., 0]


def _numbers(x: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, (x - low) / scale).round().clamp(0, 15)


def _error(x: Tensor, numbers: Tensor, scale: Tensor, low: Tensor, weights: Tensor) -> Tensor:
    return (weights * (numbers * scale + low - x).square()).sum(-1, keepdim=True)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [n, 8] as a factor float16 [n, 1] and integers up to 63, uint8 [n, 8]."""
    largest = values.amax(-1, keepdim=True)
    numbers = torch.where(largest == 0, 0.0, values * 63 / largest).round().clamp(max=63)
    return (largest / 63).half(), numbers.to(torch.uint8)


def _twelve_bytes(scales: Tensor, mins: Tensor) -> Tensor:
    """See `blocks.six_bit_scales`."""
    low, high = scales.split(4, -1), mins.split(4, -1)
    first, second = low[0] | low[1] >> 4 << 6, high[0] | high[1] >> 4 << 6
    return torch.cat([first, second, low[1] & 15 | (high[1] & 15) << 4], -1)
