"""Replays: how precisely calls are sent at 200 per second, the cost of a call, and the fate of every call when a server
dies.

    python benchmarks/traffic.py [--rate 200] [--seconds 60] [--out benchmarks/results/replay.json]
    python benchmarks/traffic.py --server URL[,URL] --log FILE [--rate R]       a server of one's own

The stub server answers in a separate process on the same machine: 8 pieces, 5 ms apart.  It notes when each call
arrived, on the clock that the sender reads too, so the schedule is verified by the receiver.  `outrider replay` is
measured as it is, with its files; `waited_for_a_core_s` is the time it was ready to send while others had the cores,
which on a busy machine is most of its lateness.  `httpx`, and `h11` on asyncio's streams, are alternative readers that
it does not use, on the same calls.  The last run kills the server halfway and restarts it.  A promise that is not kept,
or could not be measured, is named and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h11
import httpx
import numpy as np

from benchmarks.replay import command
from outrider.traffic.address import address_of
from outrider.traffic.logs import traces
from outrider.traffic.logs.calls import words
from outrider.traffic.replay import run
from outrider.traffic.replay.connection import ConnectionPool
from outrider.traffic.replay.plan import Plan
from outrider.traffic.replay.plan import schedule as scheduled_calls

STUB = Path(__file__).resolve().with_name("stub_server.py")
COUNTS = ("drafts", "drafted", "accepted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--server", help="one or two, instead of the stub")
    parser.add_argument("--log", type=Path, help="with --server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if options.server:
        trace = traces.read(options.log)
        found: dict[str, Any] = run.replay(
            trace, options.server.split(","), Plan(rate=options.rate, greedy=True)
        ).plain()
    else:
        count = round(options.rate * options.seconds)
        print(
            f"{count} calls at {options.rate:g} a second, then {count // 4}, then readers one by one", file=sys.stderr
        )
        found = {
            "schedule": schedule(options.rate, count),
            "death": death(options.rate, count // 4),
            "readers": {name: reader(make, 800) for name, make in READERS.items()},
        }
        found["promises"] = promises(found)
    found = {
        "command": command(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "load_before": round(load, 2),
            "python": platform.python_version(),
        },
        **found,
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    broken = [promise for promise, is_kept in found.get("promises", {}).items() if not is_kept]
    if broken:
        sys.exit(f"not kept: {'; '.join(broken)}")


@contextlib.contextmanager
def stub(*options: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, str(STUB), "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
    finally:
        process.kill()
        process.wait()


def written(folder: Path, count: int) -> traces.Trace:
    """A log of `count` prompts of 100 words."""
    prompts = (words(str(number), 100) for number in range(count))
    rows = ({"messages": [{"role": "user", "content": prompt}], "max_tokens": 16} for prompt in prompts)
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return traces.read(path)


def shares(values_s: list[float]) -> dict[str, float]:
    names = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "most": 1.0}
    return {name: round(float(np.quantile(values_s, share)) * 1e3, 3) for name, share in names.items()}


def schedule(rate: float, count: int) -> dict[str, Any]:
    """The run that counts: Poisson times, files written, each call's due time compared with its arrival at the
    server."""
    with tempfile.TemporaryDirectory() as place, stub("--remember") as (url, process):
        folder, plan = Path(place), Plan(rate=rate)
        trace = written(folder, count)
        peaks: list[int] = []
        cpu, began, waited = time.process_time(), time.perf_counter(), waited_s()
        note = lambda done, text: peaks.append(resident())
        result = run.replay(trace, [url], plan, folder=folder / "out", progress=note)
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        waited = waited_s() - waited
        came = httpx.get(url + "/received", timeout=60).json()
        lines = [json.loads(line) for line in (folder / "out" / "calls.jsonl").open()]
        rows = [line["servers"][url] | {"call": line["call"]} for line in lines]
        due = [at for _, at in scheduled_calls(trace, plan)]
        stub_cpu = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().split()[13:15])) / os.sysconf(
            "SC_CLK_TCK"
        )
        # perf_counter and monotonic are one clock on Linux; its zero is derived from the first call
        arrivals = [came[row["request_id"]] - due[row["call"]] for row in rows]
        starts = [row["sent_s"] - row["late_s"] - due[row["call"]] for row in rows]
    (endpoint,) = result.endpoints
    late = [row["late_s"] for row in rows]
    first = min(range(len(rows)), key=lambda row: arrivals[row])
    received = [arrival - arrivals[first] for arrival in arrivals]
    assert max(map(abs, starts)) < 1e-4, "the log's due times are not those that were kept"
    return {
        "calls": count, "rate_per_s": rate, "seconds": round(seconds, 1), "answered": endpoint.answered,
        "sent_after_due_ms": shares(late), "received_after_due_ms, the earliest is 0": shares(received),
        "cpu_ms_per_call": {"replay": round(cpu / count * 1e3, 3), "stub": round(stub_cpu / count * 1e3, 3)},
        "waited_for_a_core_s": round(waited, 2),
        "ttft_ms": shares([row["ttft_s"] for row in rows]),
        "memory_mib": memory(peaks),
        "acceptance_agrees": bool(
            endpoint.acceptance and endpoint.reported_acceptance
            and all(endpoint.acceptance[name] == endpoint.reported_acceptance[name] for name in COUNTS)
        ),
    }  # fmt: skip


def memory(readings: list[int]) -> dict[str, int] | None:
    """MiB, from readings in bytes; None if the run was too short for a quarter of it to contain one."""
    if len(readings) < 4:
        return None
    return {"after_a_quarter": readings[len(readings) // 4] >> 20, "at_the_end": readings[-1] >> 20}


def waited_s() -> float:
    """How long this process was ready to run but did not."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def death(rate: float, count: int) -> dict[str, Any]:
    """The server is killed halfway and returns a second later: what happened to every call."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as place:
        url, process = stack.enter_context(stub())
        port = int(url.rpartition(":")[2])

        def violence() -> None:
            time.sleep(count / rate / 2)
            process.kill()
            process.wait()
            time.sleep(1)
            stack.enter_context(stub(port=port))

        thread = threading.Thread(target=violence)
        trace = written(Path(place), count)
        thread.start()
        result = run.replay(trace, [url], Plan(rate=rate), folder=Path(place) / "out")
        thread.join()
        lines = sum(1 for _ in (Path(place) / "out" / "calls.jsonl").open())
    (endpoint,) = result.endpoints
    return {
        "calls": count, "sent": endpoint.sent, "answered": endpoint.answered, "failed": dict(endpoint.failed),
        "cut_off": dict(endpoint.cut_off), "sent_more_than_once": endpoint.retried, "lines_written": lines,
        "not_accounted_for": endpoint.sent - endpoint.answered - endpoint.failed.total() - endpoint.cut_off.total(),
    }  # fmt: skip


# ── rejected readers ──────────────────────────────────────────────────────────────────────────────────────────────────

Reader = Callable[[str, bytes], Awaitable[None]]


def reader(make: Callable[[], Reader], count: int, rate: float = 100.0) -> dict[str, float]:
    """CPU time per call for one way of reading answers, at a rate that all of them can sustain."""
    body = json.dumps(
        {"model": "stub", "messages": [{"role": "user", "content": words("x", 100)}], "stream": True}
    ).encode()
    with stub() as (url, _):

        async def go() -> float:
            ask = make()
            await ask(url, body)
            cpu, start, tasks = time.process_time(), time.perf_counter(), []
            for number in range(count):
                await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
                tasks.append(asyncio.create_task(ask(url, body)))  # type: ignore[arg-type]
            await asyncio.gather(*tasks)
            return time.process_time() - cpu

        return {"cpu_ms_per_call": round(asyncio.run(go()) / count * 1e3, 3)}


def by_httpx() -> Reader:
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))

    async def ask(url: str, body: bytes) -> None:
        async with client.stream("POST", url + "/v1/chat/completions", content=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    json.loads(line[6:])

    return ask


def by_h11() -> Reader:
    free: list[Any] = []

    async def ask(url: str, body: bytes) -> None:
        port = int(url.rpartition(":")[2])
        reading, writing, line = (
            free.pop() if free else (*await asyncio.open_connection("127.0.0.1", port), h11.Connection(h11.CLIENT))
        )
        headers = [("host", "x"), ("content-length", str(len(body))), ("content-type", "application/json")]
        request = h11.Request(method="POST", target="/v1/chat/completions", headers=headers)
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writing.write(line.send(event) or b"")
        rest = b""
        while not isinstance(event := line.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                line.receive_data(await reading.read(65536))
            elif isinstance(event, h11.Data):
                *whole, rest = (rest + bytes(event.data)).split(b"\n")
                for row in whole:
                    if row.startswith(b"data: {"):
                        json.loads(row[6:])
        line.start_next_cycle()
        free.append((reading, writing, line))

    return ask


def by_our_own() -> Reader:
    clients: dict[str, ConnectionPool] = {}

    async def ask(url: str, body: bytes) -> None:
        client = clients.setdefault(url, ConnectionPool(address_of(url)))
        answer = await client.post("/v1/chat/completions", body, "x")
        assert answer.kind == "answered"

    return ask


READERS = {"httpx": by_httpx, "h11": by_h11, "outrider": by_our_own}


GROWTH_MIB = 4
"""Allowed memory growth in MiB from a quarter of the run to its end.  The numbers of 9,000 calls take 0.5 MiB, their
texts 9 MiB."""


def promises(found: dict[str, Any]) -> dict[str, bool]:
    late, memory_mib = found["schedule"]["sent_after_due_ms"]["p99"], found["schedule"]["memory_mib"]
    return {
        "calls are sent within 10 ms of their time, p99": late < 10,
        "every call is accounted for": found["death"]["not_accounted_for"] == 0
        and found["death"]["lines_written"] == found["death"]["sent"] == found["death"]["calls"],
        "counters and answers agree": found["schedule"]["acceptance_agrees"],
        f"memory grows by at most {GROWTH_MIB} MiB after a quarter of the run, of 10 s or more": memory_mib is not None
        and memory_mib["at_the_end"] - memory_mib["after_a_quarter"] <= GROWTH_MIB,
    }


if __name__ == "__main__":
    main()
