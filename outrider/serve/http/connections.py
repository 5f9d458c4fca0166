"""Limits on connections before a request is admitted: memory, time and sockets.

uvicorn limits neither the size of a request's head nor how long it may take to arrive; this protocol does.  A
connection without a request in progress is *waiting*.  When there are too many, the address with the most waiting ones
loses its oldest, so a client that floods the server with idle sockets closes its own.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
"""Most bytes of a request's line and headers, and of anything else outside its body."""
HEAD_S = 10.0
"""Seconds within which a head has to arrive, from its first byte or from the opening of the connection."""
PIPELINED = 16
"""Most pipelined requests of one connection."""
RESERVED = 64
"""File descriptors reserved for other uses than connections."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connections:
    """The connections of a server, from all addresses."""

    def __init__(self, most: int, of_address: int, head_s: float = HEAD_S):
        """most: lowered if the process may open fewer files.  of_address: most waiting ones of one address."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = most if files == resource.RLIM_INFINITY else min(most, max(8, files - RESERVED))
        self.of_address, self.head_s = of_address, head_s
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, str] = {}
        """Their addresses, the oldest first."""

    def opened(self, connection: Connection) -> None:
        self.open.add(connection)
        self.waits(connection)

    def waits(self, connection: Connection) -> None:
        """The connection has no request in progress; closes one if there are too many."""
        self.waiting[connection] = connection.address
        counts = Counter(self.waiting.values())
        if counts[connection.address] > self.of_address:
            self._close_oldest(connection.address)
        elif len(self.open) > self.most:
            self._close_oldest(counts.most_common(1)[0][0])

    def works(self, connection: Connection) -> None:
        self.waiting.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.waiting.pop(connection, None)

    def _close_oldest(self, address: str) -> None:
        oldest = next(connection for connection, of in self.waiting.items() if of == address)
        self.closed(oldest)
        oldest.end()


class Connection(HttpToolsProtocol):
    """One connection, with limits on everything outside a body."""

    def __init__(self, limits: Connections, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.limits, self.address = limits, ""
        self._head_bytes = 0
        self._unread = 0
        """Bytes since the last part of a body."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._await_head()
        self.limits.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.closed(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timer is None and self.is_waiting:
            self._await_head()
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES:
            self.end(TOO_LARGE)

    # ── the parser's callbacks ────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests at once")  # uvicorn answers 400 and closes
        self._unread = 0
        self._stop_timer()
        self.limits.works(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_waiting and not self.transport.is_closing():
            self.limits.waits(self)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_waiting(self) -> bool:
        """No request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def end(self, answer: bytes = b"") -> None:
        """Close the connection, after this answer if none was begun."""
        if self.transport.is_closing():
            return
        if answer and self.is_waiting:
            self.transport.write(answer)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self.end(TOO_LARGE)
            raise ValueError("the head is too large")

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.limits.head_s, self.end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
