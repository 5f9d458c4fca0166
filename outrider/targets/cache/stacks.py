"""The buffers of a slot cache: all layers of one shape in one tensor.

If memory is allocated page by page (`lazy_memory`), every slot has all its columns from the start, and takes memory
only for those that its text has written.  Otherwise buffers begin with few columns and double when a text needs more,
so many slots with a long context take no more memory than the longest text needs.  While buffers double, one stack at a
time is in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider.targets.cache import lazy_memory
from outrider.targets.cache.lazy_memory import Pages

FIRST = 512
"""Initial columns of a slot, if buffers double."""
KEPT = 64
"""Memory of a finished text with up to this many columns is not released: the next text will be at least as long."""


class LayerBuffer(NamedTuple):
    """A layer's storage for all slots: [slots, heads, length, size]."""

    layer: int
    holds: Literal["keys", "values", "index"]
    """`index`: keys of a sparse attention's index."""
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of a slot."""
        return self.heads * self.size * self.dtype.itemsize


class Stacks:
    """Buffers of `slots` texts of at most `length` tokens; `stacked` buffers of the same shape form one tensor."""

    def __init__(self, slots: int, length: int, stacked: int, device: torch.device):
        """device: of most buffers."""
        self.slots, self.length, self.stacked = slots, length, stacked
        self.columns = length if lazy_memory.comes_by_page(device) else min(length, FIRST)
        """Current number of columns."""
        self.layout: tuple[LayerBuffer, ...] = ()
        """Every buffer, in order of creation."""
        self.tensors: list[Tensor] = []
        """[stacked, slots, heads, columns, size] each."""
        self.pages: list[Pages | None] = []
        """The memory of each tensor; None if it is allocated as a whole."""
        self.used: list[int] = []
        """How many buffers of each tensor, from the first on, belong to a layer."""
        self._numbers: list[tuple[int, int]] = []
        """For each buffer of the layout, the index of its tensor and its index within that."""

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of a slot, all layers together."""
        return sum(buffer.column_bytes for buffer in self.layout)

    def make(self, buffer: LayerBuffer) -> Tensor:
        """A new buffer [slots, heads, columns, size], part of a stack so that a path is moved in all layers at once."""
        shape = self.stacked, self.slots, buffer.heads, self.columns, buffer.size
        kind = buffer.dtype, buffer.device
        fits = (
            n for n, (tensor, used) in enumerate(zip(self.tensors, self.used, strict=True))
            if used < self.stacked and tensor.shape == shape and (tensor.dtype, tensor.device) == kind
        )  # fmt: skip
        number = next(fits, len(self.tensors))
        if number == len(self.tensors):
            is_lazy = self.is_whole and lazy_memory.comes_by_page(buffer.device) and math.prod(shape) > 0
            pages = Pages(shape, buffer.dtype) if is_lazy else None
            self.pages.append(pages)
            # zeros, not empty: a masked column still enters the product, and 0 * NaN is NaN
            zeros = torch.zeros(shape, dtype=buffer.dtype, device=buffer.device) if pages is None else pages.tensor
            self.tensors.append(zeros)
            self.used.append(0)
        self._numbers.append((number, self.used[number]))
        self.used[number] += 1
        self.layout += (buffer,)
        return self.tensors[number][self._numbers[-1][1]]

    @property
    def is_whole(self) -> bool:
        """Whether buffers have all their columns."""
        return self.columns == self.length

    def parts(self) -> Sequence[Tensor]:
        """Every buffer, in the order of the layout."""
        return [self.tensors[number][part] for number, part in self._numbers]

    @torch.inference_mode(False)  # buffers must not become inference tensors
    @torch.no_grad()
    def grow(self, columns: int, held: int) -> None:
        """Grow to at least this many columns; the first `held` are copied.  Buffers returned earlier become invalid."""
        before, self.columns = self.columns, min(self.length, max(columns, 2 * self.columns))
        held = min(held, before)
        for number in range(len(self.tensors)):
            old = self.tensors[number]
            self.tensors[number] = old.new_zeros(*old.shape[:3], self.columns, old.shape[4])
            self.tensors[number][:, :, :, :held] = old[:, :, :, :held]
            del old

    def give_back(self, row: int, held: int) -> None:
        """Release the memory of the finished text in this row of the buffers, which had this many columns."""
        if held > KEPT:
            for tensor, pages, used in zip(self.tensors, self.pages, self.used, strict=True):
                for layer in range(used if pages else 0):
                    assert pages is not None
                    pages.give_back(tensor[layer, row])
