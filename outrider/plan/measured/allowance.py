"""Limits on measuring: total seconds and bytes of memory.  Whatever does not fit is left out and reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

SHARE = 0.5
"""Maximum share of the free memory that measuring may use."""
WITHIN = 0.9
"""Maximum share of the remaining time that a measurement may be expected to take when it starts."""


@dataclass
class Allowance:
    """Limits, and what was left out because of them."""

    most_s: float = math.inf
    most_bytes: float = math.inf
    clock: Callable[[], float] = perf_counter
    left_out: list[str] = field(default_factory=list)
    """Sentences about what was left out."""
    slower: float = 1.0
    """Actual / expected seconds of the last measurement."""

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left_s(self) -> float:
        return self.began + self.most_s - self.clock()

    def lacks(self, seconds: float, size: float, share: float = 1.0) -> str:
        """Why a measurement of this many seconds and bytes does not fit; "" if it fits.

        share: the share of the remaining time it may use."""
        if size > self.most_bytes:
            return f"it needs {size / 1e9:.2g} GB; half of the free memory is {self.most_bytes / 1e9:.2g} GB"
        seconds *= self.slower
        if seconds > WITHIN * share * self.left_s:
            return f"it takes about {seconds:.0f} s, and {max(0.0, share * self.left_s):.0f} s are left for it"
        return ""

    def says(self) -> str:
        """The limits, as the end of a sentence about the expected cost."""
        limits = [f"{self.most_s:.0f} s"] * math.isfinite(self.most_s)
        limits += [f"{self.most_bytes / 1e9:.2g} GB"] * math.isfinite(self.most_bytes)
        return f"; the limit is {' and '.join(limits)}" if limits else ""

    def leave_out(self, what: str, why: str) -> str:
        """Record that something was left out; returns the sentence."""
        self.left_out.append(f"{what} were not timed: {why}")
        return self.left_out[-1]

    def spend(self, expected_s: float, work: Callable[[], None]) -> None:
        """Do the work, and update `slower` from its duration."""
        began = self.clock()
        work()
        self.slower = max(0.2, (self.clock() - began) / max(expected_s, 1e-9))
