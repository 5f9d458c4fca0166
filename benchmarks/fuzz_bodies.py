"""Damaged request bodies for a server in a separate process; for `fuzz.py`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))  # the tiny target, and a server of it
# ruff: noqa: E402

from serve.running import running
from tiny import make_folder

from benchmarks.mutations import damaged
from outrider.targets.load import load_target

STALL_S = 0.05
"""Maximum time for which the event loop may block."""
WAIT_S = 60.0
"""Seconds for an answer."""
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
FIELDS = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": FIELDS}}}
CHAT = [
    {"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "3"}, {"role": "user", "content": "so?", "name": "ann"},
]  # fmt: skip
COMMON = {
    "model": "tiny", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2,
    "stop": ["x", "yz"], "stream": False, "logit_bias": {"5": 1.5}, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "min_tokens": 1, "timeout": 20, "user": "u", "metadata": {"a": "b"}, "store": False,
    "include_drafts": True, "return_token_ids": True, "speculative": {"depth": 2}, "parse_special": False,
    "prediction": {"type": "content", "content": "abc"}, "stream_options": {"include_usage": True},
}  # fmt: skip
TALK = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "3"},
    {"type": "message", "role": "user", "content": "so?"},
]  # fmt: skip
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "ab", "max_tokens": 2}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "logprobs": 2, **COMMON}),
    ("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 2, "stream": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 6, "response_format": SCHEMA}),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "logprobs": True, "top_logprobs": 2, **COMMON}),
    ("/v1/chat/completions", {"messages": CHAT[:2], "max_completion_tokens": 3, "stream": True, "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": CHAT[-1:], "max_tokens": 6, "response_format": {"type": "json_object"}}),
    ("/v1/responses", {"input": "ab", "instructions": "be", "max_output_tokens": 3, "store": True, "top_logprobs": 1}),
    ("/v1/responses", {"input": TALK, "tools": [{"type": "function", "name": "f", "parameters": {}}], "stream": True,
                       "max_output_tokens": 3, "include": ["message.output_text.logprobs"], "tool_choice": "none"}),
    ("/v1/responses", {"input": "ab", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 6, "seed": 1}),
    ("/v1/embeddings", {"input": "ab"}),
    ("/tokenize", {"prompt": "ab cd", "add_special_tokens": True}),
    ("/tokenize", {"messages": CHAT, "tools": [TOOL], "chat_template_kwargs": {"a": True}}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)  # fmt: skip


def fuzz_bodies(name: str, cases: range, options: argparse.Namespace, out: Connection) -> None:
    """Sends a damaged body for each case, half of them on a reused connection."""
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    with served() as (port, calls):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        for number in cases:
            if time.monotonic() > until:
                break
            out.send(("case", number))
            draw = random.Random(f"{options.seed} {name} {number}")
            path, body = draw.choice(BODIES)
            try:
                status = answer(connection, path, damaged(json.dumps(body).encode(), draw), draw)
            except (OSError, http.client.HTTPException) as error:
                out.send(("failure", f"{path}: {type(error).__name__}: {error}"))
                connection.close()
                continue
            out.send(("outcome", str(status)))
            if status >= 500:
                out.send(("failure", f"{path}: {status}"))
            if number % 100 == 99:
                stalls(calls, out)
        connection.close()
        stalls(calls, out)
        calls.send("end")
        in_use, errors = calls.recv()
        if in_use or errors:
            out.send(("failure", f"in the end {in_use} requests run or wait, and the log has {errors}"))


def stalls(calls: Connection, out: Connection) -> None:
    """Report how long the loop blocked in the last cases."""
    calls.send("stalls")
    wall_s, cpu_s, at, memory_mib = calls.recv()
    out.send(("memory_mib", memory_mib))
    if cpu_s > STALL_S:
        out.send(("failure", f"in the last 100 cases: the loop worked for {1000 * cpu_s:.0f} ms at once, at {at}"))
    out.send(("longest_stall_ms", round(1000 * wall_s)))
    out.send(("longest_stall_of_own_work_ms", round(1000 * cpu_s)))


def answer(connection: http.client.HTTPConnection, path: str, body: bytes, draw: random.Random) -> int:
    """The status of an answer that was read to the end."""
    if draw.random() < 0.5:
        connection.close()
    kind = "application/json" if draw.random() < 0.98 else draw.choice(("", "text/plain", "application/json;charset=x"))
    connection.request("POST", path, body, {"Content-Type": kind})
    response = connection.getresponse()
    response.read()
    return response.status


# ── the server's process ──────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def served() -> Iterator[tuple[int, Connection]]:
    """A server of the tiny target in a separate process: its port, and a pipe to query its stalls."""
    fork = multiprocessing.get_context("fork")
    calls, its = fork.Pipe()
    process = fork.Process(target=serve, args=(its,), daemon=True)
    process.start()
    try:
        yield calls.recv(), calls
    finally:
        process.join(20)
        process.kill()


def serve(calls: Connection) -> None:
    class Errors(logging.Handler):
        count = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.count += record.exc_info is not None

    errors = Errors()
    logging.getLogger().addHandler(errors)
    with tempfile.TemporaryDirectory() as place:
        target = load_target(make_folder(Path(place) / "tiny"), compile=False)
        with running(target, slots=4, length=96, n=4, texts=8, prefix_bytes=1 << 20) as server:
            beat = Beat()
            asyncio.run_coroutine_threadsafe(beat.run(), server.service_loop)
            calls.send(int(server.url.rpartition(":")[2]))
            while calls.recv() != "end":
                calls.send((beat.wall_s, beat.cpu_s, beat.at, resident_mib()))
                beat.wall_s = beat.cpu_s = 0.0
            server.settled(lambda: not server.service.jobs and not server.admission.num_active)
            calls.send((len(server.service.jobs) + server.admission.num_active, errors.count))


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


class Beat:
    """The longest times between two steps of an event loop: by the clock, and of its thread's own work."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = self.at = 0.0

    async def run(self) -> None:
        wall, cpu = time.monotonic(), time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now, used = time.monotonic(), time.thread_time()
            self.wall_s = max(self.wall_s, now - wall)
            if used - cpu > self.cpu_s:
                self.cpu_s, self.at = used - cpu, time.time()
            wall, cpu = now, used
