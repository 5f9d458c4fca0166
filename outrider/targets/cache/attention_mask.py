"""Positions and attention masks of a pass.

R rows of a pass, n tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class AttentionLimit(NamedTuple):
    """How far back a layer attends: to the last `size` positions, including the query's own, or within chunks of `size`
    positions."""

    kind: Literal["window", "chunk"]
    size: int


class Tree(NamedTuple):
    """Which tokens of a pass attend to which others, if a row is not a chain."""

    mask: Tensor
    """[R or 1, n, n] bool: True where the row's token attends to the column's."""
    depths: Tensor
    """[R or 1, n], offset of each token from its row's start."""

    def of(self, row: int) -> Tree:
        """The mask of one row [1, n]."""
        return Tree(self.mask[row : row + 1], self.depths[row : row + 1])


class PassLayout(NamedTuple):
    """Positions and masks of a pass whose rows start at different lengths.  Only tensors, so that it can be traced."""

    starts: Tensor
    """[R] length of each row's slot before the pass."""
    columns: Tensor
    """[end] 0, 1, ... up to the last column that any row attends to."""
    width: int
    """Tokens per row."""

    def positions(self, depths: Tensor) -> Tensor:
        """[R, n]; depths [R or 1, n] counts from each row's start."""
        return self.starts[:, None] + depths

    def mask(self, tree_mask: Tensor) -> Tensor:
        """[R, Q, end] bool: all columns before the pass, and those of the pass by `tree_mask` [R or 1, Q, n]."""
        offset, index = self._offsets()
        tree_mask = tree_mask.expand(self.starts.shape[0], -1, -1)
        inside = (offset >= 0) & (offset < self.width)
        return (offset < 0) | (inside & tree_mask.gather(-1, index.expand(-1, tree_mask.shape[1], -1)))

    def limit_mask(self, limit: AttentionLimit, depths: Tensor) -> Tensor:
        """[R, n, end] bool: the columns within a limit.  A tree node's position follows from its depth, not its
        column."""
        offset, index = self._offsets()
        query_positions = self.positions(depths)
        key_positions = torch.where(offset < 0, self.columns, query_positions[:, None].gather(-1, index))
        query_positions = query_positions[:, :, None]
        if limit.kind == "window":
            return key_positions > query_positions - limit.size
        return key_positions.div(limit.size, rounding_mode="floor") == query_positions.div(
            limit.size, rounding_mode="floor"
        )

    def _offsets(self) -> tuple[Tensor, Tensor]:
        """Offset of every column from its row's start, [R, 1, end]; also clamped to the pass."""
        offset = self.columns - self.starts[:, None, None]
        return offset, offset.clamp(0, self.width - 1)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask [R, Q, end] as an additive one [R, 1, Q, end]: 0 where it is True, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[:, None]


def span(indices: Sequence[int]) -> slice | None:
    """These indices as a slice; None if they are not contiguous."""
    first, last = indices[0], indices[0] + len(indices)
    return slice(first, last) if list(indices) == list(range(first, last)) else None


class TracedCache:
    """The cache that layers see while a pass is traced: it writes after each row's start and reads up to the end."""

    is_compileable = False

    def __init__(self, layers: Sequence[int], buffers: Sequence[Tensor], layout: PassLayout):
        """buffers: keys, then values, of each layer, [R, h, length, d]."""
        self.buffers = dict(zip(layers, zip(buffers[::2], buffers[1::2], strict=True), strict=True))
        self.width, self.end = layout.width, layout.columns.shape[0]
        self.rows = torch.arange(layout.starts.shape[0], device=layout.starts.device)[:, None]
        self.columns = layout.positions(torch.arange(layout.width, device=layout.starts.device))

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        buffers = self.buffers[layer_idx]
        for buffer, states in zip(buffers, (keys, values), strict=True):
            buffer[self.rows, :, self.columns] = states.transpose(1, 2)
        return buffers[0][:, :, : self.end], buffers[1][:, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end - self.width

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()


class TextCache:
    """The cache of a pass over texts and of a second pass over rows after them: nothing is written in place, so the
    second pass has a gradient."""

    is_compileable = False

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self._held:
            self._held[layer_idx] = keys, values
            return keys, values
        text = self._held[layer_idx]
        return torch.cat([text[0], keys], 2), torch.cat([text[1], values], 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._held[layer_idx][0].shape[2] if layer_idx in self._held else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)


def limited(mask: Tensor, limit: AttentionLimit | None, queries: Tensor, keys: Tensor) -> Tensor:
    """mask [R, Q, K] bool within a limit.  Positions: queries [R or 1, Q], keys [R or 1, K]."""
    if limit is None:
        return mask
    queries, keys = queries[..., None], keys[:, None]
    if limit.kind == "window":
        return mask & (keys > queries - limit.size)
    return mask & (keys // limit.size == queries // limit.size)


def positions(documents: Tensor) -> Tensor:
    """Positions within each text, from 0.  documents [B, S]: adjacent equal numbers are one text."""
    columns = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return columns - columns.where(begins, 0).cummax(1).values
