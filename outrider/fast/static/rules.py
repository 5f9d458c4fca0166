"""How the static step samples and judges: greedily, at each request's temperature, or with truncated distributions.

Tokens are those of `SamplingJudge`.  A device's own kernels sample and accept, except for truncated distributions.  B
slots, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.accept import AcceptedTensors, walk, walk_top1
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.state import Scores
from outrider.fast.static.step import StaticRule, StaticSlots
from outrider.sampling.distribution import tempered, wide
from outrider.sampling.judge import AcceptanceKernels
from outrider.sampling.settings import Sampling


class Greedy:
    """Every request uses the likeliest tokens."""

    def __init__(self, kernels: AcceptanceKernels | None = None):
        self.kernels = kernels

    def distribution(self, logits: Tensor, slots: StaticSlots) -> Tensor:
        """All mass on the likeliest token."""
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)

    def drawn(self, logits: Tensor, slots: StaticSlots, depth: int) -> tuple[Tensor, Tensor | None]:
        return logits.argmax(-1), None

    def accept(self, draft: Draft, scores: Scores, slots: StaticSlots) -> AcceptedTensors:
        if self.kernels is not None:
            return _read(self.kernels.accept_greedy(draft, scores.logits, scores.choice))
        choice, every = scores.choice, torch.arange(draft.tokens.shape[0], device=draft.tokens.device)
        assert choice is not None
        return walk_top1(draft, scores.logits.shape[-1], lambda rows, _depth: choice[every, rows], draft.depth)


class Tempered:
    """Every request samples at its temperature, from all tokens; at 0 it uses the likeliest."""

    def __init__(self, kernels: AcceptanceKernels | None = None):
        self.kernels = kernels

    def distribution(self, logits: Tensor, slots: StaticSlots) -> Tensor:
        """As `distribution.distribution`, for logits [B, ..., V]."""
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

    def accept(self, draft: Draft, scores: Scores, slots: StaticSlots) -> AcceptedTensors:
        if self.kernels is not None:
            return _read(self.kernels.accept(draft, scores.logits, slots.temperature, slots.streams))
        p, streams = self.distribution(scores.logits, slots), slots.streams
        if draft.q is not None:
            return walk(draft, draft.q, p, streams)
        every = torch.arange(p.shape[0], device=p.device)
        choose = lambda rows, depth: streams.draw(p[every, rows], depth, Purpose.TARGET)
        return walk_top1(draft, p.shape[-1], choose, draft.depth)


class Truncated(Tempered):
    """Like `Tempered`, but truncated by top-k, top-p and min-p."""

    def __init__(self, rank: int, has_top_p: bool):
        """rank: number of likeliest tokens to sort: at least the largest top-k, and all if a request has only top-p; 0
        for none.  has_top_p: whether any request has it."""
        super().__init__()
        self.rank, self.has_top_p = rank, has_top_p

    def distribution(self, logits: Tensor, slots: StaticSlots) -> Tensor:
        """As `distribution.distribution`, for logits [B, ..., V]."""
        logits, shape = wide(logits), (-1,) + (1,) * (logits.dim() - 1)
        is_cold, choice = slots.temperature == 0, logits.argmax(-1, keepdim=True)
        if self.rank:
            rank, top_k = min(self.rank, logits.shape[-1]), slots.top_k.view(shape)
            at = (top_k.clamp(1, rank) - 1).expand(*logits.shape[:-1], 1)
            floor = logits.topk(rank, -1).values.gather(-1, at)
            is_cut = (top_k > 0) & (top_k < logits.shape[-1]) & (logits < floor)
            logits = logits.masked_fill(is_cut, -torch.inf)
        p = tempered(logits, torch.where(is_cold, 1.0, slots.temperature))
        if self.has_top_p:
            p = self._nucleus(p, slots.top_p.to(p.dtype).view(shape))
        p = p.masked_fill(p < slots.min_p.to(p.dtype).view(shape) * p.amax(-1, keepdim=True), 0.0)
        p = p / p.sum(-1, keepdim=True)
        return torch.where(is_cold.view(shape), torch.zeros_like(p).scatter_(-1, choice, 1.0), p)

    def _nucleus(self, p: Tensor, top_p: Tensor) -> Tensor:
        """p of the tokens for which likelier ones, and equally likely ones with smaller ids, sum to less than top_p.

        More tokens may tie with the last sorted one than were sorted: they are counted by their ids.
        """
        ids = p.topk(min(self.rank, p.shape[-1]), -1).indices.sort(-1).values
        ranked, order = p.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        before = torch.zeros_like(p).scatter_(-1, ids.gather(-1, order), ranked.cumsum(-1) - ranked)
        last = ranked[..., -1:]
        likelier = torch.where(ranked > last, ranked, 0.0).sum(-1, keepdim=True)
        equals = (p == last).to(p.dtype)
        before = torch.where(p == last, likelier + (equals.cumsum(-1) - equals) * last, before)
        least = torch.finfo(torch.float32).tiny  # a top_p that float32 rounds to 0 still keeps one token
        kept = p.masked_fill((before >= top_p.clamp(min=least)) & (top_p < 1), 0.0)
        return kept / kept.sum(-1, keepdim=True)


RANKS = (64, 256, 1024)
"""Numbers of tokens that may be sorted, besides all of them."""


class Kind(NamedTuple):
    """What a captured step depends on in the settings of the live requests, besides their values."""

    is_greedy: bool
    has_seeded: bool
    """Whether any request may draft with the target's noise."""
    rank: int = 0
    """As in `Truncated`."""
    has_top_p: bool = False
    has_min_p: bool = False

    @classmethod
    def of(cls, samplings: Sequence[Sampling], shared_noise: bool, vocabulary: int) -> Kind | None:
        """The kind of these requests; None if one needs the host: log probabilities, penalties, bans, typical-p."""
        if any(each.is_processed or each.logprobs is not None or each.typical_p < 1 for each in samplings):
            return None
        drawn = [each for each in samplings if each.temperature > 0]
        if not drawn:
            return cls(True, False)
        ordered = [each.top_k if 0 < each.top_k < vocabulary else vocabulary * (each.top_p < 1) for each in drawn]
        most = max(ordered)
        rank = next((rank for rank in (0, *RANKS) if rank >= most), vocabulary)
        has_seeded = shared_noise and any(each.seed is not None for each in drawn)
        return cls(False, has_seeded, rank, any(each.top_p < 1 for each in drawn), any(each.min_p for each in drawn))

    def rule(self, kernels: AcceptanceKernels | None) -> StaticRule:
        """kernels: the device's, which sample and accept if possible."""
        if self.is_greedy:
            return Greedy(kernels)
        return Truncated(self.rank, self.has_top_p) if self.cuts else Tempered(kernels)

    @property
    def cuts(self) -> bool:
        """Whether any request truncates its distribution."""
        return bool(self.rank) or self.has_top_p or self.has_min_p


def _read(packets: Tensor) -> AcceptedTensors:
    """What the kernels returned, [B, N+4]; the pass already reports whether logits are finite."""
    return AcceptedTensors(packets[:, :-4], packets[:, -4], packets[:, -3], packets[:, -2])
