"""A sequential test of whether a running server has left the release's interval, valid after every reading.  No torch.

For traffic like the release's, tokens minus `tokens_per_step` × steps varies around 0 with the variance over prompts,
since the steps of one answer depend on each other.  `Drift` bets against "the traffic lies within the release's
interval" with several stakes at once and restarts a bet that has lost (an e-detector: Shin, Ramdas and Rinaldo, arXiv
2203.03532).  However often it is read, the mean time to a false alarm is at least `days`.  A smoothed average with
three-sigma limits would raise one every half hour with one reading per 5 s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.traffic.release import Release

DAYS_PER_FALSE_ALARM = 1000
SHIFTS = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Changes that the bets are tuned for, as shares of the release's tokens per step."""


class Drift:
    """Bets that tokens per step left the release's interval, for any number of series in parallel."""

    def __init__(self, release: Release, every_s: float, series: int = 1, days: float = DAYS_PER_FALSE_ALARM) -> None:
        """days: mean time to a false alarm, at one reading every `every_s` seconds."""
        self.release = release
        center = release.tokens_per_step.center
        stakes = np.array([shift * center / release.spread for shift in SHIFTS])
        # larger stakes would let single prompts decide, and a release says little about their tail
        self.stakes: NDArray[np.float64] = np.minimum(stakes, 0.5 / release.prompt_spread)
        self.limit = math.log(2 * len(SHIFTS) * days * 86_400 / every_s)  # two sides; a mean over the bets
        self.won = np.zeros((2, series, len(SHIFTS)))

    def add(self, tokens: Any, steps: Any) -> NDArray[np.int64]:
        """After one reading: -1 if tokens per step fell below the interval, 1 if they rose above it, otherwise 0.

        tokens, steps [series].  A bet that has won is restarted.
        """
        tokens, steps = np.atleast_1d(np.asarray(tokens, float)), np.atleast_1d(np.asarray(steps, float))
        _, low, high = self.release.tokens_per_step
        price = self.stakes**2 * self.release.spread / 2
        for side, beyond in enumerate((low * steps - tokens, tokens - high * steps)):
            gain = self.stakes * beyond[:, None] - price * steps[:, None]
            self.won[side] = np.maximum(self.won[side], 0) + gain
        below, above = self.evidence >= 1
        self.won[:, below | above] = 0
        return above.astype(np.int64) - below.astype(np.int64)

    @property
    def evidence(self) -> NDArray[np.float64]:
        """[2, series]: how close an alarm is, below and above; 1 is an alarm."""
        total: NDArray[np.float64] = np.maximum(np.logaddexp.reduce(self.won, axis=-1), 0) / self.limit
        return total

    def steps_to_notice(self, drop: float = 0.1) -> float | None:
        """Approximate steps until a drop by this share is detected; None if it lies within the interval."""
        center, low, _ = self.release.tokens_per_step
        gap = low - (1 - drop) * center
        growth = float(np.max(self.stakes * gap - self.stakes**2 * self.release.spread / 2))
        return self.limit / growth if growth > 0 else None
