"""One answer, streamed over HTTP/1.1: when each piece of it came, and how it ended.  No torch.

CPU of a call whose answer comes in eight pieces, at 100 calls a second: httpx 3.24 ms, h11 on asyncio's streams 1.21 ms, this
with all it notes 0.98 ms (benchmarks/traffic.py, results/replay.json).  At 200 calls a second httpx would take two thirds of a
core, and what it measures then is in part itself; so the few parts of HTTP/1.1 that an answer needs are read here: a status,
headers, a body by length, in chunks or up to the end of the connection.

Nothing here raises for what a server does: every way in which an answer can end is an `Answer`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from outrider.errors import ConfigError

LARGEST_HEAD_BYTES = 64 * 2**10
LARGEST_EVENT_BYTES = 16 * 2**20
LARGEST_ERROR_BYTES = 16 * 2**10
CONNECT_S = 10.0


class Address(NamedTuple):
    """Where a server is."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Before /v1; mostly empty."""
    basic: str | None
    """user:password, in base64."""

    @property
    def shown(self) -> str:
        """Without the password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def address_of(url: str) -> Address:
    """The server at `url`, which may end in /v1, or in the path of one of its answers."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise ConfigError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000")
    if not parts.path.isascii() or re.search(r"\s", parts.path):
        raise ConfigError(f"the path of {url!r} can't be sent; write other characters than ASCII as %xx")
    basic = None
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        basic = base64.b64encode(secret.encode()).decode()
    prefix = re.sub(r"/*(v1)?(/(chat/)?completions)?/*$", "", parts.path)
    return Address(parts.hostname, port, parts.scheme == "https", prefix, basic)


@dataclass(slots=True)
class Answer:
    """What came back for one request.  Times are seconds of `time.perf_counter`."""

    began_s: float
    first_s: float | None = None
    """When the first text came."""
    ended_s: float = 0.0
    last_s: float | None = None
    """When the last text came."""
    gaps_s: list[float] = field(default_factory=list)
    """Between its pieces."""
    status: int | None = None
    failure: str | None = None
    """Why nothing, or not all of it, came; None: it is whole."""
    retry_after_s: float | None = None
    pieces: list[str] = field(default_factory=list)
    """Text of the first choice."""
    chunks: int = 0
    """Events with text."""
    tokens: int | None = None
    """As the server counts them."""
    prompt_tokens: int | None = None
    finish: str | None = None
    acceptance: dict[str, int] | None = None
    """Of this request, where the server says: drafts, drafted, accepted; whichever it says."""
    is_done: bool = False
    """It said that it was."""
    is_reused: bool = False
    """It was asked for on a connection that had carried another answer."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_whole(self) -> bool:
        return self.failure is None

    @property
    def is_cut(self) -> bool:
        """It began and did not end."""
        return self.failure is not None and self.first_s is not None

    @property
    def reason(self) -> str:
        """The failure without what the server said of this one call."""
        failure = self.failure or ""
        return failure.split(":")[0] if failure.startswith(("HTTP", "error in", "not understood")) else failure

    @property
    def never_began(self) -> bool:
        """Not a byte of it came."""
        return self.status is None


# ── server-sent events ────────────────────────────────────────────────────────────────────────────────────────────────


class Events:
    """Bytes, cut anywhere, to the data of server-sent events.  Source: the HTML standard, 9.2.6."""

    def __init__(self) -> None:
        self.rest = b""
        self.lines: list[bytes] = []
        self.has_begun = False
        self.held = b""
        """A carriage return at the end of what came: a newline may follow."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        if b"\r" in data or self.held:
            data = self.held + data
            self.held = b""
            if data.endswith(b"\r"):
                data, self.held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not self.has_begun:
            start = self.rest + data
            if len(start) < 3 and b"\xef\xbb\xbf".startswith(start):
                self.rest = start
                return
            self.has_begun, self.rest, data = True, b"", start.removeprefix(b"\xef\xbb\xbf")
        *whole, self.rest = (self.rest + data).split(b"\n")
        for line in whole:
            if line:
                self._take(line)
            elif self.lines:
                yield self._taken()

    def end(self) -> Iterator[bytes]:
        """What was not closed by an empty line: servers that die, and some that don't, leave it out."""
        for line in self.rest.split(b"\n"):
            self._take(line)
        if self.lines:
            yield self._taken()

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self.lines.append(value.removeprefix(b" "))

    def _taken(self) -> bytes:
        event = b"\n".join(self.lines)
        self.lines = []
        return event


