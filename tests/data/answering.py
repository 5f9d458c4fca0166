"""A server with OpenAI's completions over the tiny target, in a thread: as good as asked, or as bad."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outrider import generate
from outrider.data.rendering import prompt_tokens
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

Trouble = Callable[[int], str | None]
"""The number of a request of text, from 0 on, to what happens to it: a status such as `500`, cut, nonsense, wrong ids,
aborted, empty; None for an answer."""


class Stub(ThreadingHTTPServer):
    """Counts what it was asked and what it answered, by prompt."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, target: TransformersTarget, *, model: str = "tiny", ids: str | None = "return_token_ids",
        trouble: Trouble = lambda number: None, port: int = 0, ends: bool = False, calls: bool = False,
    ):  # fmt: skip
        """ids: the field that asks for token ids; None for a server that gives none.  ends: says of some answers that
        they ended by themselves.  calls: takes every text for a call of a tool."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.target, self.model, self.ids, self.trouble, self.ends = target, model, ids, trouble, ends
        self.calls = calls
        self.lock, self.number = threading.Lock(), 0
        self.asked, self.answered = Counter[str](), Counter[str]()
        self.bodies: list[dict[str, Any]] = []
        self._connections: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def start(self) -> Stub:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def die(self) -> None:
        """End at once, with all connections; the port is free."""
        self.shutdown()
        self.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        found = super().get_request()
        self._connections.append(found[0])
        return found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        stub = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "messages" in body:
            body["prompt"] = prompt_tokens(stub.target.tokenizer, body["messages"], tools=body.get("tools", ()))
        name = json.dumps(body["prompt"])
        with stub.lock:
            stub.bodies.append(body)
            is_probe = body["max_tokens"] == 1
            number, trouble = stub.number, None if is_probe else stub.trouble(stub.number)
            stub.number += not is_probe
            stub.asked[name] += not is_probe
            answer = self._answer(body)
            stub.answered[name] += not is_probe and trouble is None
        self._obey(trouble, answer, number)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        stub = self.server
        sampling = Sampling(body["temperature"], max(body["top_k"], 0), body["top_p"], body["seed"])
        (found,) = generate(stub.target, [body["prompt"]], max_new_tokens=body["max_tokens"], sampling=sampling)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop" if stub.ends and len(body["prompt"]) == 6 else found.finish_reason,
        }
        choice |= {"message": {"content": found.text}} if "messages" in body else {"text": found.text}
        if stub.calls:
            choice |= {"message": {"content": None, "tool_calls": [{"function": {"name": found.text}}]}}
            choice["finish_reason"] = "tool_calls"
        if stub.ids == "logprobs" and body.get("logprobs"):
            choice["logprobs"] = {"content": [{"id": token, "logprob": -1.0} for token in found.tokens]}
        elif stub.ids and body.get(stub.ids):
            choice["token_ids"] = found.tokens
        return {"object": "text_completion", "model": stub.model, "choices": [choice]}

    def _obey(self, trouble: str | None, answer: dict[str, Any], number: int) -> None:
        choice = answer["choices"][0]
        if trouble is None:
            self._send(200, answer)
        elif trouble.isdigit():
            self._send(int(trouble), {"error": {"message": f"told to fail, request {number}"}})
        elif trouble == "cut":
            data = json.dumps(answer).encode()
            self._head(200, len(data))
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif trouble == "nonsense":
            self._send(200, "pong")
        elif trouble == "wrong ids":
            choice["token_ids"] = [10**6]
            self._send(200, answer)
        elif trouble == "aborted":
            choice["finish_reason"] = "abort"
            self._send(200, answer)

    def _send(self, status: int, found: Any) -> None:
        data = json.dumps(found).encode()
        self._head(status, len(data))
        self.wfile.write(data)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(length))
        self.end_headers()


@contextmanager
def serving(target: TransformersTarget, **settings: Any) -> Iterator[Stub]:
    stub = Stub(target, **settings).start()
    try:
        yield stub
    finally:
        stub.die()
