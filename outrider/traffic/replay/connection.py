"""Connections to one server over HTTP/1.1, each carrying one streamed answer at a time.  No torch.

h11 implements HTTP; this file records when bytes arrive and how an answer ends.  httpx would take three times the CPU
per call: two thirds of a core at 200 calls/s, which would distort the times.

Nothing here raises, whatever a server does: every failure is recorded in an `Answer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import h11

from outrider.client.sending.events import EventDecoder
from outrider.traffic.address import Address
from outrider.traffic.replay.answer import Answer

LARGEST_HEAD_BYTES = 64 * 2**10
LARGEST_EVENT_BYTES = 16 * 2**20
LARGEST_ERROR_BYTES = 16 * 2**10
CONNECT_S = 10.0
NO_ADDRESS = "none of its addresses answers"
NOT_UNDERSTOOD = (h11.RemoteProtocolError, ValueError, AttributeError, TypeError)
"""Raised for bytes that are not HTTP, and for malformed events."""


class _Connection(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self) -> None:
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD_BYTES)
        self.transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        """The one in progress."""
        self.over = asyncio.Event()
        self.received_s = 0.0

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def send(self, answer: Answer, request: h11.Request, body: bytes) -> None:
        """Send a request and fill in its answer until it ends.

        Cancellation closes the connection and keeps the partial answer.
        """
        assert self.transport is not None and self.answer is None
        self.answer, self.events, self.body, self.is_stream = answer, EventDecoder(), bytearray(), False
        self.over.clear()
        self.received_s = time.perf_counter()
        events = (request, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.http.send(event) or b"" for event in events))
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self.end("stopped")
            raise

    def data_received(self, data: bytes) -> None:
        if self.answer is None:
            # bytes without a request would be mistaken for the next answer
            self.drop()
            return
        self.received_s = time.perf_counter()
        try:
            self._read(data)
        except NOT_UNDERSTOOD as error:
            self.end(f"not understood: {str(error)[:200] or type(error).__name__}")

    def connection_lost(self, error: Exception | None) -> None:
        with contextlib.suppress(*NOT_UNDERSTOOD):
            if self.answer is not None and error is None:
                self._read(b"")
        with contextlib.suppress(*NOT_UNDERSTOOD):
            if self.answer is not None and self.is_stream:
                self._take_events(self.answer, self.events.end())
        self.end(f"connection closed ({type(error).__name__})" if error else "connection closed")

    def _read(self, data: bytes) -> None:
        """Process the events in the bytes; no bytes mean the end of the connection."""
        self.http.receive_data(data)
        while (answer := self.answer) is not None:
            event = self.http.next_event()
            if isinstance(event, h11.Data):
                self._take_body(answer, bytes(event.data))
            elif isinstance(event, h11.Response):
                self._take_head(answer, event)
            elif isinstance(event, h11.EndOfMessage):
                self._take_end(answer)
            elif not isinstance(event, h11.InformationalResponse):
                return

    def _take_head(self, answer: Answer, head: h11.Response) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        answer.status = head.status_code
        answer.retry_after_s = _retry_after(headers.get("retry-after"))
        self.is_stream = head.status_code == 200 and headers.get("content-type", "").startswith("text/event-stream")
        if headers.get("content-encoding", "identity") != "identity":
            raise ValueError(
                f"the answer is compressed with {headers['content-encoding']}, but no compression was requested; "
                "turn it off in the server"
            )

    def _take_body(self, answer: Answer, part: bytes) -> None:
        if self.is_stream:
            self._take_events(answer, self.events.feed(part))
            if len(self.events.rest) > LARGEST_EVENT_BYTES:
                raise ValueError(f"an event is longer than {LARGEST_EVENT_BYTES >> 20} MiB")
        elif len(self.body) < (LARGEST_EVENT_BYTES if answer.status == 200 else LARGEST_ERROR_BYTES):
            self.body += part

    def _take_events(self, answer: Answer, events: Iterator[str]) -> None:
        for event in events:
            answer.take(event, self.received_s)
            if answer.failure is not None:
                self.end(answer.failure)
                return

    def _take_end(self, answer: Answer) -> None:
        """The body is complete."""
        if answer.status != 200:
            answer.refuse(bytes(self.body))
        elif self.is_stream:
            self._take_events(answer, self.events.end())
        else:  # not a stream: the whole answer at once
            answer.take(bytes(self.body), self.received_s)
            answer.is_done = answer.failure is None
        is_complete = answer.is_done or answer.finish is not None
        self.end(answer.failure or (None if is_complete else "the stream ended before the answer did"), keep=True)

    def end(self, failure: str | None, keep: bool = False) -> None:
        """End the answer.  keep: the connection may be reused."""
        if self.answer is None:
            return
        self.answer.end(time.perf_counter(), failure)
        self.answer = None
        self.over.set()
        if keep and self.http.our_state is self.http.their_state is h11.DONE and not self.http.trailing_data[0]:
            self.http.start_next_cycle()
        else:
            self.drop()

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date."""
    if value is None:
        return None
    try:
        if re.fullmatch(r"[\d.]+", value):
            return float(value)
        return parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError):
        return None


class ConnectionPool:
    """Connections to one server, one for each answer in progress.  A new call takes the most recently used one."""

    def __init__(self, address: Address, timeout_s: float = 120.0, key: str | None = None) -> None:
        self.address = address
        self.timeout_s = timeout_s
        """Maximum time without a byte."""
        self.free: list[_Connection] = []
        self.busy: set[_Connection] = set()
        self.tls = ssl.create_default_context() if address.tls else None
        self.headers = {
            "Host": address.host_header, "Content-Type": "application/json", "User-Agent": "outrider",
            "Accept": "text/event-stream, application/json", **address.authorization(key),
        }  # fmt: skip
        self.watch: asyncio.TimerHandle | None = None

    async def post(self, path: str, body: bytes, name: str, answer: Answer | None = None) -> Answer:
        """Post `body`, with `name` as X-Request-Id.  Fills in `answer`, or a new one.

        Cancellation closes the connection and keeps the partial `answer`.
        """
        self._watch()
        call_headers = {"X-Request-Id": re.sub(r"[^\x21-\x7e]", "_", name)[:200], "Content-Length": str(len(body))}
        headers = list((self.headers | call_headers).items())
        request = h11.Request(method="POST", target=self.address.prefix + path, headers=headers)
        answer = answer or Answer(time.perf_counter())
        while self.free:
            used = self.free.pop()
            if used.is_open:
                await self._send(used, answer, request, body)
                if answer.status is not None or not (answer.failure or "").startswith("connection closed"):
                    return answer
                # the server had closed the idle connection, which is not a failure
                answer.failure = None
                break
        connection = await self._connected(answer)
        if connection is not None:
            await self._send(connection, answer, request, body)
        return answer

    async def _connected(self, answer: Answer) -> _Connection | None:
        """A new connection; None if it failed, with the reason in the answer."""
        try:
            async with asyncio.timeout(min(CONNECT_S, self.timeout_s)):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self.address.host, self.address.port, ssl=self.tls
                )
            return connection
        except TimeoutError:
            reason = "timeout"
        except ssl.SSLError as error:
            reason = error.reason or "TLS"
        except OSError as error:
            # if all of several addresses fail, the error has no errno; the errno for an unknown name has a different
            # meaning
            if isinstance(error, socket.gaierror):
                reason = error.strerror or NO_ADDRESS
            else:
                reason = os.strerror(error.errno) if error.errno else NO_ADDRESS
        answer.end(time.perf_counter(), f"no connection: {reason}")
        return None

    async def _send(self, connection: _Connection, answer: Answer, request: h11.Request, body: bytes) -> None:
        self.busy.add(connection)
        try:
            await connection.send(answer, request, body)
        finally:
            self.busy.discard(connection)
        if connection.is_open:
            self.free.append(connection)

    def _watch(self) -> None:
        """Check periodically for silent connections: a timer for each would cost more than everything else."""
        if self.watch is None:
            every_s = min(1.0, self.timeout_s / 10)
            self.watch = asyncio.get_running_loop().call_later(every_s, self._check_silence)

    def _check_silence(self) -> None:
        self.watch = None
        now = time.perf_counter()
        for connection in [one for one in self.busy if now - one.received_s > self.timeout_s]:
            connection.end(f"timeout: silent for {self.timeout_s:g} s")
        if self.busy:
            self._watch()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        for connection in (*self.free, *self.busy):
            connection.drop()
        self.free.clear()
