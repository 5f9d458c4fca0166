"""Clients of an OpenAI-compatible server, cheap enough to share its cores; they compare the answers they get.

`serving.py` runs this file as a separate process: each plan is a line of JSON on standard input, each result one on
standard output.  Bytes are read as they come: a chunk of a stream is stored with its time of arrival, and parsed when
the turn is over (in a soak, when the answer is).  Does not import torch.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

PATIENCE_S = 600.0
"""Maximum wait for the end of one answer, in seconds."""
LEAVE_S = 0.02
"""Seconds after which a client disconnects if it is supposed to do so before the first chunk."""
MOST_TOLD = 50
"""Number of unexpected answers reported with their texts."""


class Due(NamedTuple):
    """A request with a known answer."""

    path: str
    body: dict[str, Any]
    text: str
    tokens: list[int]
    """Includes the token that ends the text."""
    finish_reason: str


class Read(NamedTuple):
    """The content of an answer."""

    text: str
    tokens: list[int] | None
    """Only if the server returns ids."""
    counted: int | None
    """Number of tokens according to the server."""
    finish_reason: str | None
    times: list[float]
    """When each piece with text or tokens arrived."""
    error: str


@dataclass(slots=True)
class Answer:
    """The bytes of one answer; times are from `time.perf_counter`."""

    sent: float = 0.0
    status: int = 0
    """0 if none arrived."""
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    """The body of a non-streamed answer."""
    error: str = "no answer"
    has_left: bool = False
    """The client closed the connection before the end."""

    @property
    def is_whole(self) -> bool:
        return not self.error

    def read(self) -> Read:
        texts, tokens, times = [], None, []
        counted, reason, error = None, None, self.error
        for at, event in self.events:
            for line in event.split(b"\n"):
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                said = json.loads(line[5:])
                if said.get("error"):
                    error = f"an error in the stream: {said['error']}"
                counted = (said.get("usage") or {}).get("completion_tokens", counted)
                for choice in said.get("choices") or ():
                    piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    ids = choice.get("token_ids")
                    if piece or ids:
                        texts.append(piece)
                        times.append(at)
                    if ids:
                        tokens = (tokens or []) + ids
                    reason = choice.get("finish_reason") or reason
        return Read("".join(texts), tokens, counted, reason, times, error)


# ── one connection ────────────────────────────────────────────────────────────────────────────────────────────────────


class Connection(asyncio.Protocol):
    """HTTP/1.1, one answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._rest = b""
        self._answer: Answer | None = None
        self._part: Callable[[], bool] = self._head
        """Parses the next part of an answer from the buffer; False if it is not complete yet."""
        self._is_stream, self._is_last, self._left, self._now = False, False, 0, 0.0
        self._leave_after: int | None = None

    @staticmethod
    async def opened(port: int) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
        return made

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, leave_after: int | None = None) -> Answer:
        """Send a request and wait for the end of its answer.  leave_after: number of pieces after which the client
        disconnects."""
        assert self._transport is not None and self._answer is None
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._buffer.clear()
        self._rest, self._part, self._leave_after = b"", self._head, leave_after
        answer = self._answer = Answer(time.perf_counter())
        self._transport.write(request)
        if leave_after == 0:
            loop.call_later(LEAVE_S, self._leave, answer)
        timer = loop.call_later(PATIENCE_S, self._end, f"no end within {PATIENCE_S:.0f} s")
        await self._over
        timer.cancel()
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._buffer += data
        while self._answer is not None and self._part():
            pass

    def connection_lost(self, error: Exception | None) -> None:
        self._end("" if self._part == self._until_close else "the connection was closed before the end")

    def _leave(self, answer: Answer) -> None:
        if self._answer is answer:
            answer.has_left = True
            self._end("")
            self.close()

    def _end(self, error: str) -> None:
        if self._answer is not None:
            self._answer.error = error
            self._answer = None
            self._over.set_result(None)
            if error or self._is_last:
                self.close()

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._answer.status = int(first.split(" ")[1])
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self._is_last = headers.get("connection", "").lower() == "close"
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self._part = self._chunk
        elif "content-length" in headers:
            self._left, self._part = int(headers["content-length"]), self._sized
        else:
            self._part = self._until_close
        return True

    def _chunk(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(self._buffer[:end].split(b";")[0], 16)
        if len(self._buffer) < end + size + 4:
            return False
        data = bytes(self._buffer[end + 2 : end + 2 + size])
        del self._buffer[: end + size + 4]
        if size:
            self._take(data)
        else:
            self._end("")
        return True

    def _sized(self) -> bool:
        data = bytes(self._buffer[: self._left])
        del self._buffer[: len(data)]
        self._left -= len(data)
        self._take(data)
        if not self._left:
            self._end("")
        return False

    def _until_close(self) -> bool:
        self._take(bytes(self._buffer))
        self._buffer.clear()
        return False

    def _take(self, data: bytes) -> None:
        answer = self._answer
        assert answer is not None
        if not self._is_stream:
            answer.body += data
            return
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        answer.events += [(self._now, event) for event in events]
        if self._leave_after is not None and len(answer.events) >= self._leave_after > 0:
            self._leave(answer)


def request(port: int, path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# ── the expected answer ───────────────────────────────────────────────────────────────────────────────────────────────


def compared(due: Due, read: Read, is_whole: bool) -> str | None:
    """How an answer differs from the expected one: lost, repeated, other (its text), tokens, count, reason; None if it
    does not differ.

    If the client disconnected, only the beginning is compared.
    """
    kind = parted(read.text, due.text, is_whole)
    if kind is not None:
        return kind
    if read.tokens is not None and read.tokens != (due.tokens if is_whole else due.tokens[: len(read.tokens)]):
        return "tokens"
    if is_whole and read.counted not in (None, len(due.tokens)):
        return "count"
    return "reason" if is_whole and read.finish_reason != due.finish_reason else None


def parted(text: str, due: str, is_whole: bool) -> str | None:
    """How a text differs from the expected one: a part of it was lost or repeated, or it is a different text.

    After a lost or repeated part, the text must continue like the expected one to the end.
    """
    if text == due or (not is_whole and due.startswith(text)):
        return None
    at = next((n for n, (one, other) in enumerate(zip(text, due, strict=False)) if one != other), None)
    rest = text[min(len(text), len(due)) if at is None else at :]
    if is_whole:
        return "other" if not due.endswith(rest) else "lost" if len(text) < len(due) else "repeated"
    place = due.find(rest, at)
    return "lost" if place >= 0 else "repeated" if rest in due else "other"


# ── a turn: each client sends its requests one after the other ────────────────────────────────────────────────────────


async def turn(plan: dict[str, Any]) -> dict[str, Any]:
    """Send `requests` ([path, body] each) to the server at `port` from `clients` clients, in order.

    `seconds` is the time from the first token to the last; `cpu` is the share of a core used by the clients.
    """
    port = plan["port"]
    requests = [request(port, path, json.dumps(body).encode()) for path, body in plan["requests"]]
    connections = [await Connection.opened(port) for _ in range(min(plan["clients"], len(requests)))]
    waiting, answers = iter(enumerate(requests)), {}
    began, cpu = time.perf_counter(), time.process_time()

    async def client(connection: Connection) -> None:
        for number, asked in waiting:
            if not connection.is_open:
                connection = await Connection.opened(port)
            answer = await connection.ask(asked)
            if not answer.status:  # llama.cpp's server closes connections after a stream without notice
                connection = await Connection.opened(port)
                answer = await connection.ask(asked)
            answers[number] = answer
        connection.close()

    await asyncio.gather(*map(client, connections))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    rows = [_row(answers[number]) for number in range(len(requests))]
    times = [at for row in rows for at in row.pop("times")]
    return {"seconds": max(times) - min(times) if times else wall, "wall": wall, "cpu": cpu / wall, "rows": rows}


def _row(answer: Answer) -> dict[str, Any]:
    read = answer.read()
    times = read.times or [answer.sent]
    return {
        "status": answer.status, "error": read.error, "text": read.text, "counted": read.counted,
        "finish_reason": read.finish_reason, "first_s": times[0] - answer.sent, "whole_s": times[-1] - answer.sent,
        "gaps_s": [after - before for before, after in pairwise(times)], "times": read.times,
        "body": answer.body[:300].decode(errors="replace"),
    }  # fmt: skip


# ── a soak: clients that connect, disconnect and send invalid requests ────────────────────────────────────────────────


def malformed(port: int, model: str) -> dict[str, bytes]:
    """Requests that a server has to refuse, by name."""
    path, chat = "/v1/completions", "/v1/chat/completions"

    def body(**changes: Any) -> bytes:
        return json.dumps({"model": model, "prompt": "def f(", "max_tokens": 4} | changes).encode()

    def with_messages(messages: Any) -> bytes:
        return json.dumps({"model": model, "messages": messages, "max_tokens": 4}).encode()

    bodies = {
        "no body": b"", "half a body": b'{"prompt": "def f(', "no object": b"[1, 2]", "null": b"null",
        "deep nesting": b"[" * 100_000, "no UTF-8": b'{"prompt": "\xff\xfe"}', "no prompt": b'{"max_tokens": 4}',
        "NaN": b'{"prompt": "x", "temperature": NaN}', "a prompt of another type": body(prompt={"a": 1}),
        "an empty prompt": body(prompt=""), "ids out of the vocabulary": body(prompt=[1, 10**9]),
        "negative ids": body(prompt=[-1]), "a prompt too long": body(prompt="x = 1\n" * 20_000),
        "max_tokens of -1": body(max_tokens=-1), "max_tokens as text": body(max_tokens="many"),
        "a temperature of text": body(temperature="hot"), "top_p of 7": body(top_p=7),
        "an unknown model": body(model="no-such-model"), "n of 0": body(n=0), "n of a billion": body(n=10**9),
        "an empty stop": body(stop=[""]), "1000 stops": body(stop=["x"] * 1000),
        "a bias of no token": body(logit_bias={"x": 1}), "an unknown field": body(max_tokns=4),
    }  # fmt: skip
    image = {"type": "image_url", "image_url": {"url": "file:/etc/hostname"}}
    chats = {
        "messages as text": with_messages("hello"),
        "no messages": with_messages([]),
        "an unknown role": with_messages([{"role": "wizard", "content": "x"}]),
        "an image": with_messages([{"role": "user", "content": [image]}]),
    }
    found = {name: request(port, path, given) for name, given in bodies.items()}
    found |= {name: request(port, chat, given) for name, given in chats.items()}
    found["no HTTP"] = b"HELLO\r\n\r\n"
    found["an unknown path"] = request(port, "/v1/nothing", b"{}")
    found["another method"] = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    return found


@dataclass
class Soak:
    """State shared by the clients of one soak."""

    port: int
    pool: list[Due]
    leaving: float
    """Share of requests whose client disconnects."""
    malformed: float
    """Share of invalid requests."""
    wrong: dict[str, bytes]
    ends: float
    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind of invalid request: the count of each status."""
    failed: list[dict[str, Any]] = field(default_factory=list)
    """Answers with 5xx, and answers that did not end."""
    partings: list[dict[str, Any]] = field(default_factory=list)

    async def client(self, noise: random.Random) -> None:
        connection: Connection | None = None
        while time.perf_counter() < self.ends:
            if connection is None or not connection.is_open:
                connection = await Connection.opened(self.port)
            if noise.random() < self.malformed:
                await self._nonsense(connection, noise.choice(list(self.wrong)))
            else:
                await self._known(connection, noise)
        if connection is not None:
            connection.close()

    async def _nonsense(self, connection: Connection, name: str) -> None:
        answer = await connection.ask(self.wrong[name])
        self.counts["malformed"] += 1
        self.refused.setdefault(name, Counter())[str(answer.status or "closed")] += 1
        if answer.status >= 500:
            self._fail(answer, name)
        if 200 <= answer.status < 300:
            self.counts["malformed, accepted"] += 1

    async def _known(self, connection: Connection, noise: random.Random) -> None:
        number = noise.randrange(len(self.pool))
        due, leave = self.pool[number], None
        if noise.random() < self.leaving:
            leave = noise.randrange(len(due.tokens) + 1)
        answer = await connection.ask(request(self.port, due.path, json.dumps(due.body).encode()), leave)
        read = answer.read()
        self.counts["requests"] += 1
        if answer.has_left:
            self.counts["left"] += 1
        elif answer.status != 200 or read.error:
            return self._fail(answer, read.error)
        else:
            self.counts["whole"] += 1
        self.counts["characters compared"] += len(read.text)
        self.counts["tokens compared"] += len(read.tokens or ())
        kind = compared(due, read, not answer.has_left)
        if kind is not None:
            self.counts["differ"] += 1
            if len(self.partings) < MOST_TOLD:
                said = {"text": read.text, "counted": read.counted, "finish_reason": read.finish_reason}
                self.partings.append({"kind": kind, "due": number, "is_whole": not answer.has_left, **said})
        return None

    def _fail(self, answer: Answer, what: str) -> None:
        self.counts["5xx" if answer.status >= 500 else "failed"] += 1
        if len(self.failed) < MOST_TOLD:
            body = answer.body[:300].decode(errors="replace")
            self.failed.append({"status": answer.status, "what": what, "body": body})


async def soak(plan: dict[str, Any]) -> dict[str, Any]:
    """`clients` clients send requests from `pool` for `seconds` seconds, and finish the answers they have started."""
    port, began, cpu = plan["port"], time.perf_counter(), time.process_time()
    own = Soak(
        port, [Due(*one) for one in plan["pool"]], plan["leaving"], plan["malformed"], malformed(port, plan["model"]),
        began + plan["seconds"],
    )  # fmt: skip
    await asyncio.gather(*(own.client(random.Random(f"{plan['seed']} {n}")) for n in range(plan["clients"])))
    wall = time.perf_counter() - began
    return {
        "wall": wall, "cpu": (time.process_time() - cpu) / wall, "counts": own.counts, "refused": own.refused,
        "failed": own.failed, "partings": own.partings,
    }  # fmt: skip


# ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────────

PLANS = {"turn": turn, "soak": soak}


def lines(given: Sequence[str] | Any) -> Iterator[str]:
    """The result of each plan, as one line of JSON."""
    for line in given:
        plan = json.loads(line)
        yield json.dumps(asyncio.run(PLANS[plan["do"]](plan)))


if __name__ == "__main__":
    for found in lines(sys.stdin):
        print(found, flush=True)
