"""Where the rows of a pass stand, and what they may look at.

R rows of a pass, n tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Limit(NamedTuple):
    """How far a layer sees: the last `size` positions, its own included; or its own chunk of `size` positions."""

    kind: Literal["window", "chunk"]
    size: int


class Tree(NamedTuple):
    """What the tokens of a pass see of each other, where they are not one chain a row."""

    visible: Tensor
    """[R or 1, n, n] bool, the tokens that each one may look at."""
    depths: Tensor
    """[R or 1, n], each token's place counted from its row's start."""

    def of(self, row: int) -> Tree:
        """That of one row [1, n]."""
        return Tree(self.visible[row : row + 1], self.depths[row : row + 1])


class Sight(NamedTuple):
    """Where a pass stands and what its rows may look at.  Tensors alone, so that a graph can be traced through it."""

    starts: Tensor
    """[R] length of each row's slot before the pass."""
    columns: Tensor
    """[end] 0, 1, ... up to the last column that some row may look at."""
    width: int
    """Tokens a row."""

    def positions(self, depths: Tensor) -> Tensor:
        """[R, n]; depths [R or 1, n] counts from each row's start."""
        return self.starts[:, None] + depths

    def seen(self, visible: Tensor) -> Tensor:
        """[R, Q, end] bool: all before the pass, and of the pass what `visible` [R or 1, Q, n] says."""
        own, place = self._own()
        visible = visible.expand(self.starts.shape[0], -1, -1)
        inside = (own >= 0) & (own < self.width)
        return (own < 0) | (inside & visible.gather(-1, place.expand(-1, visible.shape[1], -1)))

    def near(self, limit: Limit, depths: Tensor) -> Tensor:
        """[R, n, end] bool: what a limit leaves.  Nodes of a tree stand where their depth says, not where they are written."""
        own, place = self._own()
        asks = self.positions(depths)
        stands = torch.where(own < 0, self.columns, asks[:, None].gather(-1, place))
        asks = asks[:, :, None]
        if limit.kind == "window":
            return stands > asks - limit.size
        return stands.div(limit.size, rounding_mode="floor") == asks.div(limit.size, rounding_mode="floor")

    def _own(self) -> tuple[Tensor, Tensor]:
        """Every column counted from its row's start, [R, 1, end], and the same held within the pass."""
        own = self.columns - self.starts[:, None, None]
        return own, own.clamp(0, self.width - 1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, Q, end] bool to [R, 1, Q, end] in which 0 is seen and -inf is not."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


def span(places: Sequence[int]) -> slice | None:
    """These places as a slice, where they are side by side."""
    first, last = places[0], places[0] + len(places)
    return slice(first, last) if list(places) == list(range(first, last)) else None


class Columns:
    """Buffers of a pass as the layers see them while it is traced: written behind each row's start, read up to the end."""

    is_compileable = False

    def __init__(self, layers: Sequence[int], buffers: Sequence[Tensor], sight: Sight):
        """buffers: keys, then values, of each layer, [R, h, length, d]."""
        self.buffers = dict(zip(layers, zip(buffers[::2], buffers[1::2], strict=True), strict=True))
        self.width, self.end = sight.width, sight.columns.shape[0]
        self.rows = torch.arange(sight.starts.shape[0], device=sight.starts.device)[:, None]
        self.columns = sight.positions(torch.arange(sight.width, device=sight.starts.device))

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
        kept = self.buffers[layer_idx]
        for buffer, states in zip(kept, (keys, values), strict=True):
            buffer[self.rows, :, self.columns] = states.transpose(1, 2)
        return kept[0][:, :, : self.end], kept[1][:, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end - self.width

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()
