"""How ggml stores quantised weights: rows of blocks, each with its own scales; and how to dequantise them.

The plain reference, against which the kernels that multiply blocks are tested.  The layouts are those of ggml-common.h
in llama.cpp.  R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """A type of tensor: how its rows are cut into blocks."""

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
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K")
BLOCKS = {name: next(block for block in TYPES.values() if block.name == name) for name in READABLE}
"""The types that can be multiplied, by ggml's names."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose blocks are single numbers."""


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
    """[n, G] float32, as the minima."""
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
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[:, 2:6, None] >> shifts & 1).flatten(1)  # bit i is number i's
    return Parts((_halves(blocks[:, 6:]) | fifth << 4)[:, None], 16, _half_floats(blocks, 0), None)


def _q4_k(blocks: Tensor) -> Parts:
    scales, mins = six_bit_scales(blocks[:, 4:16])
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    numbers = torch.stack([packed & 15, packed >> 4], 2).view(-1, 8, 32)
    return Parts(numbers, 0, _half_floats(blocks, 0) * scales.float(), _half_floats(blocks, 2) * -mins.float())


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima [n, 8], six bits in uint8, from the twelve bytes [n, 12] of a K type."""
    first, second, third = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)


def _q6_k(blocks: Tensor) -> Parts:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = torch.cat([low & 15, low >> 4], 2)  # [n, half, quarter, 32]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    numbers = (nibbles | (high >> shifts & 3) << 4).view(-1, 16, 16)
    return Parts(numbers, 32, blocks[:, 192:208].view(torch.int8).float() * _half_floats(blocks, 208), None)


_LAYOUTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip
