"""Run code that a model wrote, where it can do no harm: another process, few means, no network, nothing to read or to write.

A fresh isolated interpreter runs the answer and then the tests.  Around it stand walls, as many as this machine can build:
`files` (it sees the interpreter and system libraries, read-only, and an empty folder in memory), `network` (none),
`processes` (it sees and signals its own only, they end with it, and there are at most 32).  `Outcome.missing` names walls that
could not be built.  Limits on time, memory and file sizes hold everywhere; that on memory for each process by the kernel, and
for all together by a look every `LOOK_S`, which misses a process that left its family where the third wall is missing.  The
inner program is `sandboxed`, started as a script.

`run_in_subprocess` is for libraries that run a model's code themselves and fit behind no such walls.  The process is started
anew, not forked, so what this one loaded stays out of its reach; it leads a group, which ends with it or with its time.  Once
`confine` is called in it, every process that it forks (as the scorers of lm-eval do for each answer) has the limits of an
answer.  It has no bound on its own address space: CUDA maps many times the memory that it uses, and caches and threads of torch
grow with the work.  Limits are no walls: files and network stay open.

What it is not: a proof against an answer written to fool these very files.  Answer and tests share a process, as they must to
share values; a pass is told by a token which the inner program reads after the last test, so leaving early never counts.
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
from outrider.measure import sandboxed
from outrider.measure.sandboxed import SCRATCH_BYTES, WALLS, set_limit

T = TypeVar("T")

INNER = os.path.abspath(sandboxed.__file__)
START_S = 60.0
"""Longest start of the inner interpreter, on however busy a machine; the time limit counts from there."""
END_S = 30.0
"""Longest that is waited for the kernel to end the processes of an answer."""
LOOK_S = 0.2
"""Between two looks at the memory of all processes of an answer."""
SAID_BYTES = 16 << 10
"""Most that is read of what the inner program says; more is a flood."""
FILE_BYTES = 1 << 30
"""Largest file that the process may write: it keeps data sets that it reads, and those of tasks of code are small."""
ANSWER_S = 60
"""Processor seconds of a process that it forked."""
ANSWER_BYTES = 512 << 20
"""Address space that such a process may take on top of what it was forked with."""


class Outcome(NamedTuple):
    """What became of one answer."""

    passed: bool
    reason: str
    """Empty where it passed."""
    missing: tuple[str, ...] = ()
    """Walls that did not stand while it ran."""


def run(code: str, tests: str, timeout_s: float = 10.0, memory_bytes: int = 512 << 20) -> Outcome:
    """Whether `code`, then `tests` in the same namespace, run to their end without an exception, within the limits."""
    token = secrets.token_hex(16)
    start, is_root = _unshare(), os.geteuid() == 0
    job = {"code": code, "tests": tests, "seconds": timeout_s, "bytes": memory_bytes}
    job |= {"apart": bool(start), "mapped": "--user" in start, "root": is_root}
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder, tempfile.TemporaryFile() as asked:
        asked.write(json.dumps(job).encode())
        asked.seek(0)
        token_out, token_in = os.pipe()
        said_out, said_in = os.pipe()
        os.write(token_in, token.encode())
        os.close(token_in)
        numbers = (asked.fileno(), token_out, said_in)
        try:
            process = subprocess.Popen(
                [*start, sys.executable, "-I", INNER, *map(str, numbers)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
                env={"PATH": os.defpath}, pass_fds=numbers, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(token_out)
            os.close(said_in)
        try:
            with open(said_out, "rb", buffering=0) as said:
                # unshare and the inner program are not the answer's
                held = functools.partial(_held_bytes, process.pid, 2 if start else 1)
                return _outcome(said, token, timeout_s, held, memory_bytes)
        finally:
            _end(process, bool(start))


def walls_missing() -> tuple[str, ...]:
    """The walls that this machine can't build, found by running a line of code."""
    return run("", "").missing


def _outcome(said: IO[bytes], token: str, timeout_s: float, held: Callable[[], int], memory_bytes: int) -> Outcome:
    """Read what the inner program says, to its end or to the end of its time, or until its processes hold too much."""
    text, missing, ends = b"", WALLS, time.monotonic() + START_S
    started = False
    while len(text) < SAID_BYTES:
        left = ends - time.monotonic()
        if left > 0 and not select.select([said], [], [], min(left, LOOK_S))[0]:
            if started and held() > memory_bytes:
                return Outcome(False, f"out of memory: its processes hold more than {memory_bytes >> 20} MiB together", missing)
            continue
        if left <= 0:
            return Outcome(False, f"no end after {timeout_s:g} s" if started else "the interpreter did not start", missing)
        piece = said.read(4096)
        text += piece
        *lines, _ = text.split(b"\n")
        if lines and not started:
            started, ends = True, time.monotonic() + timeout_s
            with contextlib.suppress(ValueError):  # else it was killed before it came to say
                missing = tuple(json.loads(lines[0]))
        if token.encode() in lines[1:]:
            return Outcome(True, "", missing)
        if not piece:
            last = lines[-1].decode(errors="replace") if len(lines) > 1 else "it ended before its tests were through"
            return Outcome(False, last[:500], missing)
    return Outcome(False, "it wrote where only results are written", missing)


def _end(process: subprocess.Popen[bytes], apart: bool) -> None:
    """Kill it and what it left.  Where its processes are apart, none is left when this returns.

    Of `unshare`'s processes the first inside is killed: the kernel then ends all others before `unshare` sees it gone.
    """
    inside = _children().get(process.pid, []) if apart else []
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
    """Every process that has children now, and these."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # gone meanwhile
            parent = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(name))
    return children


def _held_bytes(top: int, levels: int) -> int:
    """Memory of all descendants of a process but those of its first `levels`, pages that several share counted once."""
    children, found, level = _children(), 0, [top]
    while level:
        if levels <= 0:
            found += sum(map(_bytes_of, level))
        levels -= 1
        level = [child for process in level for child in children.get(process, ())]
    return found


def _bytes_of(process: int) -> int:
    for name, wanted in (("smaps_rollup", ("Pss:",)), ("status", ("RssAnon:", "RssShmem:"))):
        with contextlib.suppress(OSError):  # only the owner may read the first, which alone tells what is shared
            lines = Path(f"/proc/{process}", name).read_text(errors="replace").splitlines()
            return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(wanted))
    return 0


@functools.cache
def _unshare() -> tuple[str, ...]:
    """How to start a program in name spaces of its own; empty where that is not allowed."""
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


# ── work of ours that runs a model's code ──


def run_in_subprocess(work: Callable[[], T], timeout_s: float) -> T:
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
    set_limit(resource.RLIMIT_CPU, math.ceil(timeout_s) * (os.cpu_count() or 1))
    set_limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    set_limit(resource.RLIMIT_CORE, 0)
    os.register_at_fork(after_in_child=_confine_answer)


def _confine_answer() -> None:
    set_limit(resource.RLIMIT_CPU, ANSWER_S)
    set_limit(resource.RLIMIT_FSIZE, SCRATCH_BYTES)
    with contextlib.suppress(OSError):  # no /proc, no way to tell what it holds already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + ANSWER_BYTES)
