"""Run code that a model wrote, in another process with limits, without a network, and without files to read or write.

A new isolated interpreter runs the answer and then the tests.  It is enclosed by walls, as many as this machine can
build: `files` (only the interpreter and system libraries, read-only, and an empty folder in memory), `network` (none),
`processes` (it can list and signal only its own, they end with it, and there are at most 32).  `Outcome.missing` names
walls that could not be built.  Limits on time, memory and file sizes hold everywhere.  The kernel limits the memory of
each process.  The memory of all processes together is checked every `LOOK_S` seconds; without the third wall that
misses a process that left its family.  The inner program is `sandboxed`, started as a script.

`run_in_subprocess` is for libraries that run a model's code themselves and can't run behind such walls.  The process is
spawned, not forked, so it can't reach what this process loaded.  It leads a process group, which ends with it or at the
time limit.  After `confine` is called in it, every process that it forks (as the scorers of lm-eval do for each answer)
has the limits of an answer. Its own address space is not limited: CUDA maps many times the memory that it uses, and
caches and threads of torch grow with the work.  Limits are not walls: files and network stay open.

The sandbox does not stop an answer that was written against these very files.  Answer and tests share a process,
because they share values.  A pass is reported by a token that the inner program reads after the last test, so leaving
early never counts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from outrider.errors import DataError
from outrider.measure.tasks import sandboxed
from outrider.measure.tasks.sandboxed import SCRATCH_BYTES, WALLS, set_limit

T = TypeVar("T")

INNER = os.path.abspath(sandboxed.__file__)
START_S = 60.0
"""Longest start of the inner interpreter, also on a busy machine; the time limit counts from its start."""
END_S = 30.0
"""Longest wait for the kernel to end the processes of an answer."""
LOOK_S = 0.2
"""Seconds between two checks of the memory of all processes of an answer."""
RESULT_BYTES = 16 << 10
"""Most bytes that are read of the inner program's output."""
FILE_BYTES = 1 << 30
"""Largest file that the process may write: it stores data sets, and those of tasks of code are small."""
ANSWER_S = 60
"""Processor seconds of a forked process."""
ANSWER_BYTES = 512 << 20
"""Address space that a forked process may take in addition to what it began with."""


class Outcome(NamedTuple):
    """The result of one answer."""

    passed: bool
    reason: str
    """Empty where it passed."""
    missing: tuple[str, ...] = ()
    """Walls that were missing while it ran."""


