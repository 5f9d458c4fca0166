"""The same number of nodes every time, all of them verified."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState


class Fixed(Policy):
    """`nodes` under every anchor."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def budget(self, state: DecodeState) -> Tensor:
        return _budget(len(state.rows), self.nodes)

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        return sizes


@functools.lru_cache(256)
def _budget(slots: int, nodes: int) -> Tensor:
    return torch.full((slots,), nodes)
