"""Block verification: a chain sampled from q is verified as a whole, so that a later token can rescue an earlier one.

Exact, and in expectation accepts at least as many tokens as the acceptance rule (arXiv 2403.10444).  B live slots, N
drafted nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.sampling.fast import Chain, coins, of_chain


def accept_block(draft: Draft, p: Tensor, streams: Streams) -> Accepted:
    """Accept the longest prefix whose random number is below S[i] / (S[i] + 1 - w[i]); for the whole draft, below w.

    w[i] = min(1, w[i-1] p(x)/q(x)) is the probability that the first i tokens are accepted; S[i] = sum(max(w[i] p - q,
    0)) at the next node.

    The next token is sampled from norm(max(w p - q, 0)).  Exact for chains whose length is set by a stopping rule, by
    induction from the end: the first i tokens are accepted with probability w[i], whether the draft ends there or not.
    Equal to `accept` for a single node and for deterministic ones.  Trees, deterministic drafts and slots with a seed
    use `accept`.  p [B, N+1, V].
    """
    return of_chain(_longest, draft, p, streams)


def _longest(chain: Chain, streams: Streams) -> tuple[Tensor, Tensor]:
    # w[i], i = 1 ... N, with w[0] = 1; [B, N] float64
    walk = (chain.p_own.double() / chain.q_own.double()).log().cumsum(-1)
    # a running sum capped at 0 is the sum minus its running maximum
    stays = (walk - walk.cummax(-1).values.clamp(min=0)).exp()
    before = torch.cat([torch.ones_like(stays[:, :1]), stays[:, :-1]], 1)
    rest = (before[..., None].to(chain.p.dtype) * chain.p[:, :-1] - chain.q).clamp(min=0).sum(-1).double()
    following = torch.cat([rest[:, 1:], torch.zeros_like(rest[:, :1])], 1)
    total = following + 1 - stays
    chance = torch.where(total > 0, following / total, 1.0)
    length = torch.arange(1, stays.shape[1] + 1, device=stays.device)
    chance = torch.where(length == chain.sizes[:, None], stays, chance)
    # the longest prefix that passed its test, whether or not shorter ones did
    passed = chain.live & (coins(streams, stays.shape[1]) < chance)
    return (passed * length).amax(-1), before
