"""Buffers of a pass as the layers see them while it is traced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.targets.attention_mask import Sight


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
