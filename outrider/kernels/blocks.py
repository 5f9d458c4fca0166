"""How ggml stores quantised weights (rows of blocks, each with its own scales), and how to dequantise them.

The plain reference, against which the kernels that multiply blocks are tested.  The layouts are those of ggml-common.h
in llama.cpp.  R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """A tensor type: how its rows are split into blocks."""

    name: str
    values: int
    """Weights of a block."""
    bytes: int


TYPES = {
    0: Block("F32", 1, 4), 1: Block("F16", 1, 2), 2: Block("Q4_0", 32, 18), 3: Block("Q4_1", 32, 20),
    6: Block("Q5_0", 32, 22), 7: Block("Q5_1", 32, 24), 8: Block("Q8_0", 32, 34), 9: Block("Q8_1", 32, 36),
    10: Block("Q2_K", 256, 84), 11: Block("Q3_K", 256, 110), 12: Block("Q4_K", 256, 144), 13: Block("Q5_K", 256, 176),
    14: Block("Q6_K", 256, 210), 15: Block("Q8_K", 256, 292), 16: Block("IQ2_XXS", 256, 66),
    17: Block("IQ2_XS", 256, 74), 18: Block("IQ3_XXS", 256, 98), 19: Block("IQ1_S", 256, 50),
    20: Block("IQ4_NL", 32, 18), 21: Block("IQ3_S", 256, 110), 22: Block("IQ2_S", 256, 82),
    23: Block("IQ4_XS", 256, 136), 24: Block("I8", 1, 1), 25: Block("I16", 1, 2), 26: Block("I32", 1, 4),
    27: Block("I64", 1, 8), 28: Block("F64", 1, 8), 29: Block("IQ1_M", 256, 56), 30: Block("BF16", 1, 2),
    34: Block("TQ1_0", 256, 54), 35: Block("TQ2_0", 256, 66), 39: Block("MXFP4", 32, 17), 40: Block("NVFP4", 64, 36),
    41: Block("Q1_0", 128, 18),
}  # fmt: skip
"""All types, by ggml's numbers."""
READABLE = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
BLOCKS = {name: next(block for block in TYPES.values() if block.name == name) for name in READABLE}
"""The types that can be multiplied, by ggml's names."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose blocks are single numbers."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the four bits of an IQ4 type stand for."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""MXFP4's 4-bit floats, times two."""


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of this many weights.  Raises ValueError for a row that is not a whole number of blocks."""
    block = BLOCKS[kind]
    if columns % block.values:
        raise ValueError(f"rows of {columns} weights can't be split into blocks of {block.values}, as {kind} needs")
    return columns // block.values * block.bytes


class Parts(NamedTuple):
    """Blocks as integers: a weight is (number - offset) * scale + min.  n blocks, G groups of a block."""

    numbers: Tensor
    """[n, G, values of a group], uint8, or int8 where offset is 0."""
    offset: int
    scales: Tensor
    """[n, G] float32, like the minima."""
    mins: Tensor | None

    def values(self) -> Tensor:
        """The weights [n, values of a block]: products and sums in ggml's order, bit for bit equal to its own."""
        values = (self.numbers.float() - self.offset) * self.scales[..., None]
        return (values if self.mins is None else values + self.mins[..., None]).flatten(1)


def dequantized(kind: str, blocks: Tensor, columns: int) -> Tensor:
    """The weights float32 [R, C] of rows of blocks uint8 [R, bytes]."""
    if kind in PLAIN:
        return blocks.contiguous().view(PLAIN[kind]).float().view(len(blocks), columns)
    return parts(kind, blocks).values().view(len(blocks), columns)


def parts(kind: str, blocks: Tensor) -> Parts:
    """Integers and scales of rows of blocks uint8 [R, bytes], for types that have them."""
    return _LAYOUTS[kind](blocks.reshape(-1, BLOCKS[kind].bytes))


