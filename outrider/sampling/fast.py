"""Fast paths of the acceptance rule, with token-for-token identical output.

    accept_greedy    every slot at temperature 0        from the argmax alone, no distribution
    accept_chain     chains drawn from q                all nodes at once, no loop

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted, accept, checked_nodes, refuse_other_vocabulary, repaired_q, residual
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams


def accept_greedy(draft: Draft, choice: list[list[int]], vocabulary: int) -> Accepted:
    """Accept a draft of greedy slots: follow the child that is the target's choice.  choice [B, N+1], as lists.

    Equals `accept` with p one-hot at `choice`.
    """
    rows = zip(draft.ids, draft.tree, draft.live, choice, strict=True)
    paths, following = [], []
    for tokens, parents, size, chosen in rows:
        at, path = -1, []
        for n in range(size):
            if parents[n] == at and tokens[n] == chosen[at + 1]:
                path.append(n)
                at = n
        paths.append(path)
        following.append(chosen[at + 1])
    return Accepted(paths, following, outside(draft, vocabulary))


def outside(draft: Draft, vocabulary: int) -> list[int]:
    """How many ids of each slot's live nodes lie outside the vocabulary."""
    slots = zip(draft.ids, draft.live, strict=True)
    return [sum(not 0 <= token < vocabulary for token in tokens[:size]) for tokens, size in slots]


def accept_chain(draft: Draft, p: Tensor, streams: Streams) -> Accepted:
    """Accept chains with dense q.  p [B, N+1, V]; uses the random numbers of `accept`, which handles other drafts."""
    return of_chain(_passed, draft, p, streams)


def of_chain(
    judge: Callable[[Chain, Streams], tuple[Tensor, Tensor | None]], draft: Draft, p: Tensor, streams: Streams
) -> Accepted:
    """Accept a chain drawn from q as a whole; trees, deterministic drafts and slots with a seed go to `accept`.

    judge: returns how many nodes are accepted, [B], and the weight of the row each node was sampled for, [B, N]; None
    means 1.
    """
    if draft.q is None or draft.branches or not draft.tokens.numel():
        return accept(draft, p, streams)
    refuse_other_vocabulary(draft.q, p.shape[-1])
    if streams.seeded is not None and bool(streams.seeded.all()):
        return accept(replace(draft, q=None), p, streams)
    chain = Chain.of(draft, p)
    accepted = chain.accepted(*judge(chain, streams), streams)
    if streams.seeded is None:
        return accepted
    matched = accept(replace(draft, q=None), p, streams)
    for b in streams.seeded.nonzero()[:, 0].tolist():
        accepted.paths[b], accepted.next_tokens[b] = matched.paths[b], matched.next_tokens[b]
        accepted.invalid[b] = matched.invalid[b]
    return accepted


def _passed(chain: Chain, streams: Streams) -> tuple[Tensor, None]:
    passed = chain.live & (coins(streams, chain.live.shape[1]) * chain.q_own < chain.p_own)
    return passed.long().cumprod(-1).sum(-1), None


@dataclass(frozen=True, slots=True)
class Chain:
    """A sampled chain's nodes as the acceptance rule sees them: invalid ones are deterministic."""

    p: Tensor
    """[B, N+1, V]."""
    q: Tensor
    """[B, N, V], with invalid rows replaced."""
    live: Tensor
    """[B, N]."""
    p_own: Tensor
    """[B, N] the target's probability of the node's token; 0 for an id outside the vocabulary."""
    q_own: Tensor
    """[B, N] the drafter's; above 0."""
    sizes: Tensor
    """[B]."""
    invalid: Tensor
    """[B]."""

    @classmethod
    def of(cls, draft: Draft, p: Tensor) -> Chain:
        assert draft.q is not None
        tokens, in_vocabulary, valid = checked_nodes(draft, draft.q, p.shape[-1])
        ids, sizes = tokens[..., None], draft.sizes.to(tokens.device)
        # usually all are valid, and a copy would be as large as q
        q = draft.q if bool(valid.all()) else repaired_q(draft.q, tokens, in_vocabulary, valid)
        q = q.to(p.dtype)
        live = torch.arange(tokens.shape[1], device=tokens.device) < sizes[:, None]
        p_own = torch.where(in_vocabulary, p[:, :-1].gather(-1, ids)[..., 0], 0.0)
        q_own = torch.where(in_vocabulary, q.gather(-1, ids)[..., 0], 1.0)
        return cls(p, q, live, p_own, q_own, sizes, (~valid & live).sum(-1))

    def accepted(self, counts: Tensor, weight: Tensor | None, streams: Streams) -> Accepted:
        """Accept the first `counts` [B] nodes; the next token comes from norm(max(weight p - q, 0)), or p after the
        last."""
        slots, at = torch.arange(len(counts), device=counts.device), counts.clamp(max=self.live.shape[1] - 1)
        left = self.p[slots, counts]
        held = left if weight is None else left * weight[slots, at, None].to(left.dtype)
        left = torch.where((counts < self.sizes)[:, None], residual(held, self.q[slots, at]), left)
        order = torch.arange(self.live.shape[1], device=counts.device).expand(self.live.shape)
        return Accepted.of(order, counts, streams.draw(left, counts, Purpose.TARGET), self.invalid)


def coins(streams: Streams, nodes: int) -> Tensor:
    """[B, N] float64: column n is the random number of `accept` at node n of a chain."""
    n = torch.arange(nodes, device=streams.index.device)
    return Streams(streams.seeds[:, None], streams.index[:, None]).uniform(n, Purpose.ACCEPT, salt=n)