def run(code: str, tests: str, timeout_s: float = 10.0, memory_bytes: int = 512 << 20) -> Outcome:
    """Whether `code`, then `tests` in the same namespace, run to their end without an exception, within the limits."""
    token = secrets.token_hex(16)
    start, is_root = _unshare(), os.geteuid() == 0
    job = {"code": code, "tests": tests, "seconds": timeout_s, "bytes": memory_bytes}
    job |= {"isolated": bool(start), "mapped": "--user" in start, "root": is_root}
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder, tempfile.TemporaryFile() as asked:
        asked.write(json.dumps(job).encode())
        asked.seek(0)
        token_out, token_in = os.pipe()
        results_out, results_in = os.pipe()
        os.write(token_in, token.encode())
        os.close(token_in)
        numbers = (asked.fileno(), token_out, results_in)
        try:
            process = subprocess.Popen(
                [*start, sys.executable, "-I", INNER, *map(str, numbers)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
                env={"PATH": os.defpath}, pass_fds=numbers, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(token_out)
            os.close(results_in)
        try:
            with open(results_out, "rb", buffering=0) as results:
                # unshare and the inner program do not count as the answer's
                held = functools.partial(_held_bytes, process.pid, 2 if start else 1)
                return _outcome(results, token, timeout_s, held, memory_bytes)
        finally:
            _end(process, bool(start))


def walls_missing() -> tuple[str, ...]:
    """The walls that this machine can't build, found by running an empty answer."""
    return run("", "").missing


def _outcome(results: IO[bytes], token: str, timeout_s: float, held: Callable[[], int], memory_bytes: int) -> Outcome:
    """Read the inner program's output until it ends, its time is over, or its processes hold too much memory."""
    text, missing, ends = b"", WALLS, time.monotonic() + START_S
    started = False
    while len(text) < RESULT_BYTES:
        left = ends - time.monotonic()
        if left > 0 and not select.select([results], [], [], min(left, LOOK_S))[0]:
            if started and held() > memory_bytes:
                return Outcome(
                    False, f"out of memory: its processes hold more than {memory_bytes >> 20} MiB together", missing
                )
            continue
        if left <= 0:
            return Outcome(
                False, f"no end after {timeout_s:g} s" if started else "the interpreter did not start", missing
            )
        piece = results.read(4096)
        text += piece
        *lines, _ = text.split(b"\n")
        if lines and not started:
            started, ends = True, time.monotonic() + timeout_s
            with contextlib.suppress(ValueError):  # else it was killed before it wrote them
                missing = tuple(json.loads(lines[0]))
        if token.encode() in lines[1:]:
            return Outcome(True, "", missing)
        if not piece:
            last = lines[-1].decode(errors="replace") if len(lines) > 1 else "it ended before its tests did"
            return Outcome(False, last[:500], missing)
    return Outcome(False, "it wrote to the pipe that is for results", missing)


def _end(process: subprocess.Popen[bytes], isolated: bool) -> None:
    """Kill it and the processes it left.  Where they are isolated, none is left when this returns.

    The first process inside `unshare` is killed: the kernel then ends all others before `unshare` returns.
    """
    inside = _children().get(process.pid, []) if isolated else []
    for first in inside:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
    if inside:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _children() -> dict[int, list[int]]:
    """Every process that has children now, with its children."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has ended
            parent = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(name))
    return children


def _held_bytes(top: int, levels: int) -> int:
    """Bytes of all descendants of a process except those of its first `levels`; shared pages are counted once."""
    children, found, level = _children(), 0, [top]
    while level:
        if levels <= 0:
            found += sum(map(_bytes_of, level))
        levels -= 1
        level = [child for process in level for child in children.get(process, ())]
    return found


def _bytes_of(process: int) -> int:
    for name, wanted in (("smaps_rollup", ("Pss:",)), ("status", ("RssAnon:", "RssShmem:"))):
        with contextlib.suppress(OSError):  # only the owner may read the first file, and only it knows shared pages
            lines = Path(f"/proc/{process}", name).read_text(errors="replace").splitlines()
            return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(wanted))
    return 0


@functools.cache
def _unshare() -> tuple[str, ...]:
    """The command that starts a program in name spaces of its own; empty where that is not allowed."""
    tool = shutil.which("unshare")
    own = ("--net", "--pid", "--ipc", "--mount", "--fork", "--kill-child")
    for more in ((), ("--user", "--map-root-user")):
        if tool and (os.geteuid() == 0 or more):
            command = (tool, *more, *own)
            try:
                done = subprocess.run([*command, "true"], capture_output=True, timeout=START_S, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                return command
    return ()


# ── our own work that runs a model's code ──


def run_in_subprocess(work: Callable[[], T], timeout_s: float) -> T:
    """Call `work` in another process, and return or raise what it does; `work` and its result are pickled.

    The process and its group are killed when the work is done, or after `timeout_s` seconds.  Raises DataError after
    that time, and where the process ended before its work did.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        group = child.submit(_lead).result()
        done = child.submit(work)
        try:
            done.exception(timeout_s)
        except TimeoutError:
            raise DataError(
                f"the model's code did not end within {timeout_s:g} s, and its process was killed; use fewer "
                "prompts, or a longer time limit"
            ) from None
        finally:  # Ctrl-C too: it does not reach a group of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        try:
            return done.result()
        except BrokenProcessPool:
            raise DataError(
                "the process that runs the model's code was killed before it had a result: by its limits on processor "
                "time or "
                "memory, or by that code; use fewer prompts, or a longer time limit"
            ) from None


def _lead() -> int:
    """Begin a group of processes; returns its number."""
    os.setsid()
    return os.getpid()


def confine(timeout_s: float) -> None:
    """Limit this process, for good, and more narrowly those that it forks after this call.

    Its processor time is `timeout_s` on every core, so that it ends even where its parent was killed.
    """
    set_limit(resource.RLIMIT_CPU, math.ceil(timeout_s) * (os.cpu_count() or 1))
    set_limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    set_limit(resource.RLIMIT_CORE, 0)
    os.register_at_fork(after_in_child=_confine_answer)


def _confine_answer() -> None:
    set_limit(resource.RLIMIT_CPU, ANSWER_S)
    set_limit(resource.RLIMIT_FSIZE, SCRATCH_BYTES)
    with contextlib.suppress(OSError):  # without /proc its memory is not known
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + ANSWER_BYTES)
