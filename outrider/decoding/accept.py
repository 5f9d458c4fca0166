"""The acceptance rule: which drafted tokens are accepted, so that the output follows the target's distribution exactly.

Walk down from the anchor with r = p(.|node).  For each child in order, drawn from q given that its earlier siblings
were rejected: accept with probability min(1, r[x] / q[x]); otherwise r becomes norm(max(r - q, 0)).  When no child is
left, sample a token from r.  The output follows p for chains and trees, for drafts sampled with or without replacement
or deterministic, greedy or not.  (Leviathan 2211.17192; several siblings: SpecInfer 2305.09781, Sequoia 2402.12374.) B
live slots, N drafted nodes, D depth, V vocabulary.
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
    """What a verified step accepts, slot by slot.  Lists, since callers iterate over tokens."""

    paths: list[list[int]]
    """Accepted nodes, from the anchor down."""
    next_tokens: list[int]
    """The target's token after the path; -1 where the slot ended before it."""
    invalid: list[int]
    """Number of nodes with an id outside the vocabulary or a q that is not a distribution; these are verified as
    deterministic."""

    @property
    def counts(self) -> list[int]:
        return [len(path) for path in self.paths]

    def rows(self, b: int) -> list[int]:
        """The accepted rows of slot b in the verified pass: 0 for the anchor, n + 1 for every node n on the path."""
        return [0, *(node + 1 for node in self.paths[b])]

    @classmethod
    def of(cls, order: Tensor, counts: Tensor, next_tokens: Tensor, invalid: Tensor) -> Accepted:
        # one tensor, so the host waits for the device only once
        return cls.read(torch.cat([order, torch.stack([counts, next_tokens, invalid], 1)], 1).tolist())

    @classmethod
    def read(cls, rows: list[list[int]]) -> Accepted:
        """rows: each slot's padded path, the path's length, the next token and the number of invalid nodes."""
        paths = [path[:count] for *path, count, _, _ in rows]
        return cls(paths, [row[-2] for row in rows], [row[-1] for row in rows])


class AcceptedTensors(NamedTuple):
    """`Accepted` as tensors on the device, which the host does not read."""

    path: Tensor
    """[B, D]: the accepted nodes first, then arbitrary ones or -1."""
    counts: Tensor
    """[B], number of accepted nodes."""
    next_tokens: Tensor
    """[B]."""
    invalid: Tensor
    """[B]."""


Rule = Callable[[Draft, Tensor, Streams], Accepted]
"""Judges a draft by p [B, N+1, V]: `accept`, a fast path of it, or a lossy rule."""


def accept(draft: Draft, p: Tensor, streams: Streams) -> Accepted:
    """Apply the acceptance rule.  p [B, N+1, V]; column 0 follows the anchor, column n + 1 follows node n.

    Exact if q is the distribution that the draft was drawn from.  All noise comes from `streams`; in a seeded slot
    every node is deterministic.  Raises DrafterError for a q over another vocabulary.
    """
    if draft.q is not None:
        return Accepted.of(*walk(draft, draft.q, p, streams))
    slots = torch.arange(len(p), device=p.device)
    return accept_top1(draft, p.shape[-1], lambda rows, depth: streams.draw(p[slots, rows], depth, Purpose.TARGET))


def walk(draft: Draft, drawn_from: Tensor, p: Tensor, streams: Streams) -> AcceptedTensors:
    """The acceptance rule for nodes drawn from q, `drawn_from` [B, N, V], without reading anything on the host.

    p may have fewer rows than the draft has nodes if `draft.sizes` excludes the others."""
    slots, nodes = draft.tokens.shape
    device = p.device
    sizes = draft.sizes.to(device)
    tokens, in_vocabulary, valid = checked_nodes(draft, drawn_from, p.shape[-1])
    seeded = torch.zeros(slots, dtype=torch.bool, device=device) if streams.seeded is None else streams.seeded
    node = torch.full((slots,), -1, device=device)
    depth = torch.zeros(slots, dtype=torch.int64, device=device)
    on_path = torch.zeros(slots, nodes, dtype=torch.bool, device=device)
    r = p[:, 0]
    for n in range(nodes):
        is_tested = (draft.parents[:, n] == node) & (n < sizes)
        token = tokens[:, n : n + 1]
        q = repaired_q(drawn_from[:, n], tokens[:, n], in_vocabulary[:, n], valid[:, n]).to(r.dtype)
        coin = streams.uniform(depth, Purpose.ACCEPT, salt=n)
        passes = coin * q.gather(-1, token)[:, 0] < r.gather(-1, token)[:, 0]
        if streams.seeded is not None:
            passes = torch.where(seeded, streams.draw(r, depth, Purpose.TARGET) == tokens[:, n], passes)
        is_accepted = is_tested & in_vocabulary[:, n] & passes
        r = torch.where((is_tested & ~is_accepted & ~seeded)[:, None], residual(r, q), r)
        r = torch.where(is_accepted[:, None], _row(p, n + 1), r)
        node = torch.where(is_accepted, n, node)
        depth = depth + is_accepted
        on_path[:, n] = is_accepted
    next_tokens = streams.draw(r, depth, Purpose.TARGET)
    invalid = torch.where(seeded[:, None], ~in_vocabulary, ~valid) & (
        torch.arange(nodes, device=device) < sizes[:, None]
    )
    return AcceptedTensors((~on_path).to(torch.int8).argsort(dim=-1, stable=True), depth, next_tokens, invalid.sum(-1))


