"""How fast requests are sent: a token bucket each for requests and tokens, and a breaker for a server that is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.client.failures import CircuitOpen

Clock = Callable[[], float]
"""Seconds, as `time.monotonic` gives them."""
BURST = 0.1
"""Share of a minute's limit that may be used at once."""
SLACK = 1e-6


class TokenBucket:
    """Lets so many pass a minute, in the order in which they ask: in no minute more, but for one amount that is itself
    larger than what may be used at once."""

    def __init__(self, per_minute: float, clock: Clock = time.monotonic):
        self.room = max(1.0, BURST * per_minute)
        """What may be used at once."""
        self.per_s = (per_minute + 1 - self.room) / 60
        self._clock, self._level, self._at = clock, self.room, clock()
        self._queue = asyncio.Lock()

    async def take(self, amount: float = 1.0) -> None:
        """Return once so much may be used.  An amount larger than `room` waits for a full bucket, and owes the rest."""
        async with self._queue:
            while (missing := min(amount, self.room) - self._filled()) > SLACK:
                await asyncio.sleep(missing / self.per_s)
            self._level -= amount

    def correct(self, more: float) -> None:
        """So much more was used than was asked for; less where it is below 0."""
        self._level = min(self.room, self._filled() - more)

    def _filled(self) -> float:
        now = self._clock()
        self._level = min(self.room, self._level + (now - self._at) * self.per_s)
        self._at = now
        return self._level


class Breaker:
    """Leaves a server alone that failed `failures` times in a row; after `reset_s` seconds one request tries it."""

    def __init__(self, failures: int, reset_s: float, clock: Clock = time.monotonic):
        self.failures, self.reset_s = failures, reset_s
        self._clock, self._in_a_row, self._opened_at = clock, 0, float("-inf")
        self._is_open = self._is_tried = False

    def enter(self, attempts: int = 0) -> None:
        """Raise CircuitOpen where nothing may be sent now; else `success`, `failure` or `leave` must follow."""
        if not self._is_open:
            return
        left_s = self._opened_at + self.reset_s - self._clock()
        if left_s > 0 or self._is_tried:
            message = (
                f"the server failed {self._in_a_row} times in a row; it is asked again in {max(left_s, 0.0):.0f} s. "
                "See whether it runs"
            )
            raise CircuitOpen(message, attempts, retry_after_s=max(left_s, 0.0))
        self._is_tried = True

    def success(self) -> None:
        self._in_a_row, self._is_open, self._is_tried = 0, False, False

    def failure(self) -> None:
        self._in_a_row += 1
        if self._is_tried or self._in_a_row >= self.failures:
            self._is_open, self._opened_at = True, self._clock()
        self._is_tried = False

    def leave(self) -> None:
        """An attempt ended that says nothing about the server."""
        self._is_tried = False
