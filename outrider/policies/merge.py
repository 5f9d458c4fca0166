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

Places = list[dict[int, int]]
"""Slot by slot: a node's number in its own draft to its number in the union.  What is not there has none."""


def merged(one: Draft, other: Draft, most: Tensor) -> tuple[Draft, Places]:
    """The nodes of `one`, then what `other` adds to them; and where the nodes of `other` stand.  Its `origin` starts anew.

    most [B] int64 on the CPU, nodes a slot.  What is drawn in `other` must be independent of what is drawn in `one`.  A
    deterministic node of `other` whose token is under the same parent already is that node.  A drawn one is added in any case
    and tried with its own q: left out for its token, it would make the output inexact.  Of two equal siblings the younger is
    never kept, so its children become the elder's.  A confidence that its draft does not know is 1: it stops nothing.
    """
    own = _anew(one.first(most))
    if not any(own.live):
        own = _anew(other.first(most))
        return own, [dict(enumerate(range(size))) for size in own.live]
    slots = zip(_deterministic(other), most.tolist(), strict=True)
    unions = [_union(own, other, b, fixed, limit) for b, (fixed, limit) in enumerate(slots)]
    nodes, parents, places = zip(*unions, strict=True)
    if sum(map(len, nodes)) > sum(own.live):
        own = _anew(_side_by_side(own, other).taken(nodes, parents))
    return own, list(places)


def _anew(draft: Draft) -> Draft:
    """The draft as a proposal of its own, whose nodes are numbered as they stand."""
    return draft if draft.origin is None else replace(draft, origin=None)


def deterministic(draft: Draft, seeded: Tensor | None) -> Draft:
    """The draft with slots of `seeded` [B] bool as the acceptance rule sees them: nothing in them was drawn."""
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


def _union(one: Draft, other: Draft, b: int, fixed: Sequence[bool], most: int) -> tuple[list[int], list[int], dict[int, int]]:
    """One slot's nodes of both drafts side by side that the union has, their parents, and where the other's nodes stand."""
    size, width = one.live[b], one.tokens.shape[1]
    nodes, above = list(range(size)), list(one.tree[b][:size])
    known = {(above[n], one.ids[b][n]): n for n in reversed(nodes)}
    place = {-1: -1}
    for n, parent in enumerate(other.tree[b][: other.live[b]]):
        if parent not in place:
            continue
        here = place[parent], other.ids[b][n]
        if fixed[n] and here in known:
            place[n] = known[here]
        elif len(above) < most:
            place[n] = known.setdefault(here, len(above))
            nodes.append(width + n)
            above.append(here[0])
    del place[-1]
    return nodes, above, place


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
