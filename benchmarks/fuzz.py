"""Damaged files for every reader and damaged bodies for the server: each must be refused with one sentence, quickly and
in little memory.

    python benchmarks/fuzz.py [NAME …] [--cases 20000] [--seed 0] [--memory-mib 1024] [--seconds 20] [--minutes M]
                              [--case NUMBER] [--out FILE]

NAME is `bodies` or a reader: all of them unless given.  A case depends only on --seed, the reader and its number;
--case reruns one.  Every reader runs in a separate process with a memory limit; a case that takes longer than
--seconds, raises anything but an OutriderError, or has an overlong message is a failure, and so is a process that dies.
After --minutes a reader stops early, and the number of its cases is reported.

Bodies go to a server in a separate process: no answer may be a 5xx, none may be missing, its event loop may not block
for more than 50 ms, and in the end all slots must be free.  A loop that shares its cores with other programs blocks for
longer, so its own processor time is measured as well, and the limit applies to that.

Prints JSON; exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.fuzz_bodies import fuzz_bodies
from benchmarks.fuzz_readers import READERS
from benchmarks.mutations import damaged
from benchmarks.replay import provenance, publish
from outrider.errors import OutriderError

FORK = multiprocessing.get_context("fork")
BODIES = "bodies"

MOST_FAILURES = 20
SPECIAL = ("pipe", "device", "folder", "missing", "empty")
"""What replaces a file in one of 64 cases."""
LONGEST = 4000
"""Characters of a message."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-mib", type=int, default=1024, help="more than a reader has at its start")
    parser.add_argument("--seconds", type=int, default=20, help="for one case")
    parser.add_argument("--minutes", type=float, help="for one reader")
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, rows = time.perf_counter(), {}
    for name in options.names or [BODIES, *READERS]:
        rows[name] = run_worker(name, options)
        print(f"{name}: {summary_of(rows[name])}", file=sys.stderr, flush=True)
    publish({"provenance": provenance(time.perf_counter() - began), "seed": options.seed, "rows": rows}, options.out)
    sys.exit(any(row["failures"] for row in rows.values()))


def summary_of(row: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in row["outcomes"].items())
    return f"{row['cases']} cases, {len(row['failures'])} failures: {counts}"


# ── the parent ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_worker(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One reader's cases, in a process that is restarted after a case that killed it."""
    row: dict[str, Any] = {"cases": 0, "outcomes": Counter(), "failures": []}
    first, cases = (0, options.cases) if options.case is None else (options.case, options.case + 1)
    work = fuzz_bodies if name == BODIES else fuzz_reader
    while first < cases and len(row["failures"]) < MOST_FAILURES:
        reports, own = FORK.Pipe(duplex=False)
        process = FORK.Process(target=work, args=(name, range(first, cases), options, own))
        process.start()
        own.close()
        with contextlib.suppress(EOFError):
            while True:
                kind, value = reports.recv()
                if kind == "case":
                    first, row["cases"] = value + 1, row["cases"] + 1
                elif kind == "outcome":
                    row["outcomes"][value] += 1
                elif kind == "failure":
                    row["failures"].append({"case": first - 1, "error": value})
                else:
                    row[kind] = max(value, row.get(kind, 0))
        process.join()
        if process.exitcode == 0:
            break
        row["failures"].append({"case": first - 1, "error": f"the process ended with {process.exitcode}"})
    row["failures"] = row["failures"][:MOST_FAILURES]
    return row


# ── a reader's process ────────────────────────────────────────────────────────────────────────────────────────────────


def fuzz_reader(name: str, cases: range, options: argparse.Namespace, out: Connection) -> None:
    """Reads a damaged copy of a reader's files for each case."""
    reader = READERS[name]
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    with tempfile.TemporaryDirectory(prefix="outrider-fuzz-") as temporary:
        whole, folder = Path(temporary) / "whole", Path(temporary) / "damaged"
        whole.mkdir()
        reader.make(whole)
        reader.read(whole)  # must not raise
        files = sorted(path for path in whole.rglob("*") if path.is_file())
        limit_memory(options.memory_mib)
        for number in cases:
            if time.monotonic() > until:
                break
            out.send(("case", number))
            draw = random.Random(f"{options.seed} {name} {number}")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            how = damage(folder / draw.choice(files).relative_to(whole), draw)
            outcome = tried(reader.read, folder, options.seconds)
            out.send(("outcome", outcome.partition(":")[0]))
            if outcome not in ("read", "refused"):
                out.send(("failure", f"{how}: {outcome}"))


def limit_memory(more_mib: int) -> None:
    """The heap may grow by this much."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + more_mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file or replace it by something else; returns what was done."""
    kind = draw.choice(SPECIAL) if draw.random() < 1 / 64 else "bytes"
    if kind == "bytes":
        path.write_bytes(damaged(path.read_bytes(), draw))
    else:
        replaced(path, kind)
    return f"{path.name}: {kind}"


def replaced(path: Path, kind: str) -> None:
    """Replace a file by something else: one of `SPECIAL`."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()


class OutOfTime(BaseException):
    """Not an Exception, which a reader might catch."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def tried(read: Any, folder: Path, seconds: int) -> str:
    """`read`, `refused`, or what went wrong."""
    try:
        with within(seconds):
            read(folder)
    except OutriderError as error:
        return "refused" if len(str(error)) < LONGEST else f"long: a message of {len(str(error))} characters"
    except OutOfTime:
        return f"slow: more than {seconds} s: {last_frames()}"
    except Exception as error:
        return f"raised: {type(error).__name__}: {str(error)[:200]}: {last_frames()}"
    return "read"


def last_frames() -> str:
    """The last place in the package that the current exception passed through."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    own = [frame for frame in frames if "/outrider/" in frame.filename] or list(frames)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-4:]))


if __name__ == "__main__":
    main()
