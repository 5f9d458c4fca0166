"""The law: which drafted tokens stay, so that what is emitted follows the target's own distribution exactly.

Walk down from the anchor with r = p(.|node).  For each child in order, drawn from q given that its elder siblings were
rejected: accept with probability min(1, r[x] / q[x]); otherwise r becomes norm(max(r - q, 0)).  When no child is left, emit
a token from r.  Chain or tree, sampled with or without replacement or deterministic, greedy or not: this one rule gives
back p.  (Leviathan 2211.17192; several siblings: SpecInfer 2305.09781, Sequoia 2402.12374.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.sampling import Purpose, Streams
from outrider.errors import DrafterError


class Kept(NamedTuple):
    """What a verified step keeps, slot by slot.  Lists, since whoever reads it goes from token to token."""

    paths: list[list[int]]
    """Drafted nodes that stay, from the anchor down."""
    next_tokens: list[int]
    """Correction or bonus; -1 where the slot ended before it."""
    unlawful: list[int]
    """Nodes with an id outside the vocabulary or a q that is no distribution; they were verified as deterministic."""

    @property
    def accepted(self) -> list[int]:
        """How many nodes stay."""
        return [len(path) for path in self.paths]


class Verdict(NamedTuple):
    """What a rule keeps, as tensors on the draft's device.  B live slots, D the longest path."""

    path: Tensor
    """[B, D] node indices kept, padded with -1."""
    accepted: Tensor
    """[B] how many."""
    next_token: Tensor
    """[B] correction or bonus."""
    unlawful: Tensor
    """[B] as in `Kept`."""

    def kept(self) -> Kept:
        paths = zip(self.path.tolist(), self.accepted.tolist(), strict=True)
        return Kept([path[:count] for path, count in paths], self.next_token.tolist(), self.unlawful.tolist())


def accept(draft: Draft, p: Tensor, streams: Streams) -> Verdict:
    """Keep what the law keeps.  p [B, N+1, V], column 0 follows the anchor, column n + 1 follows node n.

    Exact for every draft whose q is true.  All noise comes from `streams`.
    """
    known = (draft.tokens >= 0) & (draft.tokens < p.shape[-1])
    if draft.q is None:
        return _match(draft, p, streams, known)
    refuse_other_vocabulary(draft, p.shape[-1])
    return _ratio(draft, draft.q, p, streams, known)


def refuse_other_vocabulary(draft: Draft, vocabulary: int) -> None:
    """Raise DrafterError for a q over another vocabulary: of width 1 it would broadcast in silence."""
    if draft.q is not None and draft.q.shape[-1] != vocabulary:
        raise DrafterError(
            f"a draft's q is over {draft.q.shape[-1]} tokens, the target's vocabulary has {vocabulary}; "
            "give the tokens that the drafter can't propose a q of 0"
        )


def _match(draft: Draft, p: Tensor, streams: Streams, known: Tensor) -> Verdict:
    """Deterministic nodes: draw the target's own token and follow the child that equals it; the same law, one draw a node."""
    walk = _Walk(draft)
    wanted = streams.draw(p[:, 0], 0, Purpose.TARGET)
    for n in range(draft.tokens.shape[1]):
        went = walk.tested(n) & known[:, n] & (draft.tokens[:, n] == wanted)
        if walk.go(n, went):
            wanted = torch.where(went, streams.draw(p[:, n + 1], walk.accepted, Purpose.TARGET), wanted)
    return walk.verdict(wanted, ~known)


