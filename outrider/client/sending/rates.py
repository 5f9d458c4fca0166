"""How fast requests are sent: token buckets for requests and tokens, and a breaker for a server that is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.client.failures import CircuitOpen

Clock = Callable[[], float]
"""Seconds, as from `time.monotonic`."""
BURST = 0.1
"""Share of the limit per minute that may be used at once."""
SLACK = 1e-6


class TokenBucket:
    """Limits amounts per minute, first come first served.  Only a single amount larger than the burst can exceed the
    limit."""

    def __init__(self, per_minute: float, clock: Clock = time.monotonic):
        self.burst = max(1.0, BURST * per_minute)
        """What may be used at once."""
        self.per_s = (per_minute + 1 - self.burst) / 60
        self._clock, self._level, self._updated_at = clock, self.burst, clock()
        self._queue = asyncio.Lock()

    async def take(self, amount: float = 1.0) -> None:
        """Wait until `amount` may be used.  An amount larger than `burst` waits for a full bucket and leaves a debt."""
        async with self._queue:
            while (missing := min(amount, self.burst) - self._refilled()) > SLACK:
                await asyncio.sleep(missing / self.per_s)
            self._level -= amount

    def correct(self, excess: float) -> None:
        """Account for `excess` used beyond what was taken; negative if less was used."""
        self._level = min(self.burst, self._refilled() - excess)

    def _refilled(self) -> float:
        now = self._clock()
        self._level = min(self.burst, self._level + (now - self._updated_at) * self.per_s)
        self._updated_at = now
        return self._level


class Breaker:
    """Stops sending after `failures` failures in a row; after `reset_s` seconds, one request probes the server."""

    def __init__(self, failures: int, reset_s: float, clock: Clock = time.monotonic):
        self.failures, self.reset_s = failures, reset_s
        self._clock, self._in_a_row, self._opened_at = clock, 0, float("-inf")
        self._is_open = self._is_probing = False

    def enter(self, attempts: int = 0) -> None:
        """Raise CircuitOpen if nothing may be sent now; otherwise `success`, `failure` or `leave` must follow."""
        if not self._is_open:
            return
        left_s = max(0.0, self._opened_at + self.reset_s - self._clock())
        if left_s or self._is_probing:
            message = (
                f"the server failed {self._in_a_row} times in a row; it is tried again in {left_s:.0f} s. "
                "Check that it is running"
            )
            raise CircuitOpen(message, attempts, retry_after_s=left_s)
        self._is_probing = True

    def success(self) -> None:
        self._in_a_row, self._is_open, self._is_probing = 0, False, False

    def failure(self) -> None:
        self._in_a_row += 1
        if self._is_probing or self._in_a_row >= self.failures:
            self._is_open, self._opened_at = True, self._clock()
        self._is_probing = False

    def leave(self) -> None:
        """An attempt ended without telling anything about the server."""
        self._is_probing = False
