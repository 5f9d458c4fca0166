"""How much to speculate next.

A policy is a stopping rule.  Whether node n of a slot stays may depend on the confidences of that slot's nodes 0..n, each
known before its own token was drawn, and on other slots; never on a later confidence of the same slot, nor on the drafted
tokens.  Dropping a token for its own value, or looking ahead, breaks the law.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.decoding.accept import Kept
from outrider.decoding.state import DecodeState, Timing


class Policy(Protocol):
    """Decides before the draft how many nodes to ask for, and before the verification how many of them stay."""

    def budget(self, state: DecodeState) -> Tensor:
        """[B] int64 on the CPU, nodes wanted."""

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        """[B] int64 on the CPU, at most `sizes`: how many of each slot's nodes stay."""

    def observe(self, state: DecodeState, sizes: Tensor, kept: Kept, timing: Timing) -> None:
        """After every step."""


class Fixed:
    """The same number of nodes every time, all of them verified."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def budget(self, state: DecodeState) -> Tensor:
        return torch.full((len(state.rows),), self.nodes)

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, kept: Kept, timing: Timing) -> None: ...


class ByConfidence(Fixed):
    """Verify a slot's nodes up to, and without, the first that is unlikely to be reached and kept.

    The running product of a node's own and its elders' confidences must reach `least`.  A drafter without a trained head for
    them gets confidences that are learnt while decoding (see `confidence`).  Made for chains.
    """

    def __init__(self, nodes: int, least: float):
        super().__init__(nodes)
        self.least = least

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        if confidence is None:
            return sizes
        likely = (confidence.cumprod(-1) >= self.least).cumprod(-1).sum(-1).cpu()
        return torch.minimum(sizes, likely)
