"""The HTTP server: its socket, its event loop, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import functools
import gc
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from outrider.errors import ConfigError, OutriderError
from outrider.serve.config import Config
from outrider.serve.http.admission import Admission
from outrider.serve.http.connections import Connection, Connections
from outrider.serve.service import Post, Service

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 65
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, so that they close it first.
"""
LAST_S = 5.0
"""Seconds in which cancelled requests must be answered at shutdown."""
SWITCH_S = 0.0005
"""Seconds after which a thread that waits for the interpreter gets it: a step needs it many times, for microseconds."""
URGENT_S = 0.2
"""Seconds that running requests have after a second signal."""


class ServerError(OutriderError):
    """The server stopped because of an error."""


def bound(config: Config) -> socket.socket:
    """A socket bound to the server's address, not listening yet.  Raises ConfigError for an address that is taken, and
    for one that other machines can reach if no key is required."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        is_open = not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if is_open and config.keys is None and not config.allow_anonymous:
            raise ConfigError(
                f"{config.host} can be reached from other machines, and no key is required; name a file of keys "
                "with --keys (outrider keys add FILE NAME makes one), or allow everyone with --allow-anonymous"
            )
        sock = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY if the protocol is given as TCP
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {config.host}:{config.port}: {error.strerror or error}; choose another --port or --host"
        ) from None
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Runs until `drain`, or until the engine fails; `ready` is called once it answers requests."""

    def __init__(
        self, admission: Admission, service: Service, post: Post, say: Callable[[str], None] = log.info,
        ready: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.limits = Connections(service.config.connections, service.config.address_connections)
        protocol: Any = functools.partial(Connection, self.limits)
        super().__init__(
            uvicorn.Config(
                admission, http=protocol, lifespan="off", ws="none", log_config=None, access_log=False,
                server_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=int(LAST_S),
                log_level="warning",
            )
        )  # fmt: skip
        self.admission, self.service, self.post, self.say, self.ready = admission, service, post, say, ready
        self.unfinished = 0
        """Requests that were still running when `drain_s` was over."""
        self._draining: asyncio.Task[None] | None = None
        self._is_urgent = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests.  Raises ServerError if the engine fails."""
        self.post.loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch())
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()
        if self.service.engine.error:
            raise ServerError(f"the engine failed: {self.service.engine.error}; see the log, and restart the server")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `ready`: earlier, a client's first request would be refused."""
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.limits.unread_s = 0.0
        self.limits.close_unread()  # otherwise uvicorn would cancel the tasks that wait for these clients
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: uvicorn's handlers would end running requests."""
        yield

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT drain; a second one stops at once.  Call it in the main thread, on the serving loop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.drain)

    def drain(self) -> None:
        """Admit no more requests, and stop when the running ones have ended; called again, stop now."""
        self.admission.is_closed = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._is_urgent = True

    async def _drain(self) -> None:
        seconds = self.service.config.drain_s
        if self.admission.num_active:
            self.say(
                f"stopping: {self.admission.num_active} requests have {seconds:g} s to end; signal again to stop now"
            )
        if not await self._are_gone(seconds):
            self.unfinished = self.admission.num_active
            self.say(f"{self.unfinished} requests are cut off")
            for job in list(self.service.jobs):
                self.service.cancel(job)
            if not await self._are_gone(LAST_S):
                for connection in list(self.limits.open):  # of clients that don't read their responses
                    connection.drop()
                await self._are_gone(LAST_S)
        self.should_exit = True

    async def _are_gone(self, seconds: float) -> bool:
        now = asyncio.get_running_loop().time
        began = now()
        while self.admission.num_active and now() - began < (min(seconds, URGENT_S) if self._is_urgent else seconds):
            await asyncio.sleep(0.02)
        return not self.admission.num_active

    async def _watch(self) -> None:
        while not self.service.engine.error:
            await asyncio.sleep(0.25)
            self.limits.close_unread()
        self.should_exit = True


def run(server: Server, sock: socket.socket) -> None:
    """Answer requests at this socket until a signal.  Raises ServerError if the engine fails."""

    async def main() -> None:
        gc.collect()
        sys.setswitchinterval(SWITCH_S)
        gc.freeze()  # large bodies trigger garbage collections, which would scan all of the model's objects each time
        server.handle_signals()
        await server.serve([sock])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop if it is installed
        runner.run(main())