def _halves(packed: Tensor) -> Tensor:
    """Nibbles [n, 2 m] of bytes [n, m]: first all low ones, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], 1)


def _half_floats(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit float at this byte of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, None, 2:].view(torch.int8), 0, _half_floats(blocks, 0), None)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_halves(blocks[:, 2:])[:, None], 8, _half_floats(blocks, 0), None)


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_halves(blocks[:, 4:])[:, None], 0, _half_floats(blocks, 0), _half_floats(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_fives(blocks[:, 2:])[:, None], 16, _half_floats(blocks, 0), None)


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(_fives(blocks[:, 4:])[:, None], 0, _half_floats(blocks, 0), _half_floats(blocks, 2))


def _fives(packed: Tensor) -> Tensor:
    """Numbers of 5 bits [n, 32]: the fifth bits [n, 4 bytes], then nibbles [n, 16]."""
    return _halves(packed[:, 4:]) | _shifted(packed[:, :4], 8, 1).transpose(1, 2).flatten(1) << 4


def _q2_k(blocks: Tensor) -> Parts:
    scales, mins = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return Parts(
        _pairs(blocks[:, 16:80]), 0, _half_floats(blocks, 80) * scales, _half_floats(blocks, 82) * -mins.float()
    )


def _q3_k(blocks: Tensor) -> Parts:
    highest = _shifted(blocks[:, :32], 8, 1).view(-1, 16, 16)
    low, high = _halves(blocks[:, 96:104]), _shifted(blocks[:, 104:108], 4, 2).flatten(1)
    scales = (low | high << 4).float() - 32
    return Parts(_pairs(blocks[:, 32:96]) | highest << 2, 4, _half_floats(blocks, 108) * scales, None)


def _pairs(packed: Tensor) -> Tensor:
    """Numbers of 2 bits [n, 16, 16] of bytes [n, 64]: of each 32 bytes first all lowest bits."""
    return _shifted(packed.reshape(-1, 32), 4, 2).view(-1, 16, 16)


def _q4_k(blocks: Tensor) -> Parts:
    return _k(blocks, _of_blocks(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Parts:
    return _k(blocks, _of_blocks(blocks[:, 48:]) | _shifted(blocks[:, 16:48], 8, 1) << 4)


def _k(blocks: Tensor, numbers: Tensor) -> Parts:
    """numbers [n, 8, 32]."""
    scales, mins = six_bit_scales(blocks[:, 4:16])
    return Parts(numbers, 0, _half_floats(blocks, 0) * scales.float(), _half_floats(blocks, 2) * -mins.float())


def _of_blocks(packed: Tensor) -> Tensor:
    """Nibbles [n, 8, 32] of bytes [n, 128]: of each 32 bytes first all low ones."""
    return _shifted(packed.reshape(-1, 4, 32), 2, 4).view(-1, 8, 32)


def _shifted(packed: Tensor, parts: int, bits: int) -> Tensor:
    """Numbers of this many bits [..., parts, n] of bytes [..., n]: first the lowest bits of all."""
    shifts = torch.arange(0, parts * bits, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return packed[..., None, :] >> shifts & (1 << bits) - 1


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima [n, 8], six bits in uint8, from the twelve bytes [n, 12] of a K type."""
    first, second, third = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)


def _q6_k(blocks: Tensor) -> Parts:
    low = _shifted(blocks[:, :128].reshape(-1, 2, 64), 2, 4).view(-1, 16, 16)
    high = _pairs(blocks[:, 128:192])
    return Parts(low | high << 4, 32, blocks[:, 192:208].view(torch.int8).float() * _half_floats(blocks, 208), None)


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(_listed(IQ4, _halves(blocks[:, 2:]))[:, None], 0, _half_floats(blocks, 0), None)


def _iq4_xs(blocks: Tensor) -> Parts:
    high = _shifted(blocks[:, 2:4], 4, 2).transpose(1, 2).flatten(1)
    low = _shifted(blocks[:, 4:8], 2, 4).transpose(1, 2).flatten(1)
    scales = (low | high << 4).float() - 32
    numbers = _listed(IQ4, _halves(blocks[:, 8:].reshape(-1, 16))).view(-1, 8, 32)
    return Parts(numbers, 0, _half_floats(blocks, 0) * scales, None)


def _mxfp4(blocks: Tensor) -> Parts:
    exponent = blocks[:, :1].to(torch.int32)
    scales = torch.where(exponent < 2, 0x200000 << exponent, exponent - 1 << 23).view(torch.float32)
    return Parts(_listed(E2M1, _halves(blocks[:, 1:]))[:, None], 0, scales, None)


def _listed(numbers: tuple[int, ...], at: Tensor) -> Tensor:
    """The int8 numbers at these places, uint8."""
    return torch.tensor(numbers, dtype=torch.int8, device=at.device)[at.int()]


_LAYOUTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
