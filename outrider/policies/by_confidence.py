"""Verify only nodes that are likely to be accepted, by the drafter's confidences or by what was accepted so far."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.state import DecodeState, Timing

GUESS, DOUBT = 0.7, 4.0
"""Prior of the first node, and how many tests it counts as; every other node's prior is the node before it."""


class ByConfidence:
    """Verify a slot's nodes before the first that is unlikely to be reached and accepted.

    For a drafter whose confidences are known before it draws (see `Drafter.confidence_before_draw`), the product of the
    confidences up to a node must reach `min_confidence`; made for chains.  For any other, the share of recent steps
    that accepted a node of this number must reach it: that depends on earlier steps alone, so it is exact for trees
    too.
    """

    WINDOW = 256.0
    """Steps after which a count has faded to 1/e, so that nodes are tried again."""

    def __init__(self, nodes: int, min_confidence: float):
        self.nodes, self.min_confidence = nodes, min_confidence
        self.accepted, self.steps = [0.0] * nodes, [0.0] * nodes
        """How often each node was accepted, and in how many steps it was drafted; fading."""

    def budget(self, state: DecodeState) -> Tensor:
        return torch.full((len(state.rows),), self.nodes)

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        if confidence is not None:
            likely = (confidence.cumprod(-1) >= self.min_confidence).cumprod(-1).sum(-1).cpu()
            return torch.minimum(sizes, likely)
        shares = self.shares()
        return sizes.clamp(max=next((n for n, share in enumerate(shares) if share < self.min_confidence), len(shares)))

    def shares(self) -> list[float]:
        """Share of recent steps in which each node was accepted."""
        return shares(self.accepted, self.steps)

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None:
        fade = 1 - 1 / self.WINDOW
        self.accepted, self.steps = [fade * x for x in self.accepted], [fade * x for x in self.steps]
        for size, path, following in zip(sizes.tolist(), accepted.paths, accepted.next_tokens, strict=True):
            if following < 0:  # a slot that ended inside its block did not show what it would have accepted
                continue
            for n in range(size):
                self.steps[n] += 1
            for n in path:
                self.accepted[n] += 1


def shares(accepted: list[float], tests: list[float]) -> list[float]:
    """Share of its tests in which each node was accepted.  With few tests it is near that of the node before, so that
    untried nodes are tried."""
    guess, found = GUESS, []
    for own, tested in zip(accepted, tests, strict=True):
        guess = (own + DOUBT * guess) / (tested + DOUBT)
        found.append(guess)
    return found
