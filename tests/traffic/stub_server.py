"""An OpenAI-compatible server whose text is a function of the prompt: for replays that measure the replay itself.

    python tests/traffic/stub_server.py [--port 0] [--pieces 8] [--first-ms 5] [--gap-ms 5] [--slower 1] [--other]

It prints its port on the first line.  The answer is `pieces` pieces of two tokens each, with counts as if one of three
drafted tokens were accepted per step; counters at /metrics (vLLM's names), the same figures on each answer's last
event.  With --remember, GET /received returns {X-Request-Id: time on the machine's monotonic clock}. A request may ask
for trouble in its body, under `stub`:

    {"status": 429, "times": 2, "retry_after": 0.1}   this status the first two times (by prompt), then the answer
    {"hang": true}       nothing at all          {"stall": 3}      nothing after 3 pieces
    {"cut": 3}           the connection is closed after 3 pieces        {"error": 3}   an error in the stream after 3
    {"bytes": 1}         the answer in writes of one byte               {"pieces": 1}  another number of pieces
    {"whole": true}      no stream: JSON at once                        {"silent": true}   no count of tokens
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from collections import Counter
from typing import Any

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
]
DRAFTED, KEPT = 3, 1


class Stub:
    """State shared by all connections."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.seen: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.received: dict[str, float] = {}
        self.started = time.time()

    def pieces(self, body: dict[str, Any]) -> list[str]:
        """The answer to a prompt: equal prompts get equal answers, except with --other."""
        said = json.dumps(body.get("messages", body.get("prompt")))
        digest = hashlib.sha256(said.encode()).digest()
        count = (body.get("stub") or {}).get("pieces", self.options.pieces)
        pieces = [f"{WORDS[digest[place % 32] % len(WORDS)]} {place} " for place in range(count)]
        if self.options.other and count > 2:
            pieces[2] = "other " + pieces[2]
        return pieces

    def metrics(self) -> str:
        name = "vllm:spec_decode_num_"
        drafts, gaps = self.counts["drafts"], "vllm:inter_token_latency_seconds"
        rows = [
            (f"{name}drafts_total", drafts), (f"{name}draft_tokens_total", drafts * DRAFTED),
            (f"{name}accepted_tokens_total", drafts * KEPT),
            (f'{name}accepted_tokens_per_pos_total{{position="0"}}', drafts * KEPT),
            ("vllm:generation_tokens_total", self.counts["tokens"]), (f"{gaps}_count", drafts),
            ("vllm:time_to_first_token_seconds_count", self.counts["calls"]), ("process_start_time_seconds",
            self.started),
        ]  # fmt: skip
        return "# TYPE vllm:generation_tokens counter\n" + "".join(f"{row} {count}\n" for row, count in rows)


class Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self.stub, self.data = stub, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            first, *lines = self.data[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", 0))
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            task = asyncio.ensure_future(self.answer(first.split(" ")[1], headers, body))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def answer(self, path: str, headers: dict[str, str], data: bytes) -> None:
        stub = self.stub
        if path == "/v1/models":
            return self.whole(200, {"data": [{"id": stub.options.model}]})
        if path == "/metrics":
            return self.text(200, stub.metrics().encode(), "text/plain")
        if path == "/received":
            return self.whole(200, stub.received)
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return self.whole(404, {"error": {"message": f"no {path}"}})
        if stub.options.remember:
            stub.received[headers.get("x-request-id", "")] = time.monotonic()
        body = json.loads(data)
        wish = body.get("stub") or {}
        who = json.dumps(body.get("messages", body.get("prompt")))
        if wish:
            stub.seen[who] += 1
        if "status" in wish and stub.seen[who] <= wish.get("times", 10**9):
            again = [f"Retry-After: {wish['retry_after']}"] if "retry_after" in wish else []
            return self.whole(wish["status"], {"error": {"message": f"told to answer {wish['status']}"}}, again)
        if body.get("model") != stub.options.model:
            return self.whole(404, {"error": {"message": f"no model {body.get('model')}"}})
        if wish.get("hang"):
            return None
        return await self.stream(body, wish, is_chat="messages" in body)

    async def stream(self, body: dict[str, Any], wish: dict[str, Any], is_chat: bool) -> None:
        stub, pieces = self.stub, self.stub.pieces(body)
        tokens = 2 * len(pieces)
        steps = max(1, len(pieces) - 1)
        stub.counts.update(calls=1, drafts=steps, tokens=tokens)
        counts = {
            "num_spec_steps": steps,
            "num_draft_tokens": steps * DRAFTED,
            "num_accepted_draft_tokens": steps * KEPT,
        }
        usage = {"prompt_tokens": 1, "completion_tokens": tokens}
        last: dict[str, Any] = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": counts}}
        if wish.get("silent"):
            last = {"choices": []}
        if wish.get("whole"):
            await asyncio.sleep(0.01)
            message = {"message": {"content": "".join(pieces)}} if is_chat else {"text": "".join(pieces)}
            return self.whole(200, last | {"choices": [{"index": 0, "finish_reason": "stop"} | message]})
        size = wish.get("bytes")
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        await asyncio.sleep(stub.options.first_ms * stub.options.slower / 1000)
        for place, piece in enumerate(pieces):
            if wish.get("cut") == place:
                return self.transport.abort()
            if wish.get("stall") == place:
                return None
            if wish.get("error") == place:
                await self.send(b'data: {"error": {"message": "the engine died", "code": 500}}\n\n', size)
                return self.transport.write(b"0\r\n\r\n")
            part = {"delta": {"content": piece}} if is_chat else {"text": piece}
            finish = "stop" if place == len(pieces) - 1 else None
            event = {"model": stub.options.model, "choices": [{"index": 0, "finish_reason": finish} | part]}
            await self.send(b"data: " + json.dumps(event).encode() + b"\n\n", size)
            if place + 1 < len(pieces):
                await asyncio.sleep(stub.options.gap_ms * stub.options.slower / 1000)
        await self.send(b": a comment\n\ndata: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n", size)
        return self.transport.write(b"0\r\n\r\n")

    async def send(self, event: bytes, size: int | None) -> None:
        """Send an event as one chunk; or, if `size` is given, in writes of `size` bytes with arbitrary chunk
        boundaries."""
        if size is None:
            self.transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            return
        for start in range(0, len(event), 7):
            part = event[start : start + 7]
            framed = b"%x\r\n%s\r\n" % (len(part), part)
            for at in range(0, len(framed), size):
                self.transport.write(framed[at : at + size])
                await asyncio.sleep(0)

    def whole(self, status: int, value: Any, more: list[str] | None = None) -> None:
        self.text(status, json.dumps(value).encode(), "application/json", more)

    def text(self, status: int, body: bytes, kind: str, more: list[str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *(more or [])]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="stub")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--first-ms", type=float, default=5.0)
    parser.add_argument("--gap-ms", type=float, default=5.0)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--other", action="store_true", help="a text that differs from what it else says")
    parser.add_argument("--remember", action="store_true", help="when each call came, for /received")
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace) -> None:
    stub = Stub(options)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(stub), "127.0.0.1", options.port, backlog=1024, reuse_address=True
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(options_of()))
