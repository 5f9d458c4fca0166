"""The same number of nodes in every step, all of them verified."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState


class Fixed(Policy):
    """`nodes` under every anchor."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def budget(self, state: DecodeState) -> Tensor:
        return torch.full((len(state.rows),), self.nodes)
