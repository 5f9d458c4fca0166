"""From logits to the distribution that drafter and target both mean; temperature 0 is one-hot.

The order is part of the definition: temperature, then top-k, then top-p, as in transformers.

All noise is counter-based: a number is a hash of (seed, output index, purpose, salt) and of nothing else, so a slot's text
does not depend on who shares its batch, and a step that is repeated draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens drawn.  The default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum."""
    seed: int | None = None
    """Same seed, same noise; None draws a fresh one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature {self.temperature} is not a number of 0 or more; 0 is greedy")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} lies outside (0, 1]; 1 keeps every token")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed} does not fit in 64 bits")


class Settings(NamedTuple):
    """The `Sampling` of every live slot, as tensors [B]; None where no slot asks for it."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> Settings:
        def column(values: list, idle: float) -> Tensor | None:
            return None if all(v == idle for v in values) else torch.tensor(values, device=device)

        return cls(
            column([s.temperature for s in samplings], 0.0),
            column([s.top_k for s in samplings], 0),
            column([s.top_p for s in samplings], 1.0),
        )

    @property
    def is_greedy(self) -> bool:
        """Every live slot is at temperature 0."""
        return self.temperature is None


def distribution(logits: Tensor, settings: Settings) -> Tensor:
    """The law of the next token.  logits [B, ..., V]; returns the same shape, each row summing to 1.

    float32, or float64 where the logits are: bf16 softmax loses mass over 150k tokens.  Ties at temperature 0 go to the
    lowest token id.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if settings.temperature is None:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    shape = (-1,) + (1,) * (logits.dim() - 1)
    temperature = settings.temperature.to(logits.dtype).view(shape)
    is_cold = temperature == 0
    # the largest is 0, so that a temperature near 0 overflows to -inf alone: of two +inf softmax makes NaN
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(is_cold, 1.0, temperature)
    if settings.top_k is not None:
        scaled = _keep_top_k(scaled, settings.top_k.view(shape))
    p = scaled.softmax(-1)
    if settings.top_p is not None:
        p = _keep_top_p(p, settings.top_p.to(p.dtype).view(shape))
    if bool(is_cold.any()):
        cold = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        p = torch.where(is_cold, cold, p)
    return p


def _keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Everything below the k-th largest logit becomes impossible; equals of the k-th stay.  top_k 0 keeps all."""
    largest = min(int(top_k.max()), logits.shape[-1])
    ranked = logits.topk(largest, -1).values
    at = (top_k.clamp(1, largest) - 1).expand(*logits.shape[:-1], 1)
    return logits.masked_fill((top_k > 0) & (logits < ranked.gather(-1, at)), -torch.inf)


def _keep_top_p(p: Tensor, top_p: Tensor) -> Tensor:
    """The most likely tokens until their sum reaches top_p, at least one, normalised again."""
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    kept = torch.zeros_like(p).scatter_(-1, order, ranked.masked_fill(before >= top_p, 0.0))
    return kept / kept.sum(-1, keepdim=True)


class Purpose(IntEnum):
    """What a number is drawn for; numbers of different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3


@dataclass(frozen=True, slots=True)
class Streams:
    """The noise of every live slot, from the token that is committed next on."""

    seeds: Tensor
    """[B] int64."""
    index: Tensor
    """[B] int64, output index of the next token; depth d of a draft stands at index + d."""

    def uniform(self, depth: Tensor | int, purpose: Purpose, salt: int = 0) -> Tensor:
        """[B] float64 in (0, 1)."""
        return _to_unit(_mix(self._key(depth, purpose) + _wrap(salt * _STEP)))

    def draw(self, weights: Tensor, depth: Tensor | int, purpose: Purpose) -> Tensor:
        """One token a slot with probability in proportion to its weight.  weights [B, V]; returns [B] int64.

        An exponential race: token x wins with the largest weights[x] / E[x], where E[x] depends on (seed, index, purpose, x)
        alone, so two laws that are close mostly draw the same token from the same noise.
        """
        key = self._key(depth, purpose).unsqueeze(-1)
        tokens = torch.arange(weights.shape[-1], device=weights.device)
        exponential = -_to_unit(_mix(key + tokens * _STEP)).log()
        return (weights / exponential).argmax(-1)

    def _key(self, depth: Tensor | int, purpose: Purpose) -> Tensor:
        counter = (self.index + depth) * _wrap(_STEP * 3) + int(purpose)
        if purpose is Purpose.DRAFT:
            # Fresh in every step: a policy may have seen what an earlier draft held here, behind its rejected token.
            counter = counter + _mix(self.index + 1)
        return _mix(_mix(self.seeds + _STEP) ^ _mix(counter))


def _wrap(value: int) -> int:
    """An integer as int64 sees it."""
    return (value + 2**63) % 2**64 - 2**63


# SplitMix64's increment and finaliser (Steele, Lea and Flood, 2014), in int64 that wraps.
_STEP = _wrap(0x9E3779B97F4A7C15)
_FIRST = _wrap(0xBF58476D1CE4E5B9)
_SECOND = _wrap(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _to_unit(x: Tensor) -> Tensor:
    """float64 in (0, 1) from the upper 52 bits: never 0, never 1.  With 53, the half would be rounded up to 1."""
    return (((x >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52
