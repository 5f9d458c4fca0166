"""The same number of nodes in every step, all of them verified."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Timing


class Fixed(Policy):
    """Drafts `nodes` nodes in every slot."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def budget(self, state: DecodeState) -> Tensor:
        return torch.full((len(state.rows),), self.nodes)

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None:
        """Learns nothing."""
