"""A server with OpenAI's API that does what it is told, good or bad, and keeps a ledger of what it did.

A request asks for trouble in its body, under `trouble`: a list with a wish for each time that it is sent; beyond the
list it is answered.  A wish is one of

    {}                                               the answer
    {"status": 429, "headers": {…}, "code": …, "param": …}      a refusal; `in 1.5 s` in a header is a date
    {"cut": "before"}        the connection is closed without a byte      {"silent": true}    nothing at all
    {"cut": 2}               closed after two pieces, or half of a whole answer
    {"cut": "character"}     closed in the middle of a character of two bytes or more
    {"torn": true}           a stream that ends without its end, half of a whole answer with the length of a half
    {"stall": 2}             nothing more after two pieces         {"empty": true}    status 200 and nothing
    {"wrong": true}          bytes that are not JSON               {"error": 2}       an error after two pieces
    {"slow": true}           the answer in writes of one to three bytes, with other line ends and comments

Equal prompts get equal texts, full of characters of several bytes.  The server charges for everything that it worked
on, whether it arrived or not; refusals are free.
"""

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from email.utils import formatdate
from typing import Any

from outrider.client import Price, Prices

WORDS = ["né ", "日本 ", "😀 ", "plain ", "\\n \n", '"quoted" ', "data: ", "Ω≈ç ", "[DONE] ", "tail\r\n"]
TOKENS_A_PIECE = 2
MODEL = "stub"
PRICES = Prices(date="2026-11-25", currency="USD", models={MODEL: Price(input=Decimal(1), output=Decimal(20))})
"""Of 1,000,000 tokens."""
LINGER_S = 0.02
"""Between the last byte and the end of a connection, so that the byte arrives."""


