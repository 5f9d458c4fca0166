"""Rules that use the target's distribution p alone: accept the longest path of tokens that are likely enough, of equal
lengths the likelier, then draw the next token from p.

At temperature 0 p is one-hot, so such a rule accepts no token that the acceptance rule would reject.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.decoding.noise import Purpose, Streams
from outrider.lab.take_over import node_distances, own_rows
from outrider.policies.lossy import LossyRule
from outrider.sampling.fast import Chain, outside


@dataclass(frozen=True)
class LikelyEnough(LossyRule):
    """A rule of p alone: accept the longest path of tokens that pass, then draw from p.  q is not used."""

    name: str
    passes: Callable[[Tensor], Tensor]
    """p [..., V] to the tokens that may be accepted, [..., V] bool."""

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        """p [B, N+1, V].  Ids outside the vocabulary never pass and are counted as invalid; q is not used."""
        is_valid, index = own_rows(draft, p.shape[-1])
        paths = _longest(draft, is_valid & self.passes(p)[index], p[index])
        slots, rows, counts = torch.tensor(
            [(b, path[-1] + 1 if path else 0, len(path)) for b, path in enumerate(paths)], device=p.device
        ).T
        following = streams.draw(p[slots, rows], counts, Purpose.TARGET)
        return Accepted(paths, following.tolist(), outside(draft, p.shape[-1]))

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        return tv_distance(self, draft, p, accepted)


def tv_distance(rule: LikelyEnough, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
    """Total variation between what the rule emits and p, at every position of this step.  [B, D] float64, 0 elsewhere.

    At each position: between the distribution of the token emitted there, given all text before it, and p.  A chain
    drawn from q has a closed form: it emits e = q where that passes, and p with the rest of the mass: sum |e - p| / 2.
    For a deterministic draft e is one-hot at an accepted token: 1 - p(x).  Both are exact.  For a tree of sampled nodes
    the accepted tokens are treated as deterministic, which on average overestimates, never underestimates.  A token
    drawn from p after the draft adds 0.

    Averaged over texts that the rule wrote, the sum over a text bounds the total variation between the rule's
    distribution of the whole text and the target's; divided by tokens it is the distance per emitted token.
    """
    if draft.q is None or draft.branches or draft.q.shape[-1] != p.shape[-1]:
        return _taken_as_given(draft, p, accepted)
    chain, exact = Chain.of(draft, p), p[:, :-1]
    drafted = chain.q * rule.passes(exact)
    emitted = drafted + (1 - drafted.sum(-1, keepdim=True)) * exact
    place = torch.arange(chain.live.shape[1], device=p.device)
    was_reached = chain.live & (place <= torch.tensor(accepted.counts, device=p.device)[:, None])
    return (emitted - exact).abs().sum(-1).double() / 2 * was_reached


def _taken_as_given(draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
    """Distance of the accepted tokens from p as if nothing else could have been drafted: 1 - p(x).  [B, D]."""
    strays = node_distances(draft, p, is_by_q=False)
    path = padded(accepted.paths, -1, p.device)
    return strays.gather(1, path.clamp(min=0)) * (path >= 0)


def _longest(draft: Draft, may_stay: Tensor, node_p: Tensor) -> list[list[int]]:
    """Each slot's longest path of nodes that may stay; of equals the likelier, then the first.  may_stay, node_p
    [B, N]."""
    paths = []
    slots = zip(draft.tree, draft.live, may_stay.tolist(), node_p.double().log().tolist(), strict=True)
    for parents, size, stays, logs in slots:
        longest: dict[int, tuple[int, float, list[int]]] = {-1: (0, 0.0, [])}
        for n in range(size):
            if stays[n] and parents[n] in longest:
                depth, likelihood, path = longest[parents[n]]
                longest[n] = depth + 1, likelihood + logs[n], [*path, n]
        paths.append(max(longest.values(), key=lambda each: each[:2])[2])
    return paths
