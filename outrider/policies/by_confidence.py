"""Verify only what is likely to be kept, by the drafter's own confidences or by what was kept so far."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.state import DecodeState, Timing

GUESS, DOUBT = 0.7, 4.0
"""What the first node is taken for, and every other for the one before it: for so many tests."""


class ByConfidence:
    """Verify a slot's nodes up to, and without, the first that is unlikely to be reached and kept.

    Of a drafter that says confidences before it draws (see `Drafter.confidence_before_draw`), the running product of a node's
    own and its elders' must reach `min_confidence`; made for chains.  Of any other, the share of recent steps that kept a
    node of this number must: it depends on earlier steps alone, so it is exact for trees too.
    """

    WINDOW = 256.0
    """Steps after which a count has faded to 1/e: what is no longer tried looks worth a try."""

    def __init__(self, nodes: int, min_confidence: float):
        self.nodes, self.min_confidence = nodes, min_confidence
        self.kept, self.steps = [0.0] * nodes, [0.0] * nodes
        """How often each node was kept, of how many steps in which it was there; fading."""

    def budget(self, state: DecodeState) -> Tensor:
        return torch.full((len(state.rows),), self.nodes)

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        if confidence is not None:
            likely = (confidence.cumprod(-1) >= self.min_confidence).cumprod(-1).sum(-1).cpu()
            return torch.minimum(sizes, likely)
        shares = self.shares()
        return sizes.clamp(max=next((n for n, share in enumerate(shares) if share < self.min_confidence), len(shares)))

    def shares(self) -> list[float]:
        """How often each node was kept of late."""
        return shares(self.kept, self.steps)

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None:
        fade = 1 - 1 / self.WINDOW
        self.kept, self.steps = [fade * x for x in self.kept], [fade * x for x in self.steps]
        for size, path, following in zip(sizes.tolist(), accepted.paths, accepted.next_tokens, strict=True):
            if following < 0:  # a slot that ended in mid-block did not show what it would have kept
                continue
            for n in range(size):
                self.steps[n] += 1
            for n in path:
                self.kept[n] += 1


def shares(kept: list[float], tests: list[float]) -> list[float]:
    """How often each node was kept of the times it was tested.  Where that is seldom, a share is near that of the node before
    it: what was not tried looks worth a try."""
    guess, found = GUESS, []
    for own, tested in zip(kept, tests, strict=True):
        guess = (own + DOUBT * guess) / (tested + DOUBT)
        found.append(guess)
    return found
