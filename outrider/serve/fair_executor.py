"""A small thread pool that is shared fairly among owners."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from outrider.serve.pacing import Pace

T = TypeVar("T")
Task = tuple["asyncio.Future[Any]", Callable[[], Any]]

SHARE = 0.1
"""Share of a processor that an owner's tasks may take while others are active; short bursts may take more."""
PRIORITY = 10
"""Nice value of the threads."""


def _step_back() -> None:
    """Let the threads that decode run first: on Linux, priorities are per thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, max(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))


def _timed(work: Callable[[], T], spent_s: list[float]) -> T:
    began = time.thread_time()
    try:
        return work()
    finally:
        spent_s.append(time.thread_time() - began)


class FairExecutor:
    """Runs tasks in threads, round-robin by owner and one task of an owner at a time.  For one event loop.

    So an owner with few tasks never waits for more than one task of another owner.  Threads also share processors and
    the interpreter with everything else that the process does, so an owner that has had more than its share of the time
    waits while others are active.
    """

    def __init__(self, threads: int, name: str, is_shared: Callable[[str], bool] = lambda owner: False):
        """is_shared: whether others than this owner are active."""
        self.threads, self.is_shared = threads, is_shared
        self._pool = ThreadPoolExecutor(threads, name, _step_back)
        self._waiting: dict[str, deque[Task]] = {}
        self._running: set[str] = set()
        self._resting: set[str] = set()
        self._pace = Pace()

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
            owner = next((owner for owner in self._waiting if owner not in self._running | self._resting), None)
            if owner is None:
                return
            tasks = self._waiting.pop(owner)
            future, work = tasks.popleft()
            if tasks:
                self._waiting[owner] = tasks  # behind all others
            if not future.cancelled():
                spent_s = list[float]()
                done = asyncio.get_running_loop().run_in_executor(self._pool, _timed, work, spent_s)
                self._running.add(owner)
                done.add_done_callback(functools.partial(self._ended, owner, future, spent_s))

    def _ended(self, owner: str, future: asyncio.Future[Any], spent_s: list[float], done: asyncio.Future[Any]) -> None:
        self._running.discard(owner)
        rest_s = self._pace.wait_s(owner, sum(spent_s) / SHARE) if self.is_shared(owner) else 0.0
        if rest_s:
            self._resting.add(owner)
            asyncio.get_running_loop().call_later(rest_s, self._rested, owner)
        error = done.exception()
        if future.cancelled():
            pass
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._begin()

    def _rested(self, owner: str) -> None:
        self._resting.discard(owner)
        self._begin()
