"""Work in a few threads, by turns of those for whom it is done."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Piece = tuple["asyncio.Future[Any]", Callable[[], Any]]


class Turns:
    """Runs pieces of work in threads: owners by turns, and of each owner one piece at a time.  For one event loop.

    So a piece of an owner who has few waits for one piece of another at most, however many that one has.
    """

    def __init__(self, threads: int, name: str):
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, name)
        self._waiting: dict[str, deque[Piece]] = {}
        self._running: set[str] = set()

    async def run(self, owner: str, work: Callable[[], T], deadline: float | None = None) -> T:
        """What `work` returns.  Raises TimeoutError where that is not known at `deadline`, of `time.monotonic`; work
        that was not begun by then is left out."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((future, work))
        self._begin()
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            found: T = await future
        return found

    def _begin(self) -> None:
        while len(self._running) < self.threads:
            owner = next((one for one in self._waiting if one not in self._running), None)
            if owner is None:
                return
            pieces = self._waiting.pop(owner)
            future, work = pieces.popleft()
            if pieces:
                self._waiting[owner] = pieces  # behind all others
            if not future.cancelled():
                self._running.add(owner)
                done = asyncio.get_running_loop().run_in_executor(self._pool, work)
                done.add_done_callback(functools.partial(self._ended, owner, future))

    def _ended(self, owner: str, future: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._running.discard(owner)
        error = done.exception()
        if future.cancelled():
            pass
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._begin()
