"""A server that speculates as if: its steps last as long as a distribution says, and it answers as OpenAI's API does.

    python tests/engines/stub_engine.py --port 8000 --tokens 4 [--knee 8] [--step-ms 4] [--kept 0.75]

One loop steps all requests together.  A step of n requests that draft K tokens lasts step · max(1, n (K + 1) / knee)
and writes (1 - kept^(K+1)) / (1 - kept) tokens for each: below the knee it waits for memory, above it computes.
"""

import argparse
import asyncio
import json
from typing import Any


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.per_step = sum(options.kept**depth for depth in range(options.tokens + 1))
        self.running: dict[asyncio.Queue[int], list[float]] = {}
        """Where each request's tokens go: [wanted, written]."""

    async def go(self) -> None:
        while True:
            positions = len(self.running) * (self.options.tokens + 1)
            await asyncio.sleep(self.options.step_ms / 1000 * max(1.0, positions / self.options.knee))
            for queue, state in list(self.running.items()):
                before = int(state[1])
                state[1] = min(state[0], state[1] + self.per_step)
                queue.put_nowait(int(state[1]) - before)
                if state[1] >= state[0]:
                    del self.running[queue]
                    queue.put_nowait(-1)

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        wanted = int(body.get("max_tokens", 16))
        queue: asyncio.Queue[int] = asyncio.Queue()
        self.running[queue] = [float(wanted), 0.0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        while (count := await queue.get()) >= 0:
            if count:
                event = {"choices": [{"index": 0, "delta": {"content": "word " * count}}]}
                writer.write(f"data: {json.dumps(event)}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": wanted, "prompt_tokens": 1}}
        writer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            if head.startswith("POST"):
                await self.answer(body, writer)
            else:
                known = {"/health": b"{}", "/v1/models": b'{"data": [{"id": "stub"}]}'}
                text = known.get(head.split()[1])
                status = b"404 Not Found" if text is None else b"200 OK"
                writer.write(
                    b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text or b"")
                )
                writer.write(text or b"")
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--knee", type=float, default=8)
    parser.add_argument("--step-ms", type=float, default=4)
    parser.add_argument("--kept", type=float, default=0.75)
    engine = Engine(parser.parse_args())
    server = await asyncio.start_server(engine.connection, "127.0.0.1", engine.options.port)
    print("ready", flush=True)
    async with server:
        await engine.go()


if __name__ == "__main__":
    asyncio.run(main())