def _ratio(draft: Draft, proposed: Tensor, p: Tensor, streams: Streams, known: Tensor) -> Verdict:
    """Sampled nodes: the ratio test against what is left of p, with the residual carried from sibling to sibling."""
    walk = _Walk(draft)
    tokens = draft.tokens.where(known, 0)
    lawful = known & _is_distribution(proposed, tokens)
    left = p[:, 0]
    for n in range(tokens.shape[1]):
        tested = walk.tested(n)
        token = tokens[:, n : n + 1]
        one_hot = torch.zeros_like(left).scatter_(-1, token, known[:, n : n + 1].to(left.dtype))
        q = torch.where(lawful[:, n : n + 1], proposed[:, n].to(left.dtype), one_hot)
        coin = streams.uniform(walk.accepted, Purpose.ACCEPT, salt=n)
        went = tested & known[:, n] & (coin * q.gather(-1, token)[:, 0] < left.gather(-1, token)[:, 0])
        left = torch.where((tested & ~went)[:, None], _residual(left, q), left)
        left = torch.where(went[:, None], p[:, n + 1], left)
        walk.go(n, went)
    return walk.verdict(streams.draw(left, walk.accepted, Purpose.TARGET), ~lawful)


def accept_greedy(draft: Draft, choice: Tensor, vocabulary: int) -> Kept:
    """The law's twin where every slot is greedy: follow the child that is the target's choice.  choice [B, N+1] int64.

    Equals `accept` with p one-hot at `choice` (tested); it reads no distribution at all.
    """
    rows = zip(draft.ids, draft.tree, draft.live, choice.tolist(), strict=True)
    paths, following, unlawful = [], [], []
    for tokens, parents, size, wanted in rows:
        at, path = -1, []
        for n in range(size):
            if parents[n] == at and tokens[n] == wanted[at + 1]:
                path.append(n)
                at = n
        paths.append(path)
        following.append(wanted[at + 1])
        unlawful.append(sum(not 0 <= token < vocabulary for token in tokens[:size]))
    return Kept(paths, following, unlawful)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Expected acceptance of q under p.  p, q [..., V], each summing to 1.  Returns [...] in [0, 1]; equals 1 - TV."""
    return torch.minimum(p, q).sum(-1)


class _Walk:
    """Where every slot stands in its tree while the nodes pass by in order: parents before children, siblings in order."""

    def __init__(self, draft: Draft):
        self.draft = draft
        slots, nodes = draft.tokens.shape
        self.sizes = draft.sizes.to(draft.tokens.device)
        self.at = torch.full((slots,), -1, device=draft.tokens.device)
        self.accepted = torch.zeros_like(self.at)
        self.taken = torch.zeros(slots, nodes, dtype=torch.bool, device=self.at.device)

    def tested(self, n: int) -> Tensor:
        """[B] whether node n is a live child of where the slot stands."""
        return (self.draft.parents[:, n] == self.at) & (n < self.sizes)

    def go(self, n: int, went: Tensor) -> bool:
        """Move the slots of `went` [B] to node n; False where none moved."""
        self.at = torch.where(went, n, self.at)
        self.accepted = self.accepted + went
        self.taken[:, n] = went
        return bool(went.any())

    def verdict(self, next_token: Tensor, unlawful: Tensor) -> Verdict:
        deepest = int(self.accepted.max()) if len(self.accepted) else 0
        order = (~self.taken).to(torch.int8).argsort(dim=-1, stable=True)[:, :deepest]
        within = torch.arange(deepest, device=order.device) < self.accepted[:, None]
        live = torch.arange(self.taken.shape[1], device=order.device) < self.sizes[:, None]
        return Verdict(order.where(within, -1), self.accepted, next_token, (unlawful & live).sum(-1))


def _residual(left: Tensor, q: Tensor) -> Tensor:
    """norm(max(left - q, 0)) [B, V]; `left` itself where nothing remains, which has probability 0 but for rounding."""
    rest = (left - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 1e-12, rest / mass.clamp(min=1e-12), left)


def _is_distribution(q: Tensor, tokens: Tensor) -> Tensor:
    """[B, N] whether each row of q [B, N, V] could have been drawn from, and could have given its own token."""
    own = q.gather(-1, tokens.unsqueeze(-1))[..., 0]
    return (q.amin(-1) >= 0) & ((q.sum(-1) - 1).abs() < 1e-3) & (own > 0)
