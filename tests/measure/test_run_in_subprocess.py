"""What a model wrote runs in another process, within limits, and nothing of it is left."""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from outrider.errors import ConfigError, DataError
from outrider.measure.tasks import sandbox
from outrider.measure.tasks.sandboxed import SCRATCH_BYTES

LIMITS = (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)


def refused() -> None:
    raise ConfigError("said there")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lingering(mark: Path, seconds: float) -> None:
    """Leave a process behind that notes its number, then work for a while."""
    child = os.fork()
    if child == 0:
        time.sleep(300)
    mark.write_text(str(child))
    time.sleep(seconds)


def confined() -> tuple[list[int], list[int], str]:
    """Hard limits of this process and of one that it forks, and what became of one that took too much."""
    sandbox.confine(10)
    own = [resource.getrlimit(limit)[1] for limit in LIMITS]
    context = multiprocessing.get_context("fork")
    found: multiprocessing.SimpleQueue[tuple[list[int], str]] = context.SimpleQueue()
    child = context.Process(target=greedy, args=(found,))
    child.start()
    forked, outcome = found.get()
    child.join()
    return own, forked, outcome


def greedy(found: multiprocessing.SimpleQueue[tuple[list[int], str]]) -> None:
    limits = [resource.getrlimit(limit)[1] for limit in LIMITS]
    try:
        bytearray(2 * sandbox.ANSWER_BYTES)
    except MemoryError:
        found.put((limits, "out of memory"))
    else:
        found.put((limits, "it had all it asked for"))


def is_gone(process: int) -> bool:
    """Not there, or dead and not yet buried by whoever inherits it."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


def test_results_and_errors_come_back() -> None:
    """Catches an error of the user's that turns into another one on its way, and a wait for a process that is no
    more."""
    assert sandbox.run_in_subprocess(os.getpid, 60) != os.getpid()
    with pytest.raises(ConfigError, match="said there"):
        sandbox.run_in_subprocess(refused, 60)
    with pytest.raises(DataError, match="killed before it had a result"):
        sandbox.run_in_subprocess(killed, 60)


@pytest.mark.parametrize("seconds", [0.0, 120.0])
def test_nothing_is_left_when_it_is_done_or_out_of_time(seconds: float, tmp_path: Path) -> None:
    """Catches code that has no end, and processes that outlive the evaluation."""
    work = functools.partial(lingering, tmp_path / "mark", seconds)
    if seconds:
        with pytest.raises(DataError, match="did not end within 2 s"):
            sandbox.run_in_subprocess(work, 2)
    else:
        sandbox.run_in_subprocess(work, 60)
    left = int((tmp_path / "mark").read_text())
    ends = time.monotonic() + 30
    while not is_gone(left) and time.monotonic() < ends:
        time.sleep(0.05)
    assert is_gone(left)


def test_the_process_has_limits_and_what_it_forks_has_narrower_ones() -> None:
    """Catches an answer that takes the machine's memory, disk or processor; torch's own process keeps its address
    space."""
    own, forked, outcome = sandbox.run_in_subprocess(confined, 60)
    assert (
        own[:2] == [10 * (os.cpu_count() or 1), sandbox.FILE_BYTES]
        and own[2] == resource.getrlimit(resource.RLIMIT_AS)[1]
    )
    assert forked[:2] == [min(sandbox.ANSWER_S, own[0]), SCRATCH_BYTES]
    assert sandbox.ANSWER_BYTES < forked[2] < 64 << 30
    assert outcome == "out of memory"
