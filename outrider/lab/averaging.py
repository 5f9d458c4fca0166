"""Where the members of an ensemble are averaged, and what p is.  (SAFE, arXiv 2510.15346.)

If it is not selective, p is the mean wherever some member has a distribution.  If it is, as in SAFE, p is the first
member's own, except where all members have one, their likeliest tokens differ, and the first's has at most half of the
mean.  Elsewhere that token is the mean's likeliest too, so greedy texts are those of the mean at every position that
all tokenizers share.  `sharpen` is SAFE's: where no token has more than half of the mean, the first member's likeliest
token also gets the probability that a member with another tokenizer gives to the piece it begins with.

Differs from the paper: the conditions are our interpretation.

B live slots, R rows of a pass (anchor and drafted nodes), V vocabulary.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.lab.alignment import AlignedMember, Opinion, SharedMember
from outrider.sampling.distribution import wide

HALF = math.log(0.5)
ENSEMBLED, DISAGREED, CHANGED, UNDECIDED = 1, 2, 4, 8
"""Bits by which a row of a pass is counted in `Shares`."""


@dataclass(eq=False)
class Shares:
    """Counts of committed positions: where members were ensembled, and where it mattered."""

    positions: int = 0
    ensembled: int = 0
    """Members were averaged; elsewhere p is the first member's."""
    disagreed: int = 0
    """Not all members that have a distribution have the same likeliest token."""
    changed: int = 0
    """The likeliest token of the mean is not the first member's."""
    undecided: int = 0
    """They disagreed and were averaged, and no token has more than half of the mean."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, codes: Sequence[int]) -> None:
        """Count positions by their bits."""
        with self._lock:  # several threads may decode with one target
            self.positions += len(codes)
            self.ensembled += sum(bool(code & ENSEMBLED) for code in codes)
            self.disagreed += sum(bool(code & DISAGREED) for code in codes)
            self.changed += sum(bool(code & CHANGED) for code in codes)
            self.undecided += sum(bool(code & UNDECIDED) for code in codes)

    def __str__(self) -> str:
        every = max(1, self.positions)
        return (
            f"{self.positions:,} positions, {self.ensembled / every:.1%} ensembled, {self.disagreed / every:.1%} with "
            f"another likeliest token in some member ({self.undecided / every:.1%} with none above half of the mean), "
            f"{self.changed / every:.1%} where the mean's is not the first member's"
        )


class Averaged(NamedTuple):
    """p at every row of a pass, and how it came about."""

    log_p: Tensor
    """[B, R, V]."""
    is_ensembled: Tensor
    """[B, R], whether members were averaged."""
    is_split: Tensor
    """[B, R], whether a member that has a distribution prefers another token than the first member."""

    def codes(self, likeliest: Tensor) -> Tensor:
        """[B, R] int64, the bits of `Shares`.  likeliest [B, R]: the first member's tokens."""
        best, choice = self.log_p.max(-1)
        bits = {
            ENSEMBLED: self.is_ensembled, DISAGREED: self.is_split, CHANGED: choice != likeliest,
            UNDECIDED: self.is_split & self.is_ensembled & (best <= HALF),
        }  # fmt: skip
        return sum((bit * flags for bit, flags in bits.items()), torch.zeros_like(likeliest))


class Average:
    """Averages the members' distributions."""

    def __init__(
        self, first: float, others: Sequence[tuple[SharedMember | AlignedMember, float]], is_selective: bool,
        sharpen: bool,
    ):  # fmt: skip
        """first: weight of the first member.  others: the other members with their weights, in the order of their
        opinions."""
        self.first, self.others, self.is_selective, self.sharpen = first, others, is_selective, sharpen

    def of(self, logits: Tensor, likeliest: Tensor, opinions: Sequence[Opinion | None]) -> Averaged:
        """logits [B, R, V] and their likeliest tokens [B, R] are the first member's."""
        log_p = wide(logits).log_softmax(-1)
        speaks, is_split = [], torch.zeros_like(likeliest, dtype=torch.bool)
        for opinion in opinions:
            speaks.append(torch.zeros_like(is_split))
            if opinion is not None:
                best, choice = opinion.log_p.max(-1)
                speaks[-1] = best > -torch.inf
                is_split |= speaks[-1] & (choice != likeliest)
        if not self.is_selective:
            log_p = self.sharpened(self._mean(log_p, opinions), likeliest, opinions)
            return Averaged(log_p, functools.reduce(torch.logical_or, speaks), is_split)
        is_ensembled = functools.reduce(torch.logical_and, speaks) & is_split
        is_ensembled &= self._of_first(log_p, likeliest, opinions) <= 0.5
        if bool(is_ensembled.any()):
            here = [opinion and opinion.at(is_ensembled) for opinion in opinions]
            log_p[is_ensembled] = self.sharpened(self._mean(log_p[is_ensembled], here), likeliest[is_ensembled], here)
        return Averaged(log_p, is_ensembled, is_split)

    def _of_first(self, log_p: Tensor, likeliest: Tensor, opinions: Sequence[Opinion | None]) -> Tensor:
        """[B, R], the mean's probability of the first member's likeliest token."""
        at = likeliest[..., None]
        first = log_p.gather(-1, at)[..., 0].exp()
        mean = self.first * first
        for opinion, (_, weight) in zip(opinions, self.others, strict=True):
            if opinion is not None:
                rest = 0.0 if opinion.rest is None else opinion.rest
                mean += weight * (opinion.log_p.gather(-1, at)[..., 0].exp() + rest * first)
        return mean

    def sharpened(self, log_p: Tensor, likeliest: Tensor, opinions: Sequence[Opinion | None]) -> Tensor:
        """The mean [..., V] itself, or sharpened where it is flat if `sharpen` is set."""
        if not self.sharpen:
            return log_p
        p, is_flat, at = log_p.exp(), log_p.max(-1).values <= HALF, likeliest[..., None]
        for opinion, (member, weight) in zip(opinions, self.others, strict=True):
            if opinion is not None and isinstance(member, AlignedMember):
                beginning = member.beginnings[likeliest][..., None]
                moved = weight * opinion.log_p.gather(-1, beginning.clamp(min=0)).exp()
                moved = moved.where(is_flat[..., None] & (beginning >= 0), 0.0)
                p = p.scatter_add(-1, at, moved).scatter_add(-1, beginning.clamp(min=0), -moved)
        return torch.where(is_flat[..., None], p.clamp(min=0).log(), log_p)

    def _mean(self, first_log_p: Tensor, opinions: Sequence[Opinion | None]) -> Tensor:
        """The logarithm of the weighted mean, [..., V]; what a member does not say is the first member's."""
        first, weighed = first_log_p.new_full(first_log_p.shape[:-1], self.first), []
        for opinion, (_, weight) in zip(opinions, self.others, strict=True):
            if opinion is None:
                first += weight
                continue
            weighed.append(opinion.log_p + math.log(weight))
            if opinion.rest is not None:
                first += weight * opinion.rest
        return functools.reduce(torch.logaddexp, weighed, first_log_p + first.log()[..., None])
