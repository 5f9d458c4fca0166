"""The number of blocks that pays, from the measured time and acceptance of each.

It maximises the expected tokens per second,

    (1 + gain[0] + ... + gain[n - 1]) / (rest + seconds[0] + ... + seconds[n - 1])

where gain[i] is the mean number of accepted tokens of block i, and rest the time of a step without its blocks.  It
depends only on earlier steps, so the output stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class BlocksByCost:
    """The choice for one batch."""

    EXPLORE = 16
    """Steps between two that draft all blocks, to keep measuring the later ones."""
    WINDOW = 32.0
    """Steps after which a mean has decayed to 1/e."""

    def __init__(self, most: int):
        self.most, self.step = most, 0
        self.gains, self.seconds, self.rest = [0.0] * most, [0.0] * most, 0.0
        self.counts = [0.0] * (most + 1)
        """Decayed numbers of steps in the means of each block, and of the rest."""
        self.laps: list[float] = []
        self.since = 0.0

    def begin(self) -> int:
        """Start a draft; returns its number of blocks."""
        self.laps, self.since = [], time.perf_counter()
        self.step += 1
        if self.step % self.EXPLORE == 0 or not all(self.counts):
            return self.most
        return max(range(1, self.most + 1), key=self.rate)

    def rate(self, blocks: int) -> float:
        """Expected tokens per second with this many."""
        return (1 + sum(self.gains[:blocks])) / (self.rest + sum(self.seconds[:blocks]))

    def lap(self, device: torch.device) -> None:
        """Record the time of the next block."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        self.laps.append(now - self.since)
        self.since = now

    def learn(self, accepted: Sequence[Sequence[int]], step_s: float) -> None:
        """accepted: for each slot, the block of each accepted node.  step_s: seconds of the whole step."""
        if not accepted or not self.laps:
            return
        for n, seconds in enumerate(self.laps):
            gain = sum(list(blocks).count(n) for blocks in accepted) / len(accepted)
            share = self._share(n)
            self.gains[n] += share * (gain - self.gains[n])
            self.seconds[n] += share * (seconds - self.seconds[n])
        self.rest += self._share(self.most) * (max(step_s - sum(self.laps), 1e-9) - self.rest)
        self.laps = []

    def _share(self, n: int) -> float:
        """Weight of a new value in a mean."""
        self.counts[n] = self.counts[n] * (1 - 1 / self.WINDOW) + 1
        return 1 / self.counts[n]
