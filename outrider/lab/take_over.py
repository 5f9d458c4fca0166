"""Drafted tokens that a lossy rule accepts without a test: which ones are allowed, and their distance from p.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.sampling.fast import Chain


def eldest_child(draft: Draft, b: int, node: int) -> int | None:
    """The first child of a node of slot b, or of the anchor, which is -1; None if there is none."""
    tree = draft.tree[b][: draft.live[b]]
    return next((n for n in range(node + 1, len(tree)) if tree[n] == node), None)


def own_rows(draft: Draft, vocabulary: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Whether each id is inside the vocabulary [B, N]; and the index of its value in [B, N+1, V]: slot, parent's row,
    token."""
    is_valid = (draft.tokens >= 0) & (draft.tokens < vocabulary)
    slots = torch.arange(len(draft.tokens), device=draft.tokens.device)[:, None]
    return is_valid, (slots, (draft.parents + 1).clamp(0, draft.tokens.shape[1]), draft.tokens.where(is_valid, 0))


def possible(draft: Draft, logits: Tensor) -> list[list[bool]]:
    """For each node, whether the request allows its token, by the target's processed logits [B, N+1, V]."""
    is_valid, index = own_rows(draft, logits.shape[-1])
    allowed: list[list[bool]] = (is_valid & (logits[index] > -torch.inf)).tolist()
    return allowed


def forced(draft: Draft, p: Tensor, taken: Sequence[Sequence[int]]) -> tuple[Draft, Tensor]:
    """Draft and p by which the acceptance rule accepts these nodes of each slot for sure, and judges the others as
    before.  Their ids are inside the vocabulary.  p [B, N+1, V]."""
    b, n = _index(taken, p.device)
    if not len(b):
        return draft, p
    rows, tokens = draft.parents[b, n] + 1, draft.tokens[b, n]
    p = p.clone()
    p[b, rows] = 0.0
    p[b, rows, tokens] = 1.0
    if draft.q is None:
        return draft, p
    q = draft.q.clone()
    q[b, n] = 0.0
    q[b, n, tokens] = 1.0
    return replace(draft, q=q), p


def ending_in_draft(draft: Draft, accepted: Accepted, is_whole: Sequence[bool]) -> Accepted:
    """Where is_whole[b], the last node of the path is the step's next token, so that the target adds none of its own;
    an empty path stays as it is."""
    paths, following = list(accepted.paths), list(accepted.next_tokens)
    for b, path in enumerate(accepted.paths):
        if is_whole[b] and path:
            paths[b], following[b] = path[:-1], draft.ids[b][path[-1]]
    return Accepted(paths, following, accepted.invalid)


def node_distances(draft: Draft, p: Tensor, is_by_q: bool) -> Tensor:
    """Total variation from p of each node, if it is taken over.  [B, N] float64.

    is_by_q: whether the rule takes a node over by the text before it alone.  Then a token of a chain drawn from q is
    emitted with q, and its distance is that of q and p, exactly.  Any other token is taken as given, as if nothing else
    could have been drafted: 1 - p(x), exact for a deterministic draft, and on average too much for a drawn one.
    """
    if is_by_q and draft.q is not None and not draft.branches and draft.q.shape[-1] == p.shape[-1]:
        chain = Chain.of(draft, p)
        return (chain.q - p[:, :-1]).abs().sum(-1).double() / 2
    is_valid, index = own_rows(draft, p.shape[-1])
    return 1 - torch.where(is_valid, p[index], 0.0).double()


def distances_of(nodes: Tensor, emitted: Sequence[Sequence[int]], taken: Sequence[Sequence[int]]) -> Tensor:
    """[B, D] float64 by place: nodes[b, n] where the emitted node n was taken over, 0 where p decided.

    nodes [B, N]; emitted: the nodes of each slot in order, the one that is its next token included.
    """
    width = max(map(len, emitted), default=0) + 1
    distances = nodes.new_zeros(len(emitted), width)
    for b, path in enumerate(emitted):
        for place, node in enumerate(path):
            if node in taken[b]:
                distances[b, place] = nodes[b, node]
    return distances


def _index(taken: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Slot and node of all of them."""
    slots = [b for b, nodes in enumerate(taken) for _ in nodes]
    both = padded([slots, [node for nodes in taken for node in nodes]], 0, device)
    return both[0], both[1]
