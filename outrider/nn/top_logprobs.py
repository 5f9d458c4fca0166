"""A target's distribution as its likeliest tokens and the mass of all others, in place of hidden states.

k tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens after each position; the rest of the mass is spread evenly over the others."""

    ids: Tensor
    """[..., k] int64."""
    logprobs: Tensor
    """[..., k], natural logarithms."""
    rest: Tensor
    """[...], logarithm of the mass of all other tokens."""

    @classmethod
    def of(cls, logits: Tensor, count: int) -> TopLogprobs:
        """The `count` likeliest of logits [..., V]."""
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(count, -1)
        rest = torch.log1p(-best.values.exp().sum(-1).clamp(max=1 - 1e-7))
        return cls(best.indices, best.values, rest)

    def flat(self) -> TopLogprobs:
        """One row per position."""
        return TopLogprobs(self.ids.flatten(0, -2), self.logprobs.flatten(0, -2), self.rest.flatten())

    def logits(self, rows: Tensor | slice, vocabulary: int) -> Tensor:
        """Logits [m, V] of these rows; their softmax is the distribution."""
        ids, others = self.ids[rows], vocabulary - self.ids.shape[-1]
        even = self.rest[rows].float() - math.log(max(others, 1))
        return even[:, None].repeat(1, vocabulary).scatter_(1, ids, self.logprobs[rows].float())

    def to(self, device: torch.device) -> TopLogprobs:
        return TopLogprobs(self.ids.to(device), self.logprobs.to(device), self.rest.to(device))