def pieces_of(prompt: str, max_tokens: int | None) -> list[str]:
    """What is answered to a prompt."""
    mark = hashlib.sha256(prompt.encode()).digest()
    most = 8 if max_tokens is None else max(1, max_tokens // TOKENS_A_PIECE)
    return [f"{WORDS[mark[i] % len(WORDS)]}{i} " for i in range(min(8, most))]


def text_of(prompt: str, max_tokens: int | None = None) -> str:
    return "".join(pieces_of(prompt, max_tokens))


class Ledger:
    """What the server did, by prompt."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        """Attempts whose answer began: a byte of it was sent."""
        self.completed: Counter[str] = Counter()
        self.sent_again: list[str] = []
        """Prompts that came once more after their answer had begun."""
        self.charged = Decimal(0)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self.at_once = 0

    def arrive(self, name: str) -> int:
        """How often this prompt came before."""
        if self.begun[name]:
            self.sent_again.append(name)
        self.attempts[name] += 1
        return self.attempts[name] - 1


class Server(asyncio.Protocol):
    """One connection."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.data = ledger, b""
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for task in self.tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.data += data
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return
        first, *lines = self.data[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(self.data) < end + 4 + length:
            return
        body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
        task = asyncio.ensure_future(self._answer(first.split(" ")[1], headers, body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, path: str, headers: dict[str, str], data: bytes) -> None:
        if path == "/v1/models":
            return self._send(200, json.dumps({"data": [{"id": MODEL}]}).encode())
        ledger, body = self.ledger, json.loads(data)
        ledger.bodies.append(body)
        ledger.headers.append(headers)
        ledger.at_once += 1
        ledger.most_at_once = max(ledger.most_at_once, ledger.at_once)
        try:
            await self._obey(body, is_chat=path.endswith("chat/completions"))
        finally:
            ledger.at_once -= 1

    async def _obey(self, body: dict[str, Any], is_chat: bool) -> None:
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        name = prompt if isinstance(prompt, str) else json.dumps(prompt)
        trouble, before = body.get("trouble") or [], self.ledger.arrive(name)
        wish = trouble[before] if before < len(trouble) else {}
        if "status" in wish:
            error = {name: wish.get(name) for name in ("code", "param")} | {
                "message": f"told to answer {wish['status']}"
            }
            return self._send(wish["status"], json.dumps({"error": error}).encode(), wish.get("headers"))
        pieces = pieces_of(name, body.get("max_completion_tokens") or body.get("max_tokens"))
        usage = {"prompt_tokens": len(name) // 4 + 1, "completion_tokens": TOKENS_A_PIECE * len(pieces)}
        predicted = body.get("prediction")
        if predicted:
            usage["completion_tokens_details"] = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 1500}
        price = PRICES.models[MODEL]
        self.ledger.charged += usage["prompt_tokens"] * price.input / 1_000_000
        self.ledger.charged += usage["completion_tokens"] * price.output / 1_000_000
        if wish.get("cut") == "before":
            return self.transport.close()
        if wish.get("silent"):
            await asyncio.sleep(60)
        elif body.get("stream"):
            await self._stream(name, pieces, usage, wish, is_chat)
        else:
            await self._whole(name, pieces, usage, wish, is_chat)
        return None

    async def _whole(self, name: str, pieces: list[str], usage: Any, wish: dict[str, Any], is_chat: bool) -> None:
        part = {"message": {"role": "assistant", "content": "".join(pieces)}} if is_chat else {"text": "".join(pieces)}
        choice = {"index": 0, "finish_reason": "stop", **part}
        answer = {"id": "answer", "model": MODEL, "choices": [choice], "usage": usage}
        data = json.dumps(answer, ensure_ascii=False).encode()
        length = len(data)
        self.ledger.begun[name] += 1
        if wish.get("error") is not None:
            return self._send(200, b'{"error": {"message": "the engine died"}}')
        if wish.get("wrong") or wish.get("empty"):
            return self._send(200, b"<html>\xff" if wish.get("wrong") else b"")
        if wish.get("torn"):
            return self._send(200, data[: length // 2])
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()
        if {"cut", "stall"} & wish.keys():
            self.transport.write(head + data[: length // 2])
            await asyncio.sleep(60 if "stall" in wish else LINGER_S)
            return self.transport.abort()
        if wish.get("slow"):
            for at in range(0, len(head + data), 40):
                await asyncio.sleep(0.001)
                self.transport.write((head + data)[at : at + 40])
        else:
            self.transport.write(head + data)
        self.ledger.completed[name] += 1
        return None

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        more = "".join(f"{name}: {_dated(value)}\r\n" for name, value in (headers or {}).items())
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        self.transport.write(head.encode() + body)

    async def _stream(self, name: str, pieces: list[str], usage: Any, wish: dict[str, Any], is_chat: bool) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self.ledger.begun[name] += 1
        if wish.get("empty"):
            self.transport.write(b"0\r\n\r\n")
            return None
        for place, piece in enumerate(pieces):
            if place in (wish.get("cut"), wish.get("stall"), wish.get("error")) or (wish.get("wrong") and place == 1):
                return await self._end_badly(wish)
            part = {"delta": {"content": piece}} if is_chat else {"text": piece}
            reason = "stop" if place == len(pieces) - 1 and not wish.get("torn") else None
            event = {"model": MODEL, "choices": [{"index": 0, "finish_reason": reason, **part}]}
            data = json.dumps(event, ensure_ascii=False).encode()
            if wish.get("cut") == "character" and (at := _in_a_character(data)):
                self._chunk(b"data: " + data[:at])
                return await self._end_badly(wish)
            await self._event(data, bool(wish.get("slow")), place)
        if not wish.get("torn"):
            last = json.dumps({"model": MODEL, "choices": [], "usage": usage}).encode()
            await self._event(last, bool(wish.get("slow")), 0)
            await self._event(b"[DONE]", bool(wish.get("slow")), 1)
            self.ledger.completed[name] += 1
        self.transport.write(b"0\r\n\r\n")
        return None

    async def _end_badly(self, wish: dict[str, Any]) -> None:
        if "error" in wish or "wrong" in wish:
            data = b"oh" if "wrong" in wish else b'{"error": {"message": "died"}}'
            self._chunk(b"event: error\ndata: " + data + b"\n\n")
            self.transport.write(b"0\r\n\r\n")
            return
        await asyncio.sleep(60 if "stall" in wish else LINGER_S)
        self.transport.abort()

    async def _event(self, data: bytes, is_slow: bool, place: int) -> None:
        if not is_slow:
            self._chunk(b"data: " + data + b"\n\n")
            return
        end = (b"\n", b"\r\n", b"\r")[place % 3]
        whole = b": a comment" + end + b"id: 7" + end + b"event: message" + end + b"data:" + data + end + end
        for at in range(0, len(whole), 1 + place % 3):
            part = whole[at : at + 1 + place % 3]
            self._chunk(part)
            if part[-1] & 0x80:  # a character that may go on
                await asyncio.sleep(0.001)

    def _chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))


def _dated(value: str) -> str:
    """`in 1.5 s` as a date."""
    return formatdate(time.time() + float(value.split()[1]), usegmt=True) if value.startswith("in ") else value


def _in_a_character(data: bytes) -> int:
    """A place inside a character of several bytes; 0 where there is none."""
    return next((at for at in range(1, len(data)) if data[at] & 0xC0 == 0x80), 0)


@contextmanager
def running() -> Iterator[tuple[str, Ledger]]:
    """The server in a thread, on a free port: its URL and its ledger."""
    ledger, loop = Ledger(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await loop.create_server(lambda: Server(ledger), "127.0.0.1", 0, backlog=1024)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ledger
    finally:
        loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(_cancelled(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancelled() -> None:
    """All that still hangs has ended."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
