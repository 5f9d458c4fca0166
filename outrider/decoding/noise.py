"""Counter-based noise: each number is a hash of (seed, output index, purpose, salt) and nothing else.

So a slot's text does not depend on the rest of its batch, and a repeated step draws the same tokens.  B slots, V
vocabulary, W rows of a slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

# SplitMix64's increment and finaliser (Steele, Lea and Flood, 2014), as int64, which wraps.
_STEP, _FIRST, _SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SPARSE_FROM = 8192  # from this vocabulary size on, noise is only computed for tokens with nonzero weight
on_cpu: Callable[[Tensor, Tensor], Tensor] | None = None
"""A faster `race` for weights [..., V] and keys [...] on a CPU, with the same winners; set by `outrider.kernels` if it
can be compiled."""


class Purpose(IntEnum):
    """The purpose of a random number.  Numbers of different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3
    PART = 4  # seeds of drafters that share a draft


@dataclass(frozen=True, slots=True)
class Streams:
    """The noise of every live slot, starting at its next token."""

    seeds: Tensor
    """[B] int64."""
    index: Tensor
    """[B] int64, output index of the next token; a node at depth d uses index + d."""
    seeded: Tensor | None = None
    """[B] bool, slots that draft with the target's noise, or None.  The acceptance rule treats their nodes as
    deterministic and emits the target's draw, whatever was drafted.  (Daliri, Musco and Suresh 2024.)"""

    def uniform(self, depth: Tensor | int, purpose: Purpose, salt: Tensor | int = 0) -> Tensor:
        """[B] float64 in (0, 1)."""
        # an int is multiplied on the host and wrapped to int64: a tensor would have to be copied to the device
        offset = salt * _STEP if isinstance(salt, Tensor) else (salt * _STEP + 2**63) % 2**64 - 2**63
        return _to_unit(_mix(self.key(depth, purpose) + offset))

    def draw(self, weights: Tensor, depth: Tensor | int, purpose: Purpose, salt: Tensor | None = None) -> Tensor:
        """One token per row with probability proportional to its weight.  weights [B, V], or [B, W, V] with a salt [W]
        that tells a slot's rows apart (seeded slots ignore it when drafting); returns [B] or [B, W] int64.

        An exponential race: the token x with the largest weights[x] / E[x] wins, where E[x] depends only on (seed,
        index, purpose, salt, x).  So two similar distributions mostly yield the same token from the same noise, and
        with the winner's weight set to 0, the same noise yields a second token distributed like a fresh draw.
        """
        key = self.key(depth, purpose, salt)
        is_plain_cpu = weights.device.type == "cpu" and type(weights) is Tensor  # not while it is traced
        if on_cpu is not None and is_plain_cpu:
            return on_cpu(weights, key)
        if weights.shape[-1] > SPARSE_FROM and is_plain_cpu:
            flat = weights.flatten(0, -2)
            rows, tokens = flat.nonzero().unbind(-1)
            if 8 * len(rows) < flat.numel():
                times = flat[rows, tokens] / _exponential(key.expand(weights.shape[:-1]).flatten()[rows], tokens)
                return _first_of_largest(times, rows, tokens, len(flat)).view(weights.shape[:-1])
        return race(weights, key, torch.arange(weights.shape[-1], device=weights.device))

    def key(self, depth: Tensor | int, purpose: Purpose, salt: Tensor | None = None) -> Tensor:
        """Key of the race: [B] int64, or [B, W] for a salt [W]."""
        key = self._hash(depth, purpose, salt)
        if purpose is not Purpose.DRAFT or self.seeded is None:
            return key
        seeded, target_key = self.seeded, self._hash(depth, Purpose.TARGET)
        if salt is not None:
            seeded, target_key = seeded.unsqueeze(-1), target_key.unsqueeze(-1)
        return torch.where(seeded, target_key, key)

    def _hash(self, depth: Tensor | int, purpose: Purpose, salt: Tensor | None = None) -> Tensor:
        counter = (self.index + depth) * (3 * _STEP + 2**64) + int(purpose)
        if purpose is Purpose.DRAFT:
            # new in every step: a policy may have seen an earlier draft at this position, after its rejected token
            counter = counter + _mix(self.index + 1)
        seeds = _mix(self.seeds + _STEP)
        if salt is not None:
            # salt 0 adds nothing and gives the noise of a draw without salt
            counter, seeds = counter.unsqueeze(-1) + _mix(salt * _STEP), seeds.unsqueeze(-1)
        return _mix(seeds ^ _mix(counter))


def race(weights: Tensor, key: Tensor, tokens: Tensor) -> Tensor:
    """The token with the largest weight / E, where E is exponential noise of `key`.  weights [..., V], key [...].

    tokens: 0 to V - 1.  Passed in because torch 2.13 compiles an arange created during tracing into code that crashes.
    """
    return (weights / _exponential(key.unsqueeze(-1), tokens)).argmax(-1)


def _exponential(key: Tensor, tokens: Tensor) -> Tensor:
    """Standard exponential noise of these tokens, float64."""
    return -_to_unit(_mix(key + tokens * _STEP)).log()


def _first_of_largest(values: Tensor, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """The token with the largest value in each of `count` rows, the lowest on a tie; 0 for an empty row."""
    best = values.new_zeros(count).scatter_reduce(0, rows, values, "amax", include_self=False)
    wins = values == best[rows]
    return tokens.new_zeros(count).scatter_reduce(0, rows[wins], tokens[wins], "amin", include_self=False)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _to_unit(x: Tensor) -> Tensor:
    """float64 in (0, 1) from the upper 52 bits, never 0 or 1: with 53 bits, the added half would round up to 1."""
    return (((x >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52
