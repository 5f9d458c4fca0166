"""A server that runs beside others: a process group on a port of its own, which stands still while another is asked."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 600.0
"""Longest start; the first on a machine compiles."""
SETTLE_S = 0.3
"""What a server that stood still is given before it is asked."""
LEAST_FREE_BYTES = 2 * 2**30
"""No further server is started with less memory free."""
DIES_WITH_PARENT = 1
"""Number of Linux' prctl."""


class Server:
    """A running server, on the loopback."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, log: Any):
        self.name, self.process, self.port, self._log = name, process, port, log
        self.is_paused = False

    def pause(self) -> None:
        """Stand still: no thread of it runs until `resume`."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.is_paused = False
        time.sleep(SETTLE_S)

    @contextmanager
    def awake(self) -> Iterator[Server]:
        """Resumed within, paused after.  Raises ChildProcessError for one that has ended."""
        if self.process.poll() is not None:
            raise ChildProcessError(f"{self.name} ended with {self.process.returncode}: {self.log_end()}")
        self.resume()
        try:
            yield self
        finally:
            with suppress(ProcessLookupError):
                self.pause()

    def get(self, path: str, timeout_s: float = 30) -> tuple[int, bytes]:
        """Status and body.  Raises OSError where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def model(self) -> str:
        """The name of the model that it serves."""
        return str(json.loads(self.get("/v1/models")[1])["data"][0]["id"])

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by their names and labels, the model's label left out."""
        found = {}
        for line in self.get("/metrics")[1].decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[_without_model(name)] = float(value)
        return found

    def resident_bytes(self) -> int:
        """Memory of all its processes, pages that they share counted for each."""
        return sum(_resident(process) for process in self._processes())

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        ticks = [_stat(process)[11:13] for process in self._processes()]
        return sum(sum(map(int, pair)) for pair in ticks) / os.sysconf("SC_CLK_TCK")

    def _processes(self) -> list[Path]:
        """Folders of /proc of the processes in its group."""
        group = str(self.process.pid)
        return [one for one in Path("/proc").glob("[0-9]*") if (stat := _stat(one)) and stat[2] == group]

    def log_end(self, characters: int = 400) -> str:
        self._log.seek(0)
        return " ".join(self._log.read().split())[-characters:]

    def end(self) -> None:
        """Ask it to end, then kill what is left of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        self.process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def running(
    name: str, command: Callable[[int], Sequence[object]], env: Mapping[str, str] | None = None, health: str = "/health"
) -> Iterator[Server]:  # fmt: skip
    """Start a server, wait until it answers, and end it.  command: its arguments, given the port.

    Raises ChildProcessError where it does not start, MemoryError where too little is free.
    """
    if (free := free_bytes()) < LEAST_FREE_BYTES:
        raise MemoryError(f"{free >> 20} MiB of memory are free, and {LEAST_FREE_BYTES >> 20} are wanted")
    port = free_port()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [str(part) for part in command(port)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=dict(os.environ) | dict(env or {}), preexec_fn=_die_with_parent,
        )  # fmt: skip
        server = Server(name, process, port, log)
        try:
            _wait(server, health)
            yield server
        finally:
            server.end()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


def _wait(server: Server, health: str) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if server.process.poll() is not None:
            raise ChildProcessError(f"{server.name} did not start: {server.log_end()}")
        with suppress(OSError, http.client.HTTPException):
            if server.get(health)[0] == 200:
                return
        time.sleep(0.2)
    raise ChildProcessError(f"{server.name} did not answer within {START_S:.0f} s: {server.log_end()}")


def _die_with_parent() -> None:
    """A server that stands still would never end by itself."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def _stat(process: Path) -> list[str]:
    """Fields of /proc/PID/stat from the third on; none of a process that has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _resident(process: Path) -> int:
    try:
        return int((process / "statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _without_model(name: str) -> str:
    family, brace, labels = name.partition("{")
    own = [one for one in labels.rstrip("}").split(",") if one and not one.startswith(("model_name=", "engine="))]
    return family + (f"{{{','.join(own)}}}" if brace and own else "")
