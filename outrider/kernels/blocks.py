"""How ggml lays out quantised weights: rows of blocks, each with its own scales, and the numbers that they stand for.

The plain reference: kernels that multiply blocks are tested against it.  Facts are ggml's (ggml-common.h of llama.cpp).
R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """One kind of block."""

    values: int
    """Numbers that it stands for."""
    bytes: int


BLOCKS = {
    "F32": Block(1, 4), "F16": Block(1, 2), "BF16": Block(1, 2), "Q8_0": Block(32, 34), "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20), "Q5_0": Block(32, 22), "Q4_K": Block(256, 144), "Q6_K": Block(256, 210),
}  # fmt: skip
"""By ggml's names."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds whose blocks are single numbers."""


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of so many numbers.  Raises ValueError for a row that is not a whole number of blocks."""
    block = BLOCKS[kind]
    if columns % block.values:
        raise ValueError(f"rows of {columns} numbers can't be cut into blocks of {block.values}, as {kind} needs")
    return columns // block.values * block.bytes


class Parts(NamedTuple):
    """Blocks as integers: a weight is (number - offset) * scale + min.  n blocks, G groups of a block."""

    numbers: Tensor
    """[n, G, values of a group], uint8, or int8 where offset is 0."""
    offset: int
    scales: Tensor
    """[n, G] float32, as are the minima."""
    mins: Tensor | None

    def values(self) -> Tensor:
        """The weights [n, values of a block]: products and sums in ggml's order, equal to its own bit for bit."""
        values = (self.numbers.float() - self.offset) * self.scales[..., None]
        return (values if self.mins is None else values + self.mins[..., None]).flatten(1)


def dequantized(kind: str, blocks: Tensor, columns: int) -> Tensor:
    """The numbers float32 [R, C] that rows of blocks uint8 [R, bytes] stand for."""
    if kind in PLAIN:
        return blocks.contiguous().view(PLAIN[kind]).float().view(len(blocks), columns)
    return parts(kind, blocks).values().view(len(blocks), columns)


def parts(kind: str, blocks: Tensor) -> Parts:
    """Integers and scales of rows of blocks uint8 [R, bytes], of a kind that has them."""
    return _LAYOUTS[kind](blocks.reshape(-1, BLOCKS[kind].bytes))


def _halves(packed: Tensor) -> Tensor:
    """Nibbles [n, 2 m] of bytes [n, m]: all low ones, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], 1)


def _half_floats(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit number that begins at a byte of every block, float32 [n, 1]."""
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
    """Eight scales and eight minima [n, 8], uint8 of six bits, of the twelve bytes [n, 12] that a K type packs them
    in."""
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
