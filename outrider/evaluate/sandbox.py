"""Run code that a model wrote, where it can do no harm: another process, few means, no network, nothing to read or to write.

A fresh isolated interpreter runs the answer and then the tests.  Around it stand walls, as many as this machine can build:
`files` (it sees the interpreter and system libraries, read-only, and an empty folder in memory), `network` (none),
`processes` (it sees and signals its own only, they end with it, and there are at most 32).  `Outcome.missing` names walls that
could not be built.  Limits on time, memory and file sizes hold everywhere; that on memory for each process by the kernel, and
for all together by a look every `LOOK_S`, which misses a process that left its family where the third wall is missing.  The
file is its own inner program: the parent starts it as a script, so it imports the standard library only.

What it is not: a proof against an answer written to fool this very file.  Answer and tests share a process, as they must to
share values; a pass is told by a token which the inner program reads after the last test, so leaving early never counts.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import json
import os
import resource
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

WALLS = ("files", "network", "processes")
PROCESSES = 32
SCRATCH_BYTES = 16 << 20
START_S = 60.0
"""Longest start of the inner interpreter, on however busy a machine; the time limit counts from there."""
END_S = 30.0
"""Longest that is waited for the kernel to end the processes of an answer."""
LOOK_S = 0.2
"""Between two looks at the memory of all processes of an answer."""
SAID_BYTES = 16 << 10
"""Most that is read of what the inner program says; more is a flood."""


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
                [*start, sys.executable, "-I", os.path.abspath(__file__), *map(str, numbers)],
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


# ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def inside(asked: int, token: int, said: int) -> None:
    """The inner program: build the walls, run the job in a child, and end when the child ends, which ends what it left."""
    with open(asked, "rb") as file:
        job = json.load(file)
    enclosed = job["apart"] and _enclose(Path.cwd())
    child = os.fork()
    if child == 0:
        try:
            bounded = _confine(job, enclosed)
            stand = {"files": enclosed, "network": job["apart"], "processes": job["apart"] and bounded}
            _say(said, json.dumps([wall for wall in WALLS if not stand[wall]]))
            _say(said, _tried(job["code"], job["tests"]) or os.read(token, 64).decode())
        finally:
            os._exit(0)
    while (ended := os.wait())[0] != child:  # where processes are apart, orphans are ours to bury
        pass
    if os.WIFSIGNALED(ended[1]):
        number = os.WTERMSIG(ended[1])
        _say(said, "no end within its processor time" if number == signal.SIGXCPU else f"killed by signal {number}")
    os._exit(0)


def _say(to: int, line: str) -> None:
    os.write(to, line.replace("\n", " ")[:2000].encode(errors="replace") + b"\n")


def _tried(code: str, tests: str) -> str:
    """Run both; "" where they came to their end, else what stopped them."""
    space: dict[str, Any] = {"__name__": "answer"}
    own = dict(vars(builtins))
    part = "the code"
    try:
        exec(compile(code, "answer", "exec"), space)
        vars(builtins).update(own)  # an answer that made `all` say yes is tested with the real one
        part = "the tests"
        exec(compile(tests, "tests", "exec"), space)
    except SystemExit:
        return f"{part} left before the end"
    except MemoryError:
        return "out of memory"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    return ""


def _confine(job: Mapping[str, Any], enclosed: bool) -> bool:
    """Give up rights, then set the limits.  Whether the number of processes has a bound: root's has none."""
    count = 0 if job["apart"] else _processes_of(os.getuid())
    try:
        bounded = _drop_rights(job["mapped"], enclosed) or (job["mapped"] and not job["root"])
    except (OSError, AttributeError):  # not Linux
        bounded = False
    processor = int(job["seconds"]) + 1
    limits = (
        (resource.RLIMIT_AS, job["bytes"]), (resource.RLIMIT_CPU, processor), (resource.RLIMIT_FSIZE, SCRATCH_BYTES),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, PROCESSES + count),
    )  # fmt: skip
    for limit, most in limits:
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, most))
    return bounded


def _processes_of(user: int) -> int:
    """How many processes and threads a user has: the limit counts all of them."""
    count = 0
    for place in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            if place.stat().st_uid == user:
                count += len(list(place.iterdir()))
    return count


def _enclose(scratch: Path) -> bool:
    """See the interpreter, system libraries and an empty folder, and nothing else.  Needs a mount name space of its own."""
    root = scratch / "root"
    root.mkdir()
    shown = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
    try:
        _mount("tmpfs", root, "tmpfs", 0, "size=1m,mode=755")
        for name in sorted({*shown, os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix}):
            _show(Path(name), root)
        (root / "scratch").mkdir()
        _read_only(root)
        _mount("tmpfs", root / "scratch", "tmpfs", 2 | 4, f"size={SCRATCH_BYTES},mode=777")  # no suid, no devices
        os.chroot(root)
        os.chdir("/scratch")
    except OSError:
        return False
    return True


def _show(outer: Path, root: Path) -> None:
    """Let one path of the machine be seen under `root`; a link is seen as that link."""
    inner = root / outer.relative_to("/")
    if not outer.exists() or inner.exists():
        return
    inner.parent.mkdir(parents=True, exist_ok=True)
    if outer.is_symlink():
        inner.symlink_to(os.readlink(outer))
        return
    if stat.S_ISDIR(outer.stat().st_mode):
        inner.mkdir()
    else:
        inner.touch()
    _mount(str(outer), inner, None, 4096 | 16384, None)  # bind, with all that is mounted below


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(answer: int) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source: str, to: Path, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, str(to), kind, options)]
    _checked(_libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _read_only(root: Path) -> None:
    """mount_setattr (442 on every machine) over all that is mounted below: read-only, no suid."""
    wanted = (ctypes.c_uint64 * 4)(1 | 2, 0, 0, 0)
    here, recursive = -100, 0x8000
    _checked(_libc().syscall(442, here, str(root).encode(), recursive, ctypes.byref(wanted), ctypes.sizeof(wanted)))


def _drop_rights(mapped: bool, enclosed: bool) -> bool:
    """No capability, now or later; where we are root, a user that nobody else is.  Whether we are not root any more."""
    libc = _libc()
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # out of the bounding set; those that don't exist are refused
    # without the wall of files an interpreter in root's home could import nothing as another user
    if os.getuid() == 0 and not mapped and (enclosed or _everybody_reads(Path(os.__file__))):
        alone = (1 << 30) + secrets.randbelow(1 << 29)
        if not enclosed:
            os.chown(".", alone, alone)
        os.setgroups([])
        os.setgid(alone)
        os.setuid(alone)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _checked(libc.capset(ctypes.byref(header), ctypes.byref(nothing)))
    return os.getuid() != 0


def _everybody_reads(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) and bool(path.stat().st_mode & stat.S_IROTH)


if __name__ == "__main__":
    inside(*map(int, sys.argv[1:]))
