"""The HTTP server: its socket, its event loop, and an end that loses no request."""

from __future__ import annotations

import asyncio
import functools
import gc
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from outrider.errors import ConfigError, OutriderError
from outrider.serve.config import Config
from outrider.serve.http.connections import Connection, Connections
from outrider.serve.http.door import Door
from outrider.serve.service import Post, Service

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 65
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, so that they close first."""
LAST_S, URGENT_S = 5.0, 0.2
"""Seconds in which requests that were cancelled at the end have to be answered; and after a second signal."""


class ServerError(OutriderError):
    """The server ended by itself."""


def bound(config: Config) -> socket.socket:
    """A socket at the server's address, which does not listen yet.  Raises ConfigError where it can't be taken, and for
    one that others reach while anybody may ask."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        is_open = not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if is_open and config.keys is None and not config.allow_anonymous:
            raise ConfigError(
                f"{config.host} is an address that other machines reach, and everybody could ask; name a file of keys "
                "with --keys (outrider keys add FILE NAME makes one), or let them with --allow-anonymous"
            )
        found = socket.socket(family, kind, protocol)  # asyncio sends small pieces at once on TCP that is named so
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {config.host}:{config.port}: {error.strerror or error}; choose another --port or --host"
        ) from None
    return found


def address_of(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Runs until `drain`, or until the engine fails; `ready` is called once it answers, and drains at a signal."""

    def __init__(
        self, door: Door, service: Service, post: Post, say: Callable[[str], None] = log.info,
        ready: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.limits = Connections(service.config.connections, service.config.address_connections)
        protocol: Any = functools.partial(Connection, self.limits)
        super().__init__(
            uvicorn.Config(
                door, http=protocol, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=int(LAST_S), log_level="warning",
            )
        )  # fmt: skip
        self.door, self.service, self.post, self.say, self.ready = door, service, post, say, ready
        self.unfinished = 0
        """Requests that were running when their time to end was over."""
        self._draining: asyncio.Task[None] | None = None
        self._is_urgent = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests.  Raises ServerError where the engine failed."""
        self.post.loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch())
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()
        if self.service.engine.error:
            raise ServerError(f"the engine failed: {self.service.engine.error}; see the log, and start it again")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so only then: before, a client's first request would be refused."""
        await super().startup(sockets)
        self.ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers would end running requests."""
        yield

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT drain; a second one ends at once.  In the main thread, on the loop that serves."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.drain)

    def drain(self) -> None:
        """Take no more requests, and end when the running ones have; called again, end now."""
        self.door.is_closed = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._is_urgent = True

    async def _drain(self) -> None:
        seconds = self.service.config.drain_s
        if self.door.inside:
            self.say(f"stopping: {self.door.inside} requests have {seconds:g} s to end; again to stop at once")
        if not await self._are_gone(seconds):
            self.unfinished = self.door.inside
            self.say(f"{self.unfinished} requests are ended unfinished")
            for job in list(self.service.jobs):
                self.service.cancel(job)
            if not await self._are_gone(LAST_S):
                for connection in list(self.limits.open):  # of clients that don't read what they are sent
                    connection.transport.abort()
                await self._are_gone(LAST_S)
        self.should_exit = True

    async def _are_gone(self, seconds: float) -> bool:
        now = asyncio.get_running_loop().time
        begun = now()
        while self.door.inside and now() - begun < (min(seconds, URGENT_S) if self._is_urgent else seconds):
            await asyncio.sleep(0.02)
        return not self.door.inside

    async def _watch(self) -> None:
        while not self.service.engine.error:
            await asyncio.sleep(0.25)
        self.should_exit = True


def run(server: Server, sock: socket.socket) -> None:
    """Answer requests at this socket until a signal.  Raises ServerError where the engine failed."""

    async def main() -> None:
        gc.collect()
        gc.freeze()  # a body of many values would have all of the model's objects looked through, again and again
        server.handle_signals()
        await server.serve([sock])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where it is there
        runner.run(main())
