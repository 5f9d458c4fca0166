"""Are two scores the same, as far as it matters?  Two one-sided tests on paired prompts, by bootstrap, and how many would do.

A difference that was not found is no equality: both ends of the interval have to lie within the margin (Schuirmann, 1987).
Prompts that nobody saw are thought of too: two on which one side wins and two on which the other does stand beside those that
were scored.  Without them ten prompts of equal scores would prove everything; with them one point takes about 300 prompts, as
the rule of three says.  Knows no torch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import ndtri

from outrider.errors import DataError
from outrider.report.bootstrap import DRAWS, Interval, interval_of, resampled

UNSEEN = 2
"""Prompts imagined on either side."""


class Equivalence(NamedTuple):
    """What paired scores say."""

    verdict: Literal["equivalent", "different", "not enough prompts"]
    difference: Interval
    """New less old, with the interval that both one-sided tests look at: 90 % at a level of 95 %."""
    margin: float
    prompts: int
    differing: int
    """Prompts whose two scores differ."""
    needed: int
    """Prompts that would show equivalence four times in five, if there is no difference and prompts vary as these do."""

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"difference": self.difference._asdict()}


def equivalence(
    new: Sequence[float], old: Sequence[float], margin: float = 0.01, *, span: float = 1.0, level: float = 0.95,
    draws: int = DRAWS, seed: int = 0,
) -> Equivalence:  # fmt: skip
    """Judge paired scores, one of each a prompt, in the same order.  span: greatest difference one prompt can make.

    `different` means that a two-sided interval of the same level excludes 0 while the scores are not equivalent.
    """
    if len(new) != len(old) or not len(new):
        raise DataError(f"{len(new)} scores and {len(old)}: give as many of one as of the other, for the same prompts")
    if not (margin > 0 and span > 0):
        raise DataError(f"margin {margin:g} and span {span:g} must lie above 0")
    gained = np.asarray(new, dtype=np.float64) - np.asarray(old, dtype=np.float64)
    if not np.isfinite(gained).all():
        raise DataError("a score is no finite number; leave that prompt out of both")
    values = np.concatenate([gained, [span, -span] * UNSEEN])
    # the imagined prompts widen the interval; they do not move it, since they cancel
    scale = len(values) / len(gained)
    drawn = resampled(values, lambda table: table.mean(axis=1), draws, seed) * scale
    center = float(gained.mean())
    both_sides = interval_of(drawn, center, 2 * level - 1)
    surely = interval_of(drawn, center, level)
    is_within = -margin < both_sides.low and both_sides.high < margin
    is_apart = surely.low > 0 or surely.high < 0
    return Equivalence(
        "equivalent" if is_within else "different" if is_apart else "not enough prompts", both_sides, margin, len(gained),
        int(np.count_nonzero(gained)), _needed(gained, margin, span, level),
    )  # fmt: skip


def _needed(gained: np.ndarray[Any, Any], margin: float, span: float, level: float, power: float = 0.8) -> int:
    """Prompts with which both bounds fall within the margin with chance `power`, where the true difference is 0."""
    certain, likely = (float(ndtri(share)) for share in (level, (1 + power) / 2))
    variance, unseen = float((gained**2).mean()), 2 * UNSEEN * span**2

    def is_enough(count: int) -> bool:
        # what was imagined is spread over more prompts, what was seen is not; only the latter moves the middle
        half = certain * math.sqrt(variance / count + unseen / count**2) + likely * math.sqrt(variance / count)
        return half < margin

    counts = range(2, 1 << 60)
    return counts[bisect.bisect_left(counts, True, key=is_enough)]
