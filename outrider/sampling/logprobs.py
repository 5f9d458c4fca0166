"""Log probabilities of emitted tokens under the target's own distribution, never under q or a residual.

The distribution is the one that is drawn from, after every setting.  At temperature 0, where that is one-hot, it is the
softmax of the processed logits, so that other tokens can be ranked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprob(NamedTuple):
    """One emitted token and its alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log probabilities, best first; those that can't be drawn are left out."""


def read(distribution: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """distribution [R, V]: log probabilities of the rows that predicted these R tokens."""
    logprobs = distribution.gather(-1, torch.tensor(tokens, device=distribution.device)[:, None])[:, 0].tolist()
    best = distribution.topk(min(alternatives, distribution.shape[-1]), -1)
    result = []
    for token, logprob, values, ids in zip(tokens, logprobs, best.values.tolist(), best.indices.tolist(), strict=True):
        top = tuple((n, value) for n, value in zip(ids, values, strict=True) if value > -torch.inf)
        result.append(TokenLogprob(token, logprob, top))
    return result
