"""How the static step draws and judges: greedily, or at each request's temperature from all tokens.

Tokens are those of `SamplingJudge`.  With a device's own kernels, they draw and accept.  B slots, N nodes, V
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.accept import Walked, walk, walk_top1
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.state import Scores
from outrider.decoding.static import StaticRule, StaticSlots
from outrider.sampling.distribution import tempered, wide
from outrider.sampling.judge import AcceptanceKernels


class Greedy:
    """Every request takes the likeliest tokens."""

    def __init__(self, kernels: AcceptanceKernels | None = None):
        self.kernels = kernels

    def distribution(self, logits: Tensor, slots: StaticSlots) -> Tensor:
        """All at the likeliest token."""
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)

    def drawn(self, logits: Tensor, slots: StaticSlots, depth: int) -> tuple[Tensor, Tensor | None]:
        return logits.argmax(-1), None

    def accept(self, draft: Draft, scores: Scores, slots: StaticSlots) -> Walked:
        if self.kernels is not None:
            return _read(self.kernels.accept_greedy(draft, scores.logits, scores.choice))
        choice, every = scores.choice, torch.arange(draft.tokens.shape[0], device=draft.tokens.device)
        assert choice is not None
        return walk_top1(draft, scores.logits.shape[-1], lambda rows, _depth: choice[every, rows], draft.depth)


class Tempered:
    """Every request draws at its temperature, from all tokens; at 0 it takes the likeliest."""

    def __init__(self, kernels: AcceptanceKernels | None = None):
        self.kernels = kernels

    def distribution(self, logits: Tensor, slots: StaticSlots) -> Tensor:
        """As `distribution.distribution`, of logits [B, ..., V]."""
        logits, is_cold = wide(logits), slots.temperature == 0
        p = tempered(logits, torch.where(is_cold, 1.0, slots.temperature))
        cold = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(is_cold.view(-1, *[1] * (p.dim() - 1)), cold, p)

    def drawn(self, logits: Tensor, slots: StaticSlots, depth: int) -> tuple[Tensor, Tensor | None]:
        if self.kernels is not None:
            q, tokens = self.kernels.sample(logits, slots.temperature, slots.streams, depth)
            return tokens, q
        q = self.distribution(logits, slots)
        return slots.streams.draw(q, depth, Purpose.DRAFT), q

    def accept(self, draft: Draft, scores: Scores, slots: StaticSlots) -> Walked:
        if self.kernels is not None:
            return _read(self.kernels.accept(draft, scores.logits, slots.temperature, slots.streams))
        p, streams = self.distribution(scores.logits, slots), slots.streams
        if draft.q is not None:
            return walk(draft, draft.q, p, streams)
        every = torch.arange(p.shape[0], device=p.device)
        choose = lambda rows, depth: streams.draw(p[every, rows], depth, Purpose.TARGET)
        return walk_top1(draft, p.shape[-1], choose, draft.depth)


def rule_of(is_greedy: bool, kernels: AcceptanceKernels | None) -> StaticRule:
    """The rule for requests that set a temperature at most; is_greedy: 0, all of them."""
    return Greedy(kernels) if is_greedy else Tempered(kernels)


def _read(found: Tensor) -> Walked:
    """What kernels returned, [B, N+4]; that logits are finite is known from the pass."""
    return Walked(found[:, :-4], found[:, -4], found[:, -3], found[:, -2])
