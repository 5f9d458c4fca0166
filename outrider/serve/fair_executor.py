"""A small thread pool that is shared fairly among owners."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Task = tuple["asyncio.Future[Any]", Callable[[], Any]]


class FairExecutor:
    """Runs tasks in threads, round-robin by owner and one task of an owner at a time.  For one event loop.

    So an owner with few tasks never waits for more than one task of another owner.
    """

    def __init__(self, threads: int, name: str):
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, name)
        self._waiting: dict[str, deque[Task]] = {}
        self._running: set[str] = set()

    async def run(self, owner: str, work: Callable[[], T], deadline: float | None = None) -> T:
        """The return value of `work`.  Raises TimeoutError at `deadline`, of `time.monotonic`; work that has not begun
        by then is dropped."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((future, work))
        self._begin()
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            value: T = await future
        return value

    def _begin(self) -> None:
        while len(self._running) < self.threads:
            owner = next((owner for owner in self._waiting if owner not in self._running), None)
            if owner is None:
                return
            tasks = self._waiting.pop(owner)
            future, work = tasks.popleft()
            if tasks:
                self._waiting[owner] = tasks  # behind all others
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
