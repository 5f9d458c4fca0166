"""Log probabilities of emitted tokens under the target's distribution, never under q or a residual.

The distribution is the sampling distribution, after all settings.  At temperature 0, where that is one-hot, it is the
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
    """The most likely tokens with their log probabilities, best first, excluding tokens that can't be sampled."""


def token_logprobs(distribution: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """distribution [R, V]: log probabilities of the rows that predicted these R tokens."""
    logprobs = distribution.gather(-1, torch.tensor(tokens, device=distribution.device)[:, None])[:, 0].tolist()
    best = distribution.topk(min(alternatives, distribution.shape[-1]), -1)
    emitted = []
    for token, logprob, values, ids in zip(tokens, logprobs, best.values.tolist(), best.indices.tolist(), strict=True):
        top = tuple((n, value) for n, value in zip(ids, values, strict=True) if value > -torch.inf)
        emitted.append(TokenLogprob(token, logprob, top))
    return emitted