def _take_event(answer: Answer, event: bytes, at_s: float) -> None:
    """One event's share of the answer.  ValueError where it is none."""
    if event == b"[DONE]":
        answer.is_done = True
        return
    found = json.loads(event)
    if not isinstance(found, dict):
        raise ValueError(f"an event that is a {type(found).__name__}")
    if (error := found.get("error")) is not None or found.get("object") == "error":
        said = error.get("message", error) if isinstance(error, dict) else error or found.get("message")
        answer.failure = f"error in the stream: {str(said)[:200]}"
        return
    has_text = False
    for choice in found.get("choices") or ():
        piece = _text_of(choice.get("delta") or choice.get("message") or choice)
        if piece:
            has_text = True
            if choice.get("index", 0) == 0:
                answer.pieces.append(piece)
        if choice.get("finish_reason") is not None:
            answer.finish = str(choice["finish_reason"])
    if has_text:
        if answer.first_s is None or answer.last_s is None:
            answer.first_s = at_s
        else:
            answer.gaps_s.append(at_s - answer.last_s)
        answer.chunks += 1
        answer.last_s = at_s
    usage = found.get("usage")
    if usage:
        answer.tokens = _whole(usage.get("completion_tokens"))
        answer.prompt_tokens = _whole(usage.get("prompt_tokens"))
    answer.acceptance = acceptance_said(found) or answer.acceptance


def _text_of(part: Mapping[str, Any]) -> str:
    """Whatever a model wrote: text, thoughts, arguments of a call."""
    text = part.get("content") or part.get("text") or part.get("reasoning_content") or part.get("reasoning") or ""
    for call in part.get("tool_calls") or ():
        function = call.get("function") or {}
        text = f"{text}{function.get('name') or ''}{function.get('arguments') or ''}"
    return text if isinstance(text, str) else json.dumps(text)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


SAID: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (
        ("metrics", "speculative_decoding"),
        {"drafts": "num_spec_steps", "drafted": "num_draft_tokens", "accepted": "num_accepted_draft_tokens"},
    ),
    (
        ("sglext", "spec_tokens_details"),
        {"drafts": "spec_verify_ct", "drafted": "spec_num_proposed_drafts", "accepted": "spec_num_correct_drafts"},
    ),
    (("timings",), {"drafted": "draft_n", "accepted": "draft_n_accepted"}),
)
"""Where vLLM, SGLang and llama-server say what one request's drafts came to, and under which names."""


def acceptance_said(found: Mapping[str, Any]) -> dict[str, int] | None:
    for places, names in SAID:
        inner: Any = found
        for place in places:
            inner = inner.get(place) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            # SGLang has had its names with and without their beginning
            counts = {ours: _whole(inner.get(name, inner.get(name.removeprefix("spec_")))) for ours, name in names.items()}
            said = {ours: count for ours, count in counts.items() if count is not None}
            if said:
                return said
    return None


# ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Line(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.is_open = False
        self.heard_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.is_open = transport, True

    def begin(self, answer: Answer, request: bytes) -> asyncio.Future[None]:
        assert self.transport is not None and self.waiter is None
        self.answer, self.events = answer, Events()
        self.data, self.has_head, self.kind, self.left = bytearray(), False, "", 0
        self.is_stream, self.body = False, bytearray()
        self.heard_s = time.perf_counter()
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.waiter

    def data_received(self, data: bytes) -> None:
        if self.waiter is None or self.answer is None:
            # a server that speaks unasked; nothing it says can be told from the next answer
            self.drop()
            return
        self.heard_s = time.perf_counter()
        self.data += data
        try:
            self._read()
        except (ValueError, AttributeError, TypeError) as error:
            self.end(f"not understood: {str(error)[:200] or type(error).__name__}")

    def _read(self) -> None:
        while not self.has_head:
            end = self.data.find(b"\r\n\r\n")
            if end < 0:
                if len(self.data) > LARGEST_HEAD_BYTES:
                    raise ValueError("headers without an end")
                return
            self._take_head(bytes(self.data[:end]))
            del self.data[: end + 4]
        if self.kind == "chunked":
            self._read_chunks()
        elif self.kind == "length":
            part = bytes(self.data[: self.left])
            del self.data[: len(part)]
            self.left -= len(part)
            self._take_body(part)
            if not self.left:
                self._whole_body()
        else:
            part = bytes(self.data)
            self.data.clear()
            self._take_body(part)

    def _read_chunks(self) -> None:
        while self.waiter is not None:
            end = self.data.find(b"\r\n")
            if end < 0:
                if len(self.data) > LARGEST_HEAD_BYTES:
                    raise ValueError("a chunk without a size")
                return
            if self.left < 0:  # behind the last chunk: trailers, up to an empty line
                del self.data[: end + 2]
                if not end:
                    self._whole_body()
                continue
            digits = bytes(self.data[:end]).partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", digits):
                raise ValueError(f"a chunk of size {digits[:20]!r}")
            size = int(digits, 16)
            if size == 0:
                del self.data[: end + 2]
                self.left = -1
                continue
            if size > LARGEST_EVENT_BYTES:
                raise ValueError(f"a chunk of {size} bytes")
            if len(self.data) < end + size + 4:
                return
            part = bytes(self.data[end + 2 : end + 2 + size])
            if self.data[end + 2 + size : end + size + 4] != b"\r\n":
                raise ValueError("a chunk longer than it says")
            del self.data[: end + size + 4]
            self._take_body(part)

    def _take_head(self, head: bytes) -> None:
        assert self.answer is not None
        first, *lines = head.split(b"\r\n")
        found = re.match(rb"HTTP/1\.[01] (\d{3})", first)
        if found is None:
            raise ValueError(f"{first[:60]!r} where HTTP/1.1 was wanted")
        status = int(found[1])
        if 100 <= status < 200:
            return
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.decode("latin-1").partition(":") for line in lines)
        }
        self.answer.status, self.has_head = status, True
        self.keeps = headers.get("connection", "").lower() != "close" and not first.startswith(b"HTTP/1.0")
        self.answer.retry_after_s = _retry_after(headers.get("retry-after"))
        self.is_stream = status == 200 and headers.get("content-type", "").startswith("text/event-stream")
        if headers.get("content-encoding", "identity") != "identity":
            raise ValueError(f"an answer packed with {headers['content-encoding']}, which was not asked for")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self.kind = "chunked"
        elif "content-length" in headers:
            if not headers["content-length"].isdecimal():
                raise ValueError(f"a length of {headers['content-length'][:20]!r}")
            self.kind, self.left = "length", int(headers["content-length"])
        else:
            self.kind, self.keeps = "rest", False

    def _take_body(self, part: bytes) -> None:
        assert self.answer is not None
        if self.is_stream:
            self._take_events(self.events.feed(part))
            if len(self.events.rest) > LARGEST_EVENT_BYTES:
                raise ValueError("an event without an end")
        elif len(self.body) < (LARGEST_EVENT_BYTES if self.answer.status == 200 else LARGEST_ERROR_BYTES):
            self.body += part

    def _take_events(self, events: Iterator[bytes]) -> None:
        answer = self.answer
        assert answer is not None
        for event in events:
            if self.waiter is None:
                return
            _take_event(answer, event, self.heard_s)
            if answer.failure is not None:
                self.end(answer.failure)

    def _whole_body(self) -> None:
        """All of the body came."""
        answer = self.answer
        assert answer is not None
        if answer.status != 200:
            self.end(_refusal(answer.status or 0, bytes(self.body)), keep=True)
            return
        if self.is_stream:
            self._take_events(self.events.end())
        else:  # it does not stream: all comes at once
            _take_event(answer, bytes(self.body), self.heard_s)
            answer.is_done = answer.failure is None
        if self.waiter is not None:
            said = answer.is_done or answer.finish is not None
            self.end(answer.failure or (None if said else "the stream ended without a word"), keep=True)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self.waiter is None:
            return
        try:
            if self.has_head and self.kind == "rest" and error is None:
                self._whole_body()
            elif self.is_stream:
                self._take_events(self.events.end())
        except (ValueError, AttributeError, TypeError):
            pass
        if self.waiter is not None:
            self.end(f"connection closed ({type(error).__name__})" if error else "connection closed")

    def end(self, failure: str | None, keep: bool = False) -> None:
        """The answer is over; `keep` where the connection can carry another."""
        assert self.answer is not None
        # a server that said all there is may lose its connection afterwards
        self.answer.failure = None if self.answer.is_done else failure
        self.answer.ended_s = time.perf_counter()
        waiter, self.waiter, self.answer = self.waiter, None, None
        if not (keep and self.keeps and not self.data):
            self.drop()
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def drop(self) -> None:
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()


