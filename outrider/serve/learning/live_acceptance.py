"""Acceptance of served drafts, independent of the policy: by depth, and combined as tokens per draft.

A policy changes the depth of drafts from step to step, so tokens per step depend on it.  Here each depth counts only
the drafts that reached it with all earlier tokens accepted; combined over depths, they give what a full-depth draft
would yield.  B texts, D depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.report.bootstrap import Floats, normal
from outrider.serve.learning.buffer import Text


class Counts(NamedTuple):
    """Drafts of one or several texts by depth, [..., D]."""

    tried: Floats
    """Drafts that reached this depth with all earlier tokens accepted."""
    accepted: Floats
    """Those whose token at this depth was accepted."""


def counts_of(text: Text, depths: int) -> Counts:
    """Counts of one text without its last step, which may have been cut off by the end of the text."""
    tried, accepted = np.zeros(depths), np.zeros(depths)
    for depth, count in text.drafts[:-1]:
        tried[: min(depth, count + 1)] += 1
        accepted[:count] += 1
    return Counts(tried, accepted)


def tokens_per_draft(counts: Counts) -> Floats:
    """[...] for counts [..., D]: the target's own token and the accepted ones."""
    tried, accepted = (np.asarray(values, dtype=np.float64) for values in counts)
    shares = np.where(tried > 0, accepted / np.maximum(tried, 1), 0.0)
    tokens: Floats = 1 + shares.cumprod(-1).sum(-1)
    return tokens


class Change(NamedTuple):
    """Tokens per draft before and after a swap of drafters."""

    old: float
    new: float
    highest: float
    """Upper bound of new / old."""

    @property
    def is_drop(self) -> bool:
        return self.highest < 1


def change(new: Sequence[Counts], old: Sequence[Counts], tail: float) -> Change:
    """new, old: one entry per text.  tail: the probability that the bound is below the true ratio.

    The variance is the jackknife's over texts, of logarithms: steps of a text depend on each other, texts do not.
    """
    center, variance = 0.0, 0.0
    rates = []
    for sign, texts in ((1, new), (-1, old)):
        both = Counts(np.stack([text.tried for text in texts]), np.stack([text.accepted for text in texts]))
        whole = Counts(both.tried.sum(0), both.accepted.sum(0))
        without = np.log(tokens_per_draft(Counts(whole.tried - both.tried, whole.accepted - both.accepted)))
        rates.append(float(tokens_per_draft(whole)))
        center += sign * math.log(rates[-1])
        variance += (len(texts) - 1) / len(texts) * float(((without - without.mean()) ** 2).sum())
    freedom = len(new) + len(old) - 2
    highest = normal(center, math.sqrt(variance), freedom).bound(1 - tail)
    return Change(rates[1], rates[0], math.exp(highest))
