"""Typical acceptance (Medusa, arXiv 2401.10774): a lower threshold where the target is unsure.  LOSSY.

Unlike Medusa's code, the token after the accepted ones is drawn from p, not the likeliest, and the first drafted token
is tested like the others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.lab.likely import LikelyEnough

SETTINGS = {"epsilon": float, "delta": float}
REQUIRED = ""


def typical(epsilon: float = 0.09, delta: float = 0.3) -> LikelyEnough:
    """Accept a token x where p(x) > min(epsilon, delta exp(-H(p))), H in nats: a lower threshold where p is spread
    out."""
    if not (0 < epsilon <= 1 and delta > 0 and math.isfinite(delta)):
        raise ConfigError(
            f"typical: epsilon must be above 0 and at most 1, and delta above 0, got {epsilon} and {delta}"
        )

    def passes(p: Tensor) -> Tensor:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        return p > (delta * (-entropy).exp()).clamp(max=epsilon)

    return LikelyEnough(f"typical(epsilon={epsilon:g}, delta={delta:g})", passes)
