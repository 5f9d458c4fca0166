"""The inner program of `sandbox`: it builds the walls, then runs an answer and its tests.

It is started as a script, so it imports only the standard library.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import resource
import secrets
import signal
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WALLS = ("files", "network", "processes")
PROCESSES = 32
SCRATCH_BYTES = 16 << 20


def inside(asked: int, token: int, results: int) -> None:
    """Build the walls, run the job in a child, and end when the child ends.  That ends all processes that the child
    left."""
    with open(asked, "rb") as file:
        job = json.load(file)
    enclosed = job["isolated"] and _enclose(Path.cwd())
    child = os.fork()
    if child == 0:
        try:
            bounded = _confine(job, enclosed)
            stand = {"files": enclosed, "network": job["isolated"], "processes": job["isolated"] and bounded}
            _say(results, json.dumps([wall for wall in WALLS if not stand[wall]]))
            _say(results, _tried(job["code"], job["tests"]) or os.read(token, 64).decode())
        finally:
            os._exit(0)
    while (ended := os.wait())[0] != child:  # in a name space of its own this process reaps orphans
        pass
    if os.WIFSIGNALED(ended[1]):
        number = os.WTERMSIG(ended[1])
        _say(results, "no end within its processor time" if number == signal.SIGXCPU else f"killed by signal {number}")
    os._exit(0)


def _say(to: int, line: str) -> None:
    os.write(to, line.replace("\n", " ")[:2000].encode(errors="replace") + b"\n")


def _tried(code: str, tests: str) -> str:
    """Run both.  Returns "" where they came to their end, else what stopped them."""
    space: dict[str, Any] = {"__name__": "answer"}
    own = dict(vars(builtins))
    part = "the code"
    try:
        exec(compile(code, "answer", "exec"), space)
        vars(builtins).update(own)  # an answer that replaced `all` is tested with the real one
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
    """Give up rights, then set the limits.  Returns whether the number of processes is limited: for root it is not."""
    count = 0 if job["isolated"] else _processes_of(os.getuid())
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
        set_limit(limit, most)
    return bounded


def set_limit(what: int, most: int) -> None:
    """Limit this process; a limit is never raised."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(OSError, ValueError):  # the system has no such limit
        resource.setrlimit(what, (most, most))


def _processes_of(user: int) -> int:
    """How many processes and threads a user has: the limit counts all of them."""
    count = 0
    for place in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            if place.stat().st_uid == user:
                count += len(list(place.iterdir()))
    return count


def _enclose(scratch: Path) -> bool:
    """Hide all files but the interpreter, system libraries and an empty folder.  Needs a mount name space of its
    own."""
    root = scratch / "root"
    root.mkdir()
    shown = [
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        "/etc/ld.so.cache",
        "/dev/null",
        "/dev/zero",
        "/dev/urandom",
        "/dev/random",
    ]
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
    """Mount one path of the machine under `root`; a link stays a link."""
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
    _mount(str(outer), inner, None, 4096 | 16384, None)  # bind, recursively


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(answer: int) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source: str, to: Path, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, str(to), kind, options)]
    _checked(_libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _read_only(root: Path) -> None:
    """Call mount_setattr (442 on every machine) recursively: read-only, no suid."""
    wanted = (ctypes.c_uint64 * 4)(1 | 2, 0, 0, 0)
    here, recursive = -100, 0x8000
    _checked(_libc().syscall(442, here, str(root).encode(), recursive, ctypes.byref(wanted), ctypes.sizeof(wanted)))


def _drop_rights(mapped: bool, enclosed: bool) -> bool:
    """Give up all capabilities, for good; as root, become an unused user.  Returns whether this process is not root any
    more."""
    libc = _libc()
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # from the bounding set; numbers that don't exist are refused
    # without the wall of files, another user could not read an interpreter in root's home
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
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) and bool(
        path.stat().st_mode & stat.S_IROTH
    )


if __name__ == "__main__":
    inside(*map(int, sys.argv[1:]))
