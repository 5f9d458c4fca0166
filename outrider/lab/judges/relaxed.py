"""Relaxed top-k: a drafted token is accepted if it is among the target's k likeliest.  LOSSY."""

from __future__ import annotations

from torch import Tensor

from outrider.errors import ConfigError
from outrider.lab.likely import LikelyEnough

SETTINGS = {"k": int}
REQUIRED = ""


def relaxed(k: int = 2) -> LikelyEnough:
    """Accept a token that is among the target's k likeliest or equals the k-th, never one of probability 0."""
    if k < 1:
        raise ConfigError(f"relaxed: k must be at least 1, got {k}")

    def passes(p: Tensor) -> Tensor:
        return (p >= p.topk(min(k, p.shape[-1]), -1).values[..., -1:]) & (p > 0)

    return LikelyEnough(f"relaxed(k={k})", passes)