def _refusal(status: int, body: bytes) -> str:
    try:
        found = json.loads(body)
        error = found.get("error", found)
        said = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = body[:120].decode("utf-8", "replace")
    return f"HTTP {status}: {str(said)[:200]}" if said else f"HTTP {status}"


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a count of them or a date."""
    if value is None:
        return None
    try:
        return (
            max(0.0, float(value)) if re.fullmatch(r"[\d.]+", value) else parsedate_to_datetime(value).timestamp() - time.time()
        )
    except (ValueError, TypeError):
        return None


class Stopped(asyncio.CancelledError):
    """The call was cancelled while its answer came."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        """What came of it until then."""


class Client:
    """Connections to one server.  As many as there are answers under way; a new call takes the one that was used last."""

    def __init__(self, address: Address, timeout_s: float = 120.0, key: str | None = None) -> None:
        self.address = address
        self.timeout_s = timeout_s
        """The longest silence."""
        self.free: list[_Line] = []
        self.busy: set[_Line] = set()
        self.tls = ssl.create_default_context() if address.tls else None
        secret = f"Bearer {key}" if key else f"Basic {address.basic}" if address.basic else None
        name = f"[{address.host}]" if ":" in address.host else address.host
        standard = address.port == (443 if address.tls else 80)
        self.headers = (
            f"Host: {name if standard else f'{name}:{address.port}'}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream, application/json\r\nUser-Agent: outrider\r\n"
            + (f"Authorization: {secret}\r\n" if secret else "")
        )
        self.watch: asyncio.TimerHandle | None = None

    async def ask(self, path: str, body: bytes, name: str) -> Answer:
        """Post `body`; `name` goes along as X-Request-Id.  Cancelled, it leaves no connection behind, and `Stopped` holds
        what came."""
        self._watch()
        request = (
            f"POST {self.address.prefix}{path} HTTP/1.1\r\n{self.headers}X-Request-Id: {_header(name)}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        answer = Answer(time.perf_counter())
        line = self._taken()
        if line is not None:
            answer.is_reused = True
            await self._carry(line, answer, request)
            if not (answer.failure is not None and answer.never_began and answer.failure.startswith("connection closed")):
                return answer
            # the server had closed it while it lay idle, which says nothing of the server
            answer = Answer(answer.began_s)
        try:
            async with asyncio.timeout(min(CONNECT_S, self.timeout_s)):
                _, line = await asyncio.get_running_loop().create_connection(
                    _Line, self.address.host, self.address.port, ssl=self.tls
                )
        except TimeoutError:
            answer.failure = "no connection: timeout"
        except ssl.SSLError as error:
            answer.failure = f"no connection: {error.reason or 'TLS'}"
        except socket.gaierror as error:
            answer.failure = f"no connection: {error.strerror}"
        except OSError as error:
            # several addresses that all fail are one error without a number
            answer.failure = f"no connection: {os.strerror(error.errno) if error.errno else 'none of its addresses answers'}"
        else:
            await self._carry(line, answer, request)
            return answer
        answer.ended_s = time.perf_counter()
        return answer

    def _taken(self) -> _Line | None:
        while self.free:
            line = self.free.pop()
            if line.is_open and line.transport is not None and not line.transport.is_closing():
                return line
        return None

    async def _carry(self, line: _Line, answer: Answer, request: bytes) -> None:
        self.busy.add(line)
        try:
            await line.begin(answer, request)
        except asyncio.CancelledError:
            if line.waiter is not None:
                line.end("stopped")
            line.drop()
            raise Stopped(answer) from None
        finally:
            self.busy.discard(line)
        if line.is_open:
            self.free.append(line)

    def _watch(self) -> None:
        """Look for silent connections now and then: a timer for each would cost more than all else."""
        if self.watch is None:
            every_s = min(1.0, self.timeout_s / 10)
            self.watch = asyncio.get_running_loop().call_later(every_s, self._look)

    def _look(self) -> None:
        self.watch = None
        now = time.perf_counter()
        for line in [line for line in self.busy if now - line.heard_s > self.timeout_s]:
            if line.waiter is not None:
                line.end(f"timeout: silent for {self.timeout_s:g} s")
        if self.busy:
            self._watch()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        for line in (*self.free, *self.busy):
            line.drop()
        self.free.clear()


def _header(value: str) -> str:
    """A value that can't end a header."""
    return re.sub(r"[^\x21-\x7e]", "_", value)[:200]