def _row(p: Tensor, n: int) -> Tensor:
    """Row n of p [B, N+1, V], or the last one if p has fewer.  The number of rows may be symbolic while tracing."""
    if isinstance(p.shape[1], int):
        return p[:, min(n, p.shape[1] - 1)]
    last = torch.arange(p.shape[1], device=p.device)[-1:]
    return p.index_select(1, last.clamp(max=n))[:, 0]


def accept_top1(draft: Draft, vocabulary: int, choose: Callable[[Tensor, int], Tensor]) -> Accepted:
    """The acceptance rule for q = None: continue while a child is the token that the target chooses.

    choose: from rows [B] of the pass and their depth, the target's tokens [B]; called only for rows on the path.
    """
    return Accepted.of(*walk_top1(draft, vocabulary, choose))


def walk_top1(
    draft: Draft, vocabulary: int, choose: Callable[[Tensor, int], Tensor], deepest: int | None = None
) -> AcceptedTensors:  # fmt: skip
    """Like `accept_top1`, with tensors.  deepest: depth of the tree; if given, the host never waits for the device."""
    slots, nodes = draft.tokens.shape
    order = torch.arange(nodes, device=draft.tokens.device)
    live = order < draft.sizes.to(order.device)[:, None]
    node = torch.full((slots,), -1, device=order.device)
    chosen, steps = choose(node + 1, 0), list[Tensor]()
    for depth in range(1, (nodes if deepest is None else deepest) + 1):
        matches = live & (order > node[:, None]) & (draft.parents == node[:, None]) & (draft.tokens == chosen[:, None])
        is_accepted = matches.any(-1)
        if deepest is None and not is_accepted.any():
            break
        node = torch.where(is_accepted, matches.long().argmax(-1), node)
        steps.append(node.where(is_accepted, -1))
        chosen = torch.where(is_accepted, choose(node + 1, depth), chosen)
    path = torch.stack(steps, 1) if steps else draft.tokens[:, :0]
    outside = (draft.tokens < 0) | (draft.tokens >= vocabulary)
    return AcceptedTensors(path, (path >= 0).sum(-1), chosen, (outside & live).sum(-1))


def checked_nodes(draft: Draft, q: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (0 for an id outside the vocabulary), whether it is inside, whether its q is valid; all [B, N]."""
    refuse_other_vocabulary(q, vocabulary)
    in_vocabulary = (draft.tokens >= 0) & (draft.tokens < vocabulary)
    tokens = draft.tokens.where(in_vocabulary, 0)
    token_q = q.gather(-1, tokens.unsqueeze(-1))[..., 0]
    is_distribution = (q.amin(-1) >= 0) & ((q.sum(-1) - 1).abs() < 1e-3) & (token_q > 0)
    return tokens, in_vocabulary, in_vocabulary & is_distribution


def refuse_other_vocabulary(q: Tensor, vocabulary: int) -> None:
    """Raises DrafterError for a q [..., V] over another vocabulary; a q of width 1 would broadcast silently."""
    if q.shape[-1] != vocabulary:
        raise DrafterError(
            f"a draft's q must be over the target's vocabulary of {vocabulary} tokens, got {q.shape[-1]}; "
            "set q to 0 for tokens that the drafter can't propose"
        )


def repaired_q(q: Tensor, tokens: Tensor, in_vocabulary: Tensor, valid: Tensor) -> Tensor:
    """q [..., V] with invalid rows made one-hot at the node's token, or all 0 if its id is outside the vocabulary."""
    one_hot = torch.zeros_like(q).scatter_(-1, tokens[..., None], in_vocabulary[..., None].to(q.dtype))
    return torch.where(valid[..., None], q, one_hot)


def residual(r: Tensor, q: Tensor) -> Tensor:
    """norm(max(r - q, 0)) [B, V]; r itself if nothing remains, which only rounding can cause."""
    difference = (r - q).clamp(min=0)
    mass = difference.sum(-1, keepdim=True)
    return torch.where(mass > 1e-12, difference / mass.clamp(min=1e-12), r)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Expected acceptance of q under p.  p, q [..., V], each summing to 1.  Returns [...] in [0, 1]; equals 1 - TV."""
    return torch.minimum(p, q).sum(-1)
