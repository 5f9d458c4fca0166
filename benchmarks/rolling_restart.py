"""Restart two servers behind nginx, one after the other, while clients send requests: no answer is lost, cut off or
given twice.

    python benchmarks/rolling_restart.py [--minutes 5] [--clients 16] [--out FILE]

The servers serve the demo target, and nginx (Debian's) runs with examples/nginx.conf on free ports.  Half of the
requests are streams.  No client retries: each answer must be the expected text.  The servers' request logs must record
as many finished texts as clients received.  Prints JSON; exits with 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.replay import provenance, publish
from outrider.client import AsyncClient, ClientError, Limits, Retries

ROOT = Path(__file__).resolve().parent.parent
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
PROMPTS = [f"def {name}(" for name in ("read", "write", "open", "close", "main", "add", "send", "find")]
TOKENS = 32
START_S = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    result = measured(60 * options.minutes, options.clients)
    publish({"provenance": provenance(time.perf_counter() - began)} | result, options.out)
    sys.exit(not is_clean(result))


def is_clean(result: dict[str, Any]) -> bool:
    return bool(result["answers"] and result["restarts"]) and not (
        result["errors"] or result["wrong"] or result["doubled"]
    )


def measured(seconds: float, clients: int) -> dict[str, Any]:
    """Send requests for this long and until each server was restarted; counts of answers, errors and restarts."""
    with tempfile.TemporaryDirectory() as place:
        ports = free_ports(3)
        servers = [Server(port, Path(place) / f"{port}.jsonl") for port in ports[:2]]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.await_ready()
            with proxy(ports, Path(place)) as url:
                counts = asyncio.run(asked(url, servers, seconds, clients))
        finally:
            codes = [server.stop() for server in servers]
        ended = sum(server.ended() for server in servers)
    doubled = ended - counts["answers"] - counts["errors"].total() - counts["asked_before"]
    return {**counts, "errors": dict(counts["errors"]), "doubled": doubled, "exit_codes": codes, "clients": clients}


class Server:
    """`outrider serve` in a separate process."""

    def __init__(self, port: int, log: Path):
        self.port, self.log = port, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ("--target", "demo", "--drafter", "ngram", "--slots", "8", "--request-log", str(self.log))
        command = [sys.executable, "-m", "outrider", "serve", "--port", str(self.port), *words]
        # as docs/serve.md advises for servers that share processors
        environment = os.environ | {"OUTRIDER_COMPILE": "off", "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)

    def await_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process is not None and self.process.poll() is None, "a server did not start"
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise TimeoutError(f"a server was not ready within {START_S:.0f} s")

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def ended(self) -> int:
        """Number of texts that were generated to the end."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sum(json.loads(line)["meta"]["finish_reason"] in ("stop", "length") for line in lines)


async def asked(url: str, servers: list[Server], seconds: float, clients: int) -> dict[str, Any]:
    """Send requests while the servers are restarted."""
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    is_over = False
    settings = {"max_tokens": TOKENS, "temperature": 0}
    limits, once = Limits(clients, failures=10**6), Retries(attempts=1)
    async with AsyncClient(f"{url}/v1", model="demo", limits=limits, retries=once) as client:
        expected = [(await client.complete(prompt, **settings)).text for prompt in PROMPTS]

        async def one(number: int) -> None:
            while not is_over:
                at = number % len(PROMPTS)
                try:
                    if number // len(PROMPTS) % 2:
                        chunks = [chunk.text async for chunk in client.complete_stream(PROMPTS[at], **settings)]
                        text = "".join(chunks)
                    else:
                        text = (await client.complete(PROMPTS[at], **settings)).text
                    counts["answers"] += 1
                    counts["wrong"] += text != expected[at]
                except ClientError as error:
                    errors[f"{type(error).__name__}: {error}"[:200]] += 1
                number += 1

        asking = [asyncio.create_task(one(3 * number)) for number in range(clients)]
        until = time.monotonic() + seconds
        while time.monotonic() < until or counts["restarts"] < len(servers):
            server = servers[counts["restarts"] % len(servers)]
            counts["exit_codes_not_0"] += await asyncio.to_thread(server.stop) != 0
            server.start()
            await asyncio.to_thread(server.await_ready)
            counts["restarts"] += 1
        is_over = True
        await asyncio.gather(*asking)
    names = ("answers", "wrong", "restarts", "exit_codes_not_0")
    return {name: counts[name] for name in names} | {"errors": errors, "asked_before": len(expected)}


@contextmanager
def proxy(ports: list[int], place: Path) -> Iterator[str]:
    """nginx with the example's configuration, on these ports: two of servers, and its own."""
    text = (ROOT / "examples" / "nginx.conf").read_text()
    for port, number in zip(ports, ("8001", "8002", "8080"), strict=True):
        assert f":{number}" in text
        text = text.replace(f"127.0.0.1:{number}", f"127.0.0.1:{port}")
    (place / "nginx.conf").write_text(text)
    command = [NGINX, "-p", str(place), "-c", str(place / "nginx.conf"), "-g", "daemon off;"]
    with subprocess.Popen(command) as process:
        try:
            time.sleep(1)
            assert process.poll() is None, "nginx did not start"
            yield f"http://127.0.0.1:{ports[-1]}"
        finally:
            process.terminate()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    main()
