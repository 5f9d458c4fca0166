"""Are two scores equal within a margin?  Two one-sided tests on paired prompts, by bootstrap, and how many prompts are
needed.

The absence of a difference does not show equality: both ends of the interval must lie within the margin (Schuirmann,
1987).  Four hypothetical prompts are added to the scored ones: each side wins two.  Without them, ten prompts with
equal scores would prove everything; with them, a margin of one point takes about 300 prompts, in line with the rule of
three.  No torch.
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

IMAGINED = 2
"""Hypothetical prompts that each side wins."""


class Equivalence(NamedTuple):
    """The result for paired scores."""

    verdict: Literal["equivalent", "different", "not enough prompts"]
    difference: Interval
    """New minus old, with the interval of both one-sided tests: 90 % for a level of 95 %."""
    margin: float
    prompts: int
    differing: int
    """Prompts whose two scores differ."""
    needed: int
    """Prompts that show equivalence with 80 % power if there is no difference and prompts vary like these."""

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"difference": self.difference._asdict()}


def equivalence(
    new: Sequence[float], old: Sequence[float], margin: float = 0.01, *, span: float = 1.0, level: float = 0.95,
    draws: int = DRAWS, seed: int = 0,
) -> Equivalence:  # fmt: skip
    """Judge paired scores, one of each per prompt, in the same order.  span: the largest possible difference of a
    prompt.

    `different` means that a two-sided interval of the same level excludes 0 and the scores are not equivalent.
    """
    if len(new) != len(old) or not len(new):
        raise DataError(
            f"new and old scores must be equal in number, at least 1, for the same prompts, got {len(new)} and "
            f"{len(old)}"
        )
    if not (margin > 0 and span > 0):
        raise DataError(f"margin and span must be above 0, got {margin:g} and {span:g}")
    gained = np.asarray(new, dtype=np.float64) - np.asarray(old, dtype=np.float64)
    if not np.isfinite(gained).all():
        wrong = int(np.flatnonzero(~np.isfinite(gained))[0])
        raise DataError(
            f"scores must be finite numbers, got {new[wrong]} (new) and {old[wrong]} (old) for the prompt at index "
            f"{wrong}; leave that prompt out of both lists"
        )
    values = np.concatenate([gained, [span, -span] * IMAGINED])
    # the hypothetical prompts cancel out: they widen the interval without moving it
    scale = len(values) / len(gained)
    drawn = resampled(values, lambda table: table.mean(axis=1), draws, seed) * scale
    center = float(gained.mean())
    both_sides = interval_of(drawn, center, 2 * level - 1)
    surely = interval_of(drawn, center, level)
    is_within = -margin < both_sides.low and both_sides.high < margin
    is_different = surely.low > 0 or surely.high < 0
    return Equivalence(
        "equivalent" if is_within else "different" if is_different else "not enough prompts", both_sides, margin,
        len(gained),
        int(np.count_nonzero(gained)), _needed(gained, margin, span, level),
    )  # fmt: skip


def _needed(gained: np.ndarray[Any, Any], margin: float, span: float, level: float, power: float = 0.8) -> int:
    """Prompts for which both bounds lie within the margin with probability `power`, if the true difference is 0."""
    z_level, z_power = (float(ndtri(share)) for share in (level, (1 + power) / 2))
    variance = float((gained**2).mean())
    imagined = 2 * IMAGINED * span**2

    def is_enough(count: int) -> bool:
        # hypothetical prompts weigh less among more real ones; only real ones move the center
        half = z_level * math.sqrt(variance / count + imagined / count**2) + z_power * math.sqrt(variance / count)
        return half < margin

    counts = range(2, 1 << 60)
    return counts[bisect.bisect_left(counts, True, key=is_enough)]
