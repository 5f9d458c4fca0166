"""Limits on connections before a request is admitted: memory, time and sockets.

uvicorn limits neither the size of a request's head nor how long it may take to arrive; this protocol does.  A
connection without a request in progress is *waiting*, and so is one whose client does not read its responses.  When
there are too many, the address with the most waiting ones loses its oldest, so a client that floods the server with
idle sockets closes its own.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from outrider.serve.pacing import REFUSAL_S, Pace

HEAD_BYTES = 64 * 1024
"""Maximum number of bytes of a request's line and headers, and of anything else outside its body."""
HEADERS = 100
"""Maximum number of headers, Apache's default, since reading many short ones takes long: each counts as its part of
HEAD_BYTES, or more if it is longer."""
HEAD_S = 10.0
"""Seconds within which a head has to arrive, from its first byte or from the opening of the connection."""
UNREAD_S = 60.0
"""Seconds within which a client must read enough of its responses for more to be sent."""
PIPELINED = 16
"""Maximum number of pipelined requests of one connection."""
RESERVED = 64
"""File descriptors reserved for other uses than connections."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connections:
    """The connections of a server, from all addresses."""

    def __init__(self, most: int, of_address: int, head_s: float = HEAD_S, unread_s: float = UNREAD_S):
        """most: lowered if the process may open fewer files.  of_address: most waiting ones of one address."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = most if files == resource.RLIM_INFINITY else min(most, max(8, files - RESERVED))
        self.of_address, self.head_s, self.unread_s = of_address, head_s, unread_s
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, str] = {}
        """Their addresses, the oldest first."""
        self.pace = Pace()

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

    def close_unread(self) -> None:
        """Close the connections whose clients have read too little for `unread_s`; call it periodically."""
        before = asyncio.get_running_loop().time() - self.unread_s
        for connection in list(self.open):
            if connection.transport.is_closing() and connection not in self.waiting:
                connection.stalls()  # its last response is not sent yet
            if connection.stalled is not None and connection.stalled <= before:
                self.closed(connection)
                connection.drop()

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
        self.answered: RequestResponseCycle | None = None
        """The request in progress, or the last one; `cycle` is a later one if requests are pipelined."""
        self._head_bytes = 0
        self._is_refused = False
        """Its head is too large, and nothing more is read."""
        self._unread = 0
        """Bytes since the last part of a body."""
        self._timer: asyncio.TimerHandle | None = None
        self.stalled: float | None = None
        """Since when the client reads too little, by the loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._await_head()
        self.limits.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.closed(self)
        self._stop_timer()
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_refused:
            self.transport.pause_reading()  # a request before it resumed reading when it ended
            return
        if self._timer is None and self.is_waiting:
            self._await_head()
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES and not self._is_refused:
            self._refuse_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalls()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled = None
        if not self.is_waiting:
            self.limits.works(self)

    def stalls(self) -> None:
        """What is sent waits for the client."""
        if self.stalled is None:
            self.stalled = self.loop.time()
        self.limits.waits(self)

    # ── the parser's callbacks ────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(max(len(name) + len(value), HEAD_BYTES // HEADERS))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests at once")  # uvicorn answers 400 and closes
        self._unread = 0
        self._stop_timer()
        if self.stalled is None:
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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answered = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        if self._is_refused:
            return
        if self.answered is not None and self.answered.response_started and not self.is_waiting:
            self.end()  # not into the response to the previous request
        elif not self.transport.is_closing():
            self._forget()
            super().send_400_response(msg)

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_waiting(self) -> bool:
        """No request is in progress."""
        return self.answered is None or self.answered.response_complete

    def end(self, answer: bytes = b"") -> None:
        """Close the connection: after this answer if none was begun, at once if the client does not read."""
        if answer and self.is_waiting and not self.transport.is_closing():
            self.transport.write(answer)
        if self.transport.get_write_buffer_size():
            self.drop()  # `close` would wait for the client
        else:
            self._forget()
            self.transport.close()

    def drop(self) -> None:
        """Close the connection at once."""
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        """The request in progress gets no response: writing one to a closed transport would raise."""
        if self.answered is not None and not self.answered.response_complete:
            self.answered.disconnected = True
            self.answered.message_event.set()

    def timeout_keep_alive_handler(self) -> None:
        self.end()

    def shutdown(self) -> None:
        if self.is_waiting:
            self.end()
        else:
            super().shutdown()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self._refuse_head()
            raise ValueError("the head is too large")

    def _refuse_head(self) -> None:
        """Read no more, and close the connection: later if its client has caused many refusals."""
        self._is_refused = True
        self._stop_timer()
        self.pipeline.clear()
        self.transport.pause_reading()
        self.loop.call_later(self.limits.pace.wait_s(self.address, REFUSAL_S), self.end, TOO_LARGE)

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.limits.head_s, self.end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
