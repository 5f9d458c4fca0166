"""Serve: the demo target with n-gram drafts behind OpenAI's API, and a text streamed from it, with and without drafts.

$ python examples/serve.py

OpenAI's client works too: `OpenAI(base_url=f"{url}/v1", api_key="none")`, our own fields in `extra_body`.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

SERVE = [sys.executable, "-m", "outrider", "serve", "--target", "demo", "--drafter", "ngram", "--policy", "fixed"]


def url_of(server: subprocess.Popen[str]) -> str:
    """Where the server listens, once it does."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="")
        if found := re.search(r"server +(http\S+),", line):
            return found[1]
    raise SystemExit("the server ended")


def events(url: str, **asked: Any) -> Iterator[dict[str, Any]]:
    """What a completion is streamed as."""
    body = {"prompt": "def read(path):\n", "max_tokens": 64, "temperature": 0, "stream": True, "include_drafts": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | asked, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def main() -> None:
    with subprocess.Popen([*SERVE, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = url_of(server)
            texts = {}
            for name, speculative in (("with drafts, [drafted] tokens in brackets", True), ("decoded plainly", False)):
                print(f"\n{name}:")
                began, texts[name] = time.perf_counter(), ""
                for event in events(url, speculative=speculative):
                    for text, is_drafted in event["outrider"]["pieces"]:
                        texts[name] += text
                        print(f"[{text}]" if is_drafted else text, end="", flush=True)
                print(f"\n{event['outrider']['steps']} steps, {time.perf_counter() - began:.1f} s")
            assert len(set(texts.values())) == 1, "drafts change no text"
            print("\nthe same text")
        finally:
            server.terminate()  # it answers what it has begun, and ends


if __name__ == "__main__":
    main()
