"""A server that scores its prompts as vLLM does, by a target that is here; test_remote.py has a real answer."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from outrider.targets.transformers import TransformersTarget


@contextmanager
def scoring(local: TransformersTarget) -> Iterator[str]:
    """Its address, with /v1."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock, torch.inference_mode():
                hidden, _ = local.read(torch.tensor([asked["prompt"]]), ())
                scores = local.head(hidden)[0].double().log_softmax(-1)
            data = json.dumps(self.answer(asked, scores)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answer(self, asked: dict[str, Any], scores: Tensor) -> dict[str, Any]:
            k = scores.shape[-1] if asked["prompt_logprobs"] == -1 else asked["prompt_logprobs"]
            ids = scores.topk(k).indices.tolist()
            prompt = [
                {str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": ""} for i in (token, *best)}
                for row, best, token in zip(scores, ids, asked["prompt"][1:], strict=False)
            ]
            last = {f"token_id:{i}": float(scores[-1, i]) for i in ids[-1]}
            token = int(scores[-1].argmax())
            choice = {
                "index": 0, "text": "", "token_ids": [token], "prompt_logprobs": [None, *prompt],
                "finish_reason": "stop" if token in local.ends else "length",
                "logprobs": {"top_logprobs": [last]},
            }  # fmt: skip
            usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 1, "total_tokens": 1}
            return {"id": "x", "object": "text_completion", "model": "tiny", "choices": [choice], "usage": usage}

        def log_message(self, format: str, *args: Any) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
