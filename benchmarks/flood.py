"""64 honest clients with four keys, with and without one hostile key that does its worst.

    python benchmarks/flood.py [--target demo] [--minutes 10] [--turn 20] [--clients 64] [--slots 16] [--seed 0]
                               [--out FILE]

A server with keys runs throughout, and so do the honest clients, each with a short prompt, a stream of a few tokens and
a pause.  Turns with and without the hostile clients alternate.  The hostile ones have one key and send from the same
address: requests for as many texts as the server allows; bodies of 4 MB that are parsed, rendered or encoded for as
long as possible; endless heads, half-sent heads, idle sockets; and they leave answers unread.

Goals, for turns with them relative to turns without: p99 of the time to first token at most 1.5 times, resident memory
at most 1.3 times, and no errors for honest clients.  Prints JSON; exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.batch_time import promise
from benchmarks.replay import provenance, publish
from benchmarks.serving_turns import at_most
from outrider.serve.http import keys

KEYS = ("ann", "bob", "cleo", "dan")
BODY_BYTES = (4 << 20) - 400
MARGIN_S = 2.0
"""Seconds at the beginning of a turn that are not counted, since they contain the end of the previous one."""
HOSTILE = 24
"""Number of threads of the hostile client."""


@dataclass
class Turns:
    """What the honest clients saw; index 1 with the hostile ones."""

    first_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    errors: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    bytes: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    hostile: int = 0
    began: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--minutes", type=float, default=10, help="of turns with the hostile clients")
    parser.add_argument("--turn", type=float, default=20, help="seconds of a turn")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        secrets = {name: keys.add(Path(folder) / "keys.json", name) for name in (*KEYS, "mallory")}
        process, port = start(options, Path(folder))
        try:
            turns = asyncio.run(measured(options, process.pid, port, secrets))
            alive = process.poll() is None
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
    result = figures(turns, alive)
    publish({"provenance": provenance(time.perf_counter() - began)} | result, options.out)
    sys.exit(not all(one["holds"] for one in result["promises"]))


def start(options: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """`outrider serve` with the keys, and its port."""
    command = [
        sys.executable, "-m", "outrider", "serve", "--target", options.target, "--port", "0", "--keys",
        str(folder / "keys.json"), "--slots", str(options.slots), "--length", "512",
    ]  # fmt: skip
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return process, int(line.split("http://127.0.0.1:")[1].split(",")[0])
    raise SystemExit(f"no server: {(folder / 'server.log').read_text()[-2000:]}")


# ── honest clients ────────────────────────────────────────────────────────────────────────────────────────────────────


async def measured(options: argparse.Namespace, pid: int, port: int, secrets: dict[str, str]) -> Turns:
    turns, draw = Turns(), random.Random(options.seed)
    fork = multiprocessing.get_context("fork")
    attacks, over = fork.Event(), fork.Event()
    hostile = fork.Process(target=flood, args=(port, secrets["mallory"], attacks, over, options.seed), daemon=True)
    hostile.start()
    clients = [
        asyncio.create_task(honest(port, secrets[KEYS[n % len(KEYS)]], turns, random.Random(draw.random())))
        for n in range(options.clients)
    ]
    rounds = max(1, round(60 * options.minutes / options.turn))
    for number in range(2 * rounds):
        turns.hostile, turns.began = number % 2, time.monotonic()
        (attacks.set if turns.hostile else attacks.clear)()
        while time.monotonic() < turns.began + options.turn:
            await asyncio.sleep(0.2)
            turns.bytes[turns.hostile].append(resident(pid))
        counts = [len(times) for times in turns.first_s]
        print(f"turn {number + 1} of {2 * rounds}: {counts} answers, {turns.errors}", file=sys.stderr, flush=True)
    over.set()
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    hostile.kill()
    return turns


async def honest(port: int, key: str, turns: Turns, draw: random.Random) -> None:
    """One request after another, with pauses."""
    while True:
        await asyncio.sleep(draw.uniform(0.2, 2.0))
        hostile, counts = turns.hostile, time.monotonic() > turns.began + MARGIN_S
        body = {"prompt": f"import {draw.randrange(1000)}", "max_tokens": 8, "ignore_eos": True, "stream": True}
        try:
            first_s, problem = await asyncio.wait_for(ask(port, key, body), 120)
        except (TimeoutError, OSError, EOFError) as error:
            first_s, problem = None, type(error).__name__
        if problem:
            turns.errors[hostile][problem] += 1
        elif first_s is not None and counts and hostile == turns.hostile:
            turns.first_s[hostile].append(first_s)


async def ask(port: int, key: str, body: dict[str, Any]) -> tuple[float | None, str]:
    """Seconds to the first token, and what went wrong."""
    began, first_s, received = time.monotonic(), None, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(request("/v1/completions", key, json.dumps(body).encode()))
        while part := await reader.read(65536):
            received += part
            if first_s is None and b"data: " in received:
                first_s = time.monotonic() - began
    status = received[9:12].decode() or "no answer"
    return first_s, "" if status == "200" and b"[DONE]" in received else f"{status}, incomplete"[
        : 99 if received else 9
    ]


def request(path: str, key: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ── hostile clients ───────────────────────────────────────────────────────────────────────────────────────────────────


def many(before: str, item: str, after: str) -> bytes:
    return f"{before}{','.join([item] * (BODY_BYTES // (len(item) + 1)))}{after}".encode()


def flood(port: int, key: str, attacks: Event, over: Event, seed: int) -> None:
    """Threads that attack while `attacks` is set, in a separate process."""
    texts = {"prompt": ["a"] * 4, "n": 16, "max_tokens": 400, "ignore_eos": True}
    message = '{"role":"user","content":"a"}'
    bodies: list[tuple[str, bytes]] = [
        ("/v1/completions", json.dumps(texts).encode()),
        ("/v1/completions", json.dumps(texts | {"logprobs": 20, "n": 4}).encode()),
        ("/v1/completions", many('{"prompt":[', "[]", "]}")),
        ("/v1/completions", many('{"prompt":[', "1", "]}")),
        ("/v1/chat/completions", many('{"messages":[', message, "]}")),
        ("/v1/chat/completions", json.dumps({"messages": [json.loads(message)] * 4000, "max_tokens": 1}).encode()),
        ("/v1/completions", json.dumps({"prompt": "a b " * (BODY_BYTES // 4)}).encode()),
        ("/tokenize", json.dumps({"prompt": "\u00e9<|" * (BODY_BYTES // 12)}).encode()),
        ("/detokenize", many('{"tokens":[', "5", "]}")),
    ]
    acts: list[Callable[[socket.socket], None]] = [
        *(lambda sock, one=one: exchange(sock, request(one[0], key, one[1])) for one in bodies),
        lambda sock: exchange(sock, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 200_000),
        lambda sock: hold(sock, b"GET /v1/models HTTP/1.1\r\nhost"),
        lambda sock: hold(sock, request("/v1/completions", key, bodies[0][1])[:-5]),
        lambda sock: hold(sock, request("/v1/completions", key, json.dumps(texts | {"stream": True}).encode())),
    ]
    draws = [random.Random(f"{seed} {n}") for n in range(HOSTILE)]

    def work(draw: random.Random) -> None:
        while not over.is_set():
            attacks.wait(1)
            if attacks.is_set():
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
                    draw.choice(acts)(sock)

    def hold(sock: socket.socket, data: bytes) -> None:
        """Send a part and keep the connection open, along with sockets that send nothing."""
        sock.sendall(data)
        with contextlib.ExitStack() as others:
            for _ in range(20):
                others.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            time.sleep(3)

    threads = [threading.Thread(target=work, args=(draw,), daemon=True) for draw in draws]
    for thread in threads:
        thread.start()
    over.wait()


def exchange(sock: socket.socket, data: bytes) -> None:
    """Send all of it and read the answer."""
    sock.sendall(data)
    while sock.recv(65536):
        pass


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def figures(turns: Turns, alive: bool) -> dict[str, Any]:
    quiet, hostile = (
        [float(np.quantile(times, q)) for q in (0.5, 0.99)] if times else [0, 0] for times in turns.first_s
    )
    memory = [max(sizes) / 2**20 for sizes in turns.bytes]
    errors = [dict(counts) for counts in turns.errors]
    rows = {
        "answers": [len(times) for times in turns.first_s], "first_s_p50": [quiet[0], hostile[0]],
        "first_s_p99": [quiet[1], hostile[1]], "memory_mib": memory, "errors": errors,
    }  # fmt: skip
    return {
        "turns": ["without", "with"], **rows,
        "promises": [
            promise("the server runs", 1, int(alive)),
            at_most("honest errors", 0, sum(sum(counts.values()) for counts in turns.errors)),
            at_most("p99 of the first token, over that without", 1.5, hostile[1] / max(quiet[1], 1e-9)),
            at_most("resident memory, over that without", 1.3, memory[1] / memory[0]),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
