"""The acceptance rule: which drafted tokens stay, so that the output follows the target's own distribution exactly.

Walk down from the anchor with r = p(.|node).  For each child in order, drawn from q given that its elder siblings were
rejected: accept with probability min(1, r[x] / q[x]); otherwise r becomes norm(max(r - q, 0)).  When no child is left,
emit a token from r.  Chain or tree, sampled with or without replacement or deterministic, greedy or not: this one rule
gives back p.  (Leviathan 2211.17192; several siblings: SpecInfer 2305.09781, Sequoia 2402.12374.)  B live slots, N
drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.errors import DrafterError


class Accepted(NamedTuple):
    """What a verified step accepts, slot by slot.  Lists, since readers go from token to token."""

    paths: list[list[int]]
    """Drafted nodes that stay, from the anchor down."""
    next_tokens: list[int]
    """Correction or bonus; -1 where the slot ended before it."""
    invalid: list[int]
    """How many nodes had an id outside the vocabulary or a q that is not a distribution; verified as deterministic."""

    @property
    def counts(self) -> list[int]:
        return [len(path) for path in self.paths]

    def rows(self, b: int) -> list[int]:
        """The rows of the verified pass that stay in slot b: 0 for the anchor, and n + 1 for every node n on the
        path."""
        return [0, *(node + 1 for node in self.paths[b])]

    @classmethod
    def of(cls, order: Tensor, counts: Tensor, next_tokens: Tensor, invalid: Tensor) -> Accepted:
        # one tensor: a device is waited for once
        return cls.read(torch.cat([order, torch.stack([counts, next_tokens, invalid], 1)], 1).tolist())

    @classmethod
    def read(cls, rows: list[list[int]]) -> Accepted:
        """From each slot's path and padding, the path's length, next token, and number of invalid nodes."""
        paths = [path[:count] for *path, count, _, _ in rows]
        return cls(paths, [row[-2] for row in rows], [row[-1] for row in rows])


class Walked(NamedTuple):
    """The same as tensors, of which the host has read nothing."""

    path: Tensor
    """[B, D]: the nodes that stay come first, then any others or -1."""
    counts: Tensor
    """[B], how many stay."""
    next_tokens: Tensor
    """[B]."""
    invalid: Tensor
    """[B]."""


Rule = Callable[[Draft, Tensor, Streams], Accepted]
"""A way to judge a draft by p [B, N+1, V]: `accept`, a fast path of it, or a lossy rule."""


def accept(draft: Draft, p: Tensor, streams: Streams) -> Accepted:
    """Apply the acceptance rule.  p [B, N+1, V]; column 0 follows the anchor, column n + 1 follows node n.

    Exact for every draft whose q is true.  All noise comes from `streams`; in a seeded slot every node is
    deterministic. Raises DrafterError for a q over another vocabulary.
    """
    if draft.q is not None:
        return Accepted.of(*walk(draft, draft.q, p, streams))
    every = torch.arange(len(p), device=p.device)
    return accept_top1(draft, p.shape[-1], lambda rows, depth: streams.draw(p[every, rows], depth, Purpose.TARGET))


def walk(draft: Draft, drawn_from: Tensor, p: Tensor, streams: Streams) -> Walked:
    """The acceptance rule for nodes that were drawn from q, `drawn_from` [B, N, V]; the host reads nothing.

    p may have fewer rows than the draft has nodes, where `draft.sizes` says that no more are verified."""
    (slots, nodes), device = draft.tokens.shape, p.device
    sizes, (tokens, known, valid) = draft.sizes.to(device), judged_nodes(draft, drawn_from, p.shape[-1])
    seeded = torch.zeros(slots, dtype=torch.bool, device=device) if streams.seeded is None else streams.seeded
    at, depth = torch.full((slots,), -1, device=device), torch.zeros(slots, dtype=torch.int64, device=device)
    taken, left = torch.zeros(slots, nodes, dtype=torch.bool, device=device), p[:, 0]
    for n in range(nodes):
        tested = (draft.parents[:, n] == at) & (n < sizes)
        token = tokens[:, n : n + 1]
        q = judged_q(drawn_from[:, n], tokens[:, n], known[:, n], valid[:, n]).to(left.dtype)
        coin = streams.uniform(depth, Purpose.ACCEPT, salt=n)
        passed = coin * q.gather(-1, token)[:, 0] < left.gather(-1, token)[:, 0]
        if streams.seeded is not None:
            passed = torch.where(seeded, streams.draw(left, depth, Purpose.TARGET) == tokens[:, n], passed)
        went = tested & known[:, n] & passed
        left = torch.where((tested & ~went & ~seeded)[:, None], residual(left, q), left)
        left = torch.where(went[:, None], _row(p, n + 1), left)
        at, depth, taken[:, n] = torch.where(went, n, at), depth + went, went
    following = streams.draw(left, depth, Purpose.TARGET)
    invalid = torch.where(seeded[:, None], ~known, ~valid) & (torch.arange(nodes, device=device) < sizes[:, None])
    return Walked((~taken).to(torch.int8).argsort(dim=-1, stable=True), depth, following, invalid.sum(-1))


def _row(p: Tensor, n: int) -> Tensor:
    """Row n of p [B, N+1, V], or the last one where there are fewer, which may be a number that stays open."""
    if isinstance(p.shape[1], int):
        return p[:, min(n, p.shape[1] - 1)]
    last = torch.arange(p.shape[1], device=p.device)[-1:]
    return p.index_select(1, last.clamp(max=n))[:, 0]


def accept_top1(draft: Draft, vocabulary: int, choose: Callable[[Tensor, int], Tensor]) -> Accepted:
    """The acceptance rule for q = None: continue while a child is the token that the target chooses itself.

    choose: rows [B] of the pass and their depth to the target's tokens [B]; called only for rows on the path.
    """
    return Accepted.of(*walk_top1(draft, vocabulary, choose))


def walk_top1(
    draft: Draft, vocabulary: int, choose: Callable[[Tensor, int], Tensor], deepest: int | None = None
) -> Walked:  # fmt: skip
    """As `accept_top1`.  deepest: depth of the tree, for which the host then does not ask the device."""
    slots, nodes = draft.tokens.shape
    order = torch.arange(nodes, device=draft.tokens.device)
    live = order < draft.sizes.to(order.device)[:, None]
    at = torch.full((slots,), -1, device=order.device)
    wanted, steps = choose(at + 1, 0), list[Tensor]()
    for depth in range(1, (nodes if deepest is None else deepest) + 1):
        fits = live & (order > at[:, None]) & (draft.parents == at[:, None]) & (draft.tokens == wanted[:, None])
        went = fits.any(-1)
        if deepest is None and not went.any():
            break
        at = torch.where(went, fits.long().argmax(-1), at)
        steps.append(at.where(went, -1))
        wanted = torch.where(went, choose(at + 1, depth), wanted)
    path = torch.stack(steps, 1) if steps else draft.tokens[:, :0]
    outside = (draft.tokens < 0) | (draft.tokens >= vocabulary)
    return Walked(path, (path >= 0).sum(-1), wanted, (outside & live).sum(-1))


def judged_nodes(draft: Draft, q: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (0 for an id outside the vocabulary), whether each id is inside, whether its q is valid; each [B, N]."""
    refuse_other_vocabulary(q, vocabulary)
    known = (draft.tokens >= 0) & (draft.tokens < vocabulary)
    tokens = draft.tokens.where(known, 0)
    own = q.gather(-1, tokens.unsqueeze(-1))[..., 0]
    is_distribution = (q.amin(-1) >= 0) & ((q.sum(-1) - 1).abs() < 1e-3) & (own > 0)
    return tokens, known, known & is_distribution


def refuse_other_vocabulary(q: Tensor, vocabulary: int) -> None:
    """Raises DrafterError for a q [..., V] over another vocabulary; one of width 1 would broadcast in silence."""
    if q.shape[-1] != vocabulary:
        raise DrafterError(
            f"a draft's q must be over the target's vocabulary of {vocabulary} tokens, got {q.shape[-1]}; "
            "set q to 0 for tokens that the drafter can't propose"
        )


def judged_q(q: Tensor, tokens: Tensor, known: Tensor, valid: Tensor) -> Tensor:
    """q [..., V] with invalid rows made one-hot at their own token, or 0 everywhere where the id is outside."""
    one_hot = torch.zeros_like(q).scatter_(-1, tokens[..., None], known[..., None].to(q.dtype))
    return torch.where(valid[..., None], q, one_hot)


def residual(left: Tensor, q: Tensor) -> Tensor:
    """norm(max(left - q, 0)) [B, V]; `left` itself where nothing remains, which only rounding can cause."""
    rest = (left - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 1e-12, rest / mass.clamp(min=1e-12), left)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Expected acceptance of q under p.  p, q [..., V], each summing to 1.  Returns [...] in [0, 1]; equals 1 - TV."""
    return torch.minimum(p, q).sum(-1)
