"""Work in a process of its own, under limits: for libraries that run a model's code and fit behind no walls of `sandbox`'s.

The process is started anew, not forked, so what this one loaded stays out of its reach; it leads a group, which ends with it or
with its time.  Once `confine` is called in it, every process that it forks (as the scorers of lm-eval do for each answer) has
the limits of an answer in `sandbox`.  It has no bound on its own address space: CUDA maps many times the memory that it uses,
and caches and threads of torch grow with the work.  Limits are no walls: files and network stay open.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from outrider.errors import DataError
from outrider.evaluate.sandbox import SCRATCH_BYTES

T = TypeVar("T")
FILE_BYTES = 1 << 30
"""Largest file that the process may write: it keeps data sets that it reads, and those of tasks of code are small."""
ANSWER_S = 60
"""Processor seconds of a process that it forked."""
ANSWER_BYTES = 512 << 20
"""Address space that such a process may take on top of what it was forked with."""


def run_apart(work: Callable[[], T], timeout_s: float) -> T:
    """What `work` returns or raises, called in another process; it and its result are pickled.

    The process and its group are killed when it is done, or after `timeout_s` seconds.  Raises DataError then, and where
    it ended before its work did.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        group = child.submit(_lead).result()
        done = child.submit(work)
        try:
            done.exception(timeout_s)
        except TimeoutError:
            raise DataError(
                f"no end after {timeout_s:g} s, and the process that runs the model's code was killed; ask for fewer "
                "prompts, or give it longer"
            ) from None
        finally:  # Ctrl-C too: it does not reach a group of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        try:
            return done.result()
        except BrokenProcessPool:
            raise DataError(
                "the process that runs the model's code was killed before it had a result: out of its processor time, out of "
                "memory, or by that code"
            ) from None


def _lead() -> int:
    """Begin a group of processes, and say its number."""
    os.setsid()
    return os.getpid()


def confine(timeout_s: float) -> None:
    """Limit this process, for good, and more narrowly those that it forks from here on.

    Its processor time is `timeout_s` of every core, so that it ends even where nobody is left to kill it.
    """
    _limit(resource.RLIMIT_CPU, math.ceil(timeout_s) * (os.cpu_count() or 1))
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    os.register_at_fork(after_in_child=_confine_answer)


def _confine_answer() -> None:
    _limit(resource.RLIMIT_CPU, ANSWER_S)
    _limit(resource.RLIMIT_FSIZE, SCRATCH_BYTES)
    with contextlib.suppress(OSError):  # no /proc, no way to tell what it holds already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + ANSWER_BYTES)


def _limit(what: int, most: int) -> None:
    """Never above what this process may have."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(OSError, ValueError):  # a system that knows no such limit
        resource.setrlimit(what, (most, most))
