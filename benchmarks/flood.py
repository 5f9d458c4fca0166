"""64 honest clients with four keys, with and without one hostile key that does its worst.

    python benchmarks/flood.py [--target demo] [--minutes 10] [--turn 60] [--clients 64] [--slots 16] [--seed 0]
                               [--acts NAME,…] [--out FILE]

A server with keys runs throughout.  Turns with and without the hostile clients alternate; in each, the honest clients
send short prompts and read streams of a few tokens, with pauses.  A turn ends when all of their requests have ended,
and the next one begins when the server is idle again.  The hostile clients have one key and send from the same address:
requests for as many texts as the server allows; bodies of 4 MB that are parsed, rendered or encoded for as long as
possible; endless heads, half-sent heads, idle sockets; and they leave answers unread.  --acts chooses among these.

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
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.batch_time import promise
from benchmarks.replay import provenance, publish
from benchmarks.serving_turns import at_most
from outrider.serve.http import keys

KEYS = ("ann", "bob", "cleo", "dan")
BODY_BYTES = (4 << 20) - 400
MARGIN_S = 3.0
"""Seconds at the beginning of a turn that are not counted: the load of all clients is not yet there."""
IDLE_S = 120.0
"""How long the requests of hostile clients that are gone may keep the server busy."""
HOSTILE = 24
"""Number of threads of the hostile client."""


@dataclass
class Turns:
    """What the honest clients saw; index 1 with the hostile ones."""

    first_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    errors: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    bytes: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--minutes", type=float, default=10, help="of turns with the hostile clients")
    parser.add_argument("--turn", type=float, default=60, help="seconds of a turn")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--acts", type=lambda text: text.split(","), help="of the hostile clients; all unless given")
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
    rounds = max(1, round(60 * options.minutes / options.turn))
    for number in range(2 * rounds):
        is_hostile = number % 2
        attack = fork.Process(
            target=flood, args=(port, secrets["mallory"], options.acts, options.seed + number), daemon=True
        )
        if is_hostile:
            attack.start()
        watch = asyncio.create_task(watched(pid, turns.bytes[is_hostile]))
        began = time.monotonic()
        clients = (
            honest(port, secrets[KEYS[n % len(KEYS)]], turns, is_hostile, began, options.turn, draw.random())
            for n in range(options.clients)
        )
        await asyncio.gather(*clients)
        watch.cancel()
        if is_hostile:
            attack.kill()
            attack.join()
        await idle(port)
        counts = [len(times) for times in turns.first_s]
        print(f"turn {number + 1} of {2 * rounds}: {counts} answers, {turns.errors}", file=sys.stderr, flush=True)
    return turns


async def watched(pid: int, sizes: list[int]) -> None:
    while True:
        sizes.append(resident(pid))
        await asyncio.sleep(0.2)


async def idle(port: int) -> None:
    """Wait until no request runs."""
    until = time.monotonic() + IDLE_S
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=IDLE_S) as client:
        while time.monotonic() < until:
            lines = (await client.get("/metrics")).text.splitlines()
            counts = [float(line.split()[-1]) for line in lines if line.startswith("outrider:num_requests_")]
            assert counts, "the server has no such metrics"
            if not any(counts):
                return
            await asyncio.sleep(0.2)
    raise TimeoutError(f"the server is still busy {IDLE_S:.0f} s after the hostile clients left")


async def honest(port: int, key: str, turns: Turns, is_hostile: int, began: float, seconds: float, seed: float) -> None:
    """One request after another, with pauses, until so many seconds after `began`."""
    draw = random.Random(seed)
    while True:
        await asyncio.sleep(draw.uniform(0.2, 2.0))
        at = time.monotonic() - began
        if at > seconds:
            return
        body = {"prompt": f"import {draw.randrange(1000)}", "max_tokens": 8, "ignore_eos": True, "stream": True}
        try:
            first_s, problem = await asyncio.wait_for(ask(port, key, body), 120)
        except (TimeoutError, OSError, EOFError) as error:
            first_s, problem = None, type(error).__name__
        if problem:
            turns.errors[is_hostile][problem] += 1
        elif first_s is not None and at > MARGIN_S:
            turns.first_s[is_hostile].append(first_s)


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


def flood(port: int, key: str, names: list[str] | None, seed: int) -> None:
    """Threads that attack until this process is killed."""
    texts = {"prompt": ["a"] * 4, "n": 16, "max_tokens": 400, "ignore_eos": True}
    message = '{"role":"user","content":"a"}'
    many_messages = {"messages": [json.loads(message)] * 4000, "max_tokens": 1}
    bodies: dict[str, tuple[str, bytes]] = {
        "texts": ("/v1/completions", json.dumps(texts).encode()),
        "logprobs": ("/v1/completions", json.dumps(texts | {"logprobs": 20, "n": 4}).encode()),
        "lists": ("/v1/completions", many('{"prompt":[', "[]", "]}")),
        "tokens": ("/v1/completions", many('{"prompt":[', "1", "]}")),
        "messages": ("/v1/chat/completions", many('{"messages":[', message, "]}")),
        "template": ("/v1/chat/completions", json.dumps(many_messages).encode()),
        "prompt": ("/v1/completions", json.dumps({"prompt": "a b " * (BODY_BYTES // 4)}).encode()),
        "tokenize": ("/tokenize", json.dumps({"prompt": "\u00e9<|" * (BODY_BYTES // 12)}).encode()),
        "detokenize": ("/detokenize", many('{"tokens":[', "5", "]}")),
    }
    stream = request("/v1/completions", key, json.dumps(texts | {"stream": True}).encode())
    acts: dict[str, Callable[[socket.socket], None]] = {
        name: lambda sock, one=one: exchange(sock, request(one[0], key, one[1])) for name, one in bodies.items()
    } | {
        "head": lambda sock: exchange(sock, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 200_000),
        "half head": lambda sock: hold(sock, b"GET /v1/models HTTP/1.1\r\nhost"),
        "half body": lambda sock: hold(sock, request("/v1/completions", key, bodies["texts"][1])[:-5]),
        "unread": lambda sock: hold(sock, stream),
    }
    chosen = [acts[name] for name in names or acts]
    draws = [random.Random(f"{seed} {n}") for n in range(HOSTILE)]

    def work(draw: random.Random) -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
                draw.choice(chosen)(sock)

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
    for thread in threads:
        thread.join()


def exchange(sock: socket.socket, data: bytes) -> None:
    """Send all of it and read the answer."""
    sock.sendall(data)
    while sock.recv(65536):
        pass


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def figures(turns: Turns, alive: bool) -> dict[str, Any]:
    assert turns.first_s[0], "no answer"
    quiet, hostile = ([float(np.quantile(times or [float("inf")], q)) for q in (0.5, 0.99)] for times in turns.first_s)
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
            at_most("p99 of the first token, over that without", 1.5, hostile[1] / quiet[1]),
            at_most("resident memory, over that without", 1.3, memory[1] / memory[0]),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
