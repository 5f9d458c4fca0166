"""The union of two drafts under the same anchors: one tree with the proposals of two drafters.

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
"""Per slot: a node's number in its draft → its number in the union; nodes outside the union are absent."""


def merged(one: Draft, other: Draft, most: Tensor) -> tuple[Draft, NodeMaps]:
    """The nodes of `one`, then those that `other` adds, as a new draft; and the numbers of `other`'s nodes in it.

    most [B] int64 on the CPU: maximum number of nodes per slot.  Sampling in `other` must be independent of that in
    `one`.  A deterministic node of `other` whose token is already under the same parent becomes that node.  A sampled
    node is always added and tried with its q: omitting it because of its token would make the output inexact.  Of two
    equal siblings the later one is never accepted, so its children are moved to the earlier one.  A missing confidence
    counts as 1.
    """
    union = _renumbered(one.first(most))
    if not any(union.live):
        union = _renumbered(other.first(most))
        return union, [dict(enumerate(range(size))) for size in union.live]
    slots = zip(_deterministic(other), most.tolist(), strict=True)
    unions = [_union(union, other, b, fixed, limit) for b, (fixed, limit) in enumerate(slots)]
    nodes, parents, node_maps = zip(*unions, strict=True)
    if sum(map(len, nodes)) > sum(union.live):
        union = _renumbered(_side_by_side(union, other).select(nodes, parents))
    return union, list(node_maps)


def _renumbered(draft: Draft) -> Draft:
    """The draft as a new proposal, its nodes numbered in order."""
    return draft if draft.origin is None else replace(draft, origin=None)


def deterministic(draft: Draft, seeded: Tensor | None) -> Draft:
    """The draft with the nodes of `seeded` [B] bool slots made deterministic, as the acceptance rule judges them."""
    if seeded is None or draft.q is None:
        return draft
    if bool(seeded.all()):
        return replace(draft, q=None)
    return replace(draft, q=torch.where(seeded[:, None, None], _one_hot(draft, draft.q), draft.q))


def _deterministic(draft: Draft) -> list[list[bool]]:
    """Which nodes have no q, or a q that is one-hot at their own token."""
    if draft.q is None:
        return [[True] * draft.tokens.shape[1]] * len(draft.tokens)
    return is_one_hot(draft.q, draft.tokens).tolist()


def _union(
    one: Draft, other: Draft, b: int, fixed: Sequence[bool], most: int
) -> tuple[list[int], list[int], dict[int, int]]:
    """One slot's nodes of the union, their parents, and the numbers of the nodes of `other`."""
    size, width = one.live[b], one.tokens.shape[1]
    nodes, parents = list(range(size)), list(one.tree[b][:size])
    by_token = {(parents[n], one.ids[b][n]): n for n in reversed(nodes)}
    node_map = {-1: -1}
    for n, parent in enumerate(other.tree[b][: other.live[b]]):
        if parent not in node_map:
            continue
        place = node_map[parent], other.ids[b][n]
        if fixed[n] and place in by_token:
            node_map[n] = by_token[place]
        elif len(parents) < most:
            node_map[n] = by_token.setdefault(place, len(parents))
            nodes.append(width + n)
            parents.append(place[0])
    del node_map[-1]
    return nodes, parents, node_map


def _side_by_side(one: Draft, other: Draft) -> Draft:
    """The nodes of `one`, then those of `other`, without parents."""
    both, confidence = (one, other), None
    reference = next((x.q for x in both if x.q is not None), None)
    q = None if reference is None else torch.cat([_one_hot(x, reference) if x.q is None else x.q for x in both], 1)
    if one.confidence is not None or other.confidence is not None:
        confidences = [
            torch.ones_like(x.tokens, dtype=torch.float32) if x.confidence is None else x.confidence for x in both
        ]
        confidence = torch.cat(confidences, 1)
    tokens = torch.cat([one.tokens, other.tokens], 1)
    return Draft(tokens, tokens, one.sizes, q, confidence)


def _one_hot(draft: Draft, like: Tensor) -> Tensor:
    """q [B, N, V] of deterministic nodes; 0 for an id outside the vocabulary.  like [B, any, V]."""
    in_vocabulary = (draft.tokens >= 0) & (draft.tokens < like.shape[-1])
    q = like.new_zeros(*draft.tokens.shape, like.shape[-1])
    return q.scatter_(-1, draft.tokens.where(in_vocabulary, 0)[..., None], in_vocabulary[..., None].to(q.dtype))
