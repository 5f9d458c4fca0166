"""What measuring may take: seconds in all, and bytes at once.  What does not fit is left out and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

SHARE = 0.5
"""Of the free memory, what measuring takes at most."""
WITHIN = 0.9
"""Of the seconds left, what something that is begun may be expected to take."""


@dataclass
class Allowance:
    """Seconds and bytes, and what became of them."""

    most_s: float = math.inf
    most_bytes: float = math.inf
    clock: Callable[[], float] = perf_counter
    left_out: list[str] = field(default_factory=list)
    """In words."""
    slower: float = 1.0
    """Seconds taken over those expected, lately."""

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left_s(self) -> float:
        return self.began + self.most_s - self.clock()

    def lacks(self, seconds: float, size: float, share: float = 1.0) -> str:
        """What is missing for something that is expected to take so long, and so many bytes; "" for nothing.

        share: of the seconds left, what it may have."""
        if size > self.most_bytes:
            return f"it takes {size / 1e9:.2g} GB, and {self.most_bytes / 1e9:.2g} GB are half of what is free"
        seconds *= self.slower
        if seconds > WITHIN * share * self.left_s:
            return f"it takes about {seconds:.0f} s, and {max(0.0, share * self.left_s):.0f} s are left for it"
        return ""

    def says(self) -> str:
        """What is allowed, behind what is expected."""
        limits = [f"{self.most_s:.0f} s"] * math.isfinite(self.most_s)
        limits += [f"{self.most_bytes / 1e9:.2g} GB"] * math.isfinite(self.most_bytes)
        return f"; it may take {' and '.join(limits)}" if limits else ""

    def leave_out(self, what: str, why: str) -> str:
        """Note it, in a sentence that is returned."""
        self.left_out.append(f"{what} were not timed: {why}")
        return self.left_out[-1]

    def spend(self, expected_s: float, work: Callable[[], None]) -> None:
        """Do it, and learn from how long it takes."""
        began = self.clock()
        work()
        self.slower = max(0.2, (self.clock() - began) / max(expected_s, 1e-9))
