"""Commands in processes of their own that have torch already: half a second instead of ten."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkProcess
from pathlib import Path

from verbs import outrider_with

from outrider.engines.tuning.sweep import free_port


def fork(*command: str, log: Path, environment: dict[str, str] | None = None) -> ForkProcess:
    """`outrider COMMAND`, whose output goes to the end of a file."""
    return _fork(lambda: outrider_with(*command), log, environment or {})


def fork_all(count: int, *command: str, log: Path) -> str:
    """`outrider COMMAND` in so many processes, as torchrun starts them, to its end; what all of them said."""
    return together(count, lambda: outrider_with(*command), log)


def together(count: int, call: Callable[[], object], log: Path) -> str:
    """A call in so many processes, as torchrun starts them, to its end; what all of them said."""
    launcher = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{count}"} for rank in range(count)]
    children = [_fork(call, log, launcher | rank) for rank in ranks]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count, log.read_text()
    return log.read_text()


def _fork(call: Callable[[], object], log: Path, environment: dict[str, str]) -> ForkProcess:
    child = multiprocessing.get_context("fork").Process(target=_run, args=(call, log, environment))
    child.start()
    return child


def _run(call: Callable[[], object], log: Path, environment: dict[str, str]) -> None:
    """Ends with what was called: a command's exit code, or None."""
    os.environ.update(environment)
    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        code = call()
    atexit._run_exitfuncs()  # a fork ends without them: coverage would save nothing
    sys.exit(code)
