"""What one client may cost the others: work for it is paced, and few of its large bodies are read at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from outrider.serve.bodies.refusals import Refusal

FREE_S = 5.0
"""How much a client may cost before it has to wait, in seconds of its pace."""
LONGEST_S = 10.0
"""Longest wait."""
MOST_CLIENTS = 10_000
REFUSAL_S = 0.25
"""What a refusal costs a client: it takes the server milliseconds, and some clients ignore it and ask again at once."""
LARGE_BODIES = 8
"""How many large bodies of a client are in memory at a time, until their requests are queued or refused; further ones
are not read, so that TCP holds the client back."""


class Pace:
    """How long each client has to wait, given what it has cost: a leaky bucket."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        """When each client has paid for everything, by `time.monotonic`."""

    def wait_s(self, client: str, cost_s: float) -> float:
        """Charge a client; returns the seconds that it has to wait now."""
        now = time.monotonic()
        if len(self._due) > MOST_CLIENTS:
            self._due = {one: due for one, due in self._due.items() if due > now - FREE_S}
        due = min(max(self._due.get(client, 0.0), now - FREE_S) + cost_s, now + LONGEST_S)
        self._due[client] = due
        return max(0.0, due - now)


class Places:
    """So many places for each client; whoever of it finds none waits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """The places of each client that has or wants one."""

    @asynccontextmanager
    async def place(self, client: str, seconds: float | None = None) -> AsyncIterator[None]:
        """Raises Refusal if none is free within so many seconds."""
        places = self._of.setdefault(client, asyncio.Semaphore(self.count))
        try:
            async with asyncio.timeout(seconds):
                await places.acquire()
        except TimeoutError:
            message = f"{self.count} large bodies of this key are still being read; send fewer at once"
            raise Refusal(408, message, "timeout", "timeout") from None
        try:
            yield
        finally:
            places.release()
