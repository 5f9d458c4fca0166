"""The union of two drafts under the same anchors: one tree of what two drafters propose.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.sampling.prefix import is_one_hot

NodeMaps = list[dict[int, int]]
"""Slot by slot: a node's number in its own draft to its number in the union; nodes outside the union are absent."""


def merged(one: Draft, other: Draft, most: Tensor) -> tuple[Draft, NodeMaps]:
    """The nodes of `one`, then those that `other` adds, as a new draft; and the numbers of `other`'s nodes in it.

    most [B] int64 on the CPU, nodes per slot.  Draws in `other` must be independent of draws in `one`.  A deterministic
    node of `other` whose token is already under the same parent becomes that node.  A drawn one is always added and
    tried with its own q: leaving it out because of its token would make the output inexact.  Of two equal siblings the
    younger is never accepted, so its children become the elder's.  A missing confidence is 1: it stops nothing.
    """
    own = _renumbered(one.first(most))
    if not any(own.live):
        own = _renumbered(other.first(most))
        return own, [dict(enumerate(range(size))) for size in own.live]
    slots = zip(_deterministic(other), most.tolist(), strict=True)
    unions = [_union(own, other, b, fixed, limit) for b, (fixed, limit) in enumerate(slots)]
    nodes, parents, node_maps = zip(*unions, strict=True)
    if sum(map(len, nodes)) > sum(own.live):
        own = _renumbered(_side_by_side(own, other).select(nodes, parents))
    return own, list(node_maps)


def _renumbered(draft: Draft) -> Draft:
    """The draft as a proposal of its own, with its nodes numbered in their order."""
    return draft if draft.origin is None else replace(draft, origin=None)


def deterministic(draft: Draft, seeded: Tensor | None) -> Draft:
    """The draft with the nodes of `seeded` [B] bool slots made deterministic, as the acceptance rule judges them."""
    if seeded is None or draft.q is None:
        return draft
    if bool(seeded.all()):
        return replace(draft, q=None)
    return replace(draft, q=torch.where(seeded[:, None, None], _one_hot(draft, draft.q), draft.q))


def _deterministic(draft: Draft) -> list[list[bool]]:
    """Which nodes have no q, or one that is one-hot at their own token."""
    if draft.q is None:
        return [[True] * draft.tokens.shape[1]] * len(draft.tokens)
    return is_one_hot(draft.q, draft.tokens).tolist()


def _union(
    one: Draft, other: Draft, b: int, fixed: Sequence[bool], most: int
) -> tuple[list[int], list[int], dict[int, int]]:
    """One slot's nodes of both drafts that the union has, their parents, and the numbers of the other's nodes."""
    size, width = one.live[b], one.tokens.shape[1]
    nodes, above = list(range(size)), list(one.tree[b][:size])
    known = {(above[n], one.ids[b][n]): n for n in reversed(nodes)}
    node_map = {-1: -1}
    for n, parent in enumerate(other.tree[b][: other.live[b]]):
        if parent not in node_map:
            continue
        here = node_map[parent], other.ids[b][n]
        if fixed[n] and here in known:
            node_map[n] = known[here]
        elif len(above) < most:
            node_map[n] = known.setdefault(here, len(above))
            nodes.append(width + n)
            above.append(here[0])
    del node_map[-1]
    return nodes, above, node_map


def _side_by_side(one: Draft, other: Draft) -> Draft:
    """The nodes of two drafts, those of `other` after those of `one`, without their parents."""
    both, confidence = (one, other), None
    like = next((x.q for x in both if x.q is not None), None)
    q = None if like is None else torch.cat([_one_hot(x, like) if x.q is None else x.q for x in both], 1)
    if one.confidence is not None or other.confidence is not None:
        known = [torch.ones_like(x.tokens, dtype=torch.float32) if x.confidence is None else x.confidence for x in both]
        confidence = torch.cat(known, 1)
    tokens = torch.cat([one.tokens, other.tokens], 1)
    return Draft(tokens, tokens, one.sizes, q, confidence)


def _one_hot(draft: Draft, like: Tensor) -> Tensor:
    """q [B, N, V] of nodes that were not drawn; 0 for an id outside the vocabulary.  like [B, any, V]."""
    known = (draft.tokens >= 0) & (draft.tokens < like.shape[-1])
    q = like.new_zeros(*draft.tokens.shape, like.shape[-1])
    return q.scatter_(-1, draft.tokens.where(known, 0)[..., None], known[..., None].to(q.dtype))
