"""Commands in processes of their own that have torch already: half a second instead of ten."""

import atexit
import multiprocessing
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkProcess
from pathlib import Path

from verbs import outrider_with

from outrider.engines.sweep import free_port


def fork(*command: str, log: Path, environment: dict[str, str] | None = None) -> ForkProcess:
    """`outrider COMMAND`, whose output goes to the end of a file."""
    child = multiprocessing.get_context("fork").Process(target=_call, args=(command, log, environment or {}))
    child.start()
    return child


def fork_all(count: int, *command: str, log: Path) -> str:
    """The command in so many processes, as torchrun starts them, to its end; what all of them said."""
    together = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{count}"} for rank in range(count)]
    children = [fork(*command, log=log, environment=together | rank) for rank in ranks]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count, log.read_text()
    return log.read_text()


def _call(command: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        code = outrider_with(*command)
    atexit._run_exitfuncs()  # a fork ends without them: coverage would save nothing
    sys.exit(code)
