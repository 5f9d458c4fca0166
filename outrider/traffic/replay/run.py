"""Replays recorded traffic to one or several servers, at the log's times or at a fixed rate.  No torch.

Every call goes to every server (with `split`, each session to one of them), so all answer the same requests under the
same load.  When a call is due it is sent to all, in an order that rotates from call to call; in a closed loop each
caller sends its calls to the servers one after the other, in that order.  Texts are written to a file as they arrive
and kept only until the slowest server has answered; memory holds only numbers of each call.

The number of calls sent is always `answered + failed + cut off`, by server and by reason.  A call has failed if nothing
of its answer arrived, and is cut off if a part did.  A failed call is retried if that may help (no connection, 408,
429, 500, 502, 503, 504, a stream that ended before its first text), up to `retries` times, after Retry-After or a pause
that doubles.  A call is not retried if it was cut off, timed out, or would wait longer than `LONGEST_PAUSE_S`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import resource
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from outrider.errors import DataError
from outrider.report.schema import write_whole
from outrider.traffic.logs.calls import Call
from outrider.traffic.logs.redaction import hidden, keyed
from outrider.traffic.logs.traces import Trace
from outrider.traffic.replay import latencies
from outrider.traffic.replay.answer import Answer
from outrider.traffic.replay.connection import ConnectionPool
from outrider.traffic.replay.folder import open_output
from outrider.traffic.replay.latencies import Endpoint
from outrider.traffic.replay.plan import Plan, prepared, schedule
from outrider.traffic.replay.report import ReplayResult, ServerComparison
from outrider.traffic.replay.servers import Server, check_servers, server_at

PROGRESS_S = 2.0
LATE_S = 0.01


Progress = Callable[[int, str], None]


def replay(
    trace: Trace, urls: Sequence[str], plan: Plan | None = None, *, folder: Path | None = None, over: bool = False,
    key: str | None = None, progress: Progress | None = None,
) -> ReplayResult:  # fmt: skip
    """Send the calls of `trace` to each server of `urls`.

    After Ctrl-C, the result covers the calls up to then.  After an error, such as a log that changed in the meantime,
    the result is written and the error is raised.  ConfigError and DataError are raised before anything is sent.

    folder: receives calls.jsonl, with a line for each finished call, and replay.json.  key: sent as a bearer token and
    never written.
    """
    plan = plan or Plan()
    plan.check(trace)
    check_servers(urls)
    servers = [server_at(url, key) for url in urls]
    _allow_connections()
    with nullcontext() if folder is None else open_output(folder, over) as file:
        run = _Run(trace, servers, plan, file, key, progress)
        gc.collect()
        gc.freeze()  # a full collection would block sending for 20 ms
        try:
            asyncio.run(run.go())
        except Exception:
            if run.fault is None:
                raise
        finally:
            gc.unfreeze()
    result = run.result(key)
    try:
        if folder is not None:
            os.replace(folder / "calls.jsonl.part", folder / "calls.jsonl")
            write_whole({folder / "replay.json": json.dumps(result.plain(), indent=2) + "\n"})
    except (OSError, DataError) as error:
        raise run.fault or error from None
    if run.fault is not None:
        raise run.fault
    return result


def _allow_connections() -> None:
    """Raise the limit of open files to the hard limit: each call in progress is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ── the run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Run:
    """A replay in progress."""

    def __init__(
        self, trace: Trace, servers: list[Server], plan: Plan, file: IO[str] | None, key: str | None,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self.trace, self.servers, self.plan, self.file, self.progress = trace, servers, plan, file, progress
        self.endpoints = [Endpoint(one.url, plan.model or one.model_for(None), plan.slo) for one in servers]
        self.pools = [ConnectionPool(server.address, plan.timeout_s, key) for server in servers]
        self.calls = plan.count(trace)
        self.noise = random.Random(plan.seed + 1)
        self.run_id = secrets.token_hex(4)
        self.secret = secrets.token_bytes(32)
        self.num_sampled = 0
        self.renamed: Counter[tuple[str, int]] = Counter()
        """Calls whose model a server does not have: (model, server)."""
        self.num_begun = self.done = 0
        self.answer_tasks: set[asyncio.Task[Answer]] = set()
        self.call_tasks: set[asyncio.Task[None]] = set()
        self.main: asyncio.Task[Any] | None = None
        self.fault: BaseException | None = None
        self.is_stopped = False
        self.start_s = self.seconds = 0.0

    async def go(self) -> None:
        self.start_s = time.perf_counter() + 0.05
        self.main = asyncio.current_task()
        ticker = asyncio.create_task(self._tick())
        try:
            if self.plan.concurrency is None:
                await self._send_on_time()
            else:
                calls = enumerate(itertools.islice(self.trace.calls(), self.plan.limit))
                for _ in range(int(self.plan.concurrency)):
                    self._start(self._caller(calls))
            await self._join()
        except asyncio.CancelledError:
            await self._stop()
        except Exception as fault:  # such as a log that changed in the meantime
            self.fault = self.fault or fault
            await self._stop()
        finally:
            ticker.cancel()
            for pool in self.pools:
                pool.close()
            self.seconds = max(0.0, time.perf_counter() - self.start_s)
        if self.fault is not None:
            raise self.fault
        for endpoint in self.endpoints:
            assert not endpoint.lost, f"{endpoint.lost} calls are not accounted for"

    async def _stop(self) -> None:
        """Stop sending, and end the calls in progress."""
        self.is_stopped = True
        for task in tuple(self.answer_tasks):
            task.cancel()
        await self._join()

    async def _join(self) -> None:
        while self.call_tasks:
            await asyncio.wait(self.call_tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.call_tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.call_tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None and self.fault is None:
            # such as a full disk: stop sending
            self.fault = fault
            if self.main is not None:
                self.main.cancel()

    async def _send_on_time(self) -> None:
        """Send each call when it is due, without waiting for answers."""
        for number, (call, at_s) in enumerate(schedule(self.trace, self.plan)):
            bodies = self._bodies(number, call)
            due_s = self.start_s + at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            self._start(self._send(number, call, bodies, due_s))

    async def _caller(self, calls: Iterator[tuple[int, Call]]) -> None:
        """One of the callers of a closed loop."""
        for number, call in calls:
            await self._send(number, call, self._bodies(number, call), None)
            if self.is_stopped:
                return

    def _bodies(self, number: int, call: Call) -> list[tuple[int, str, bytes]]:
        """(server, path, body) for each server that receives the call, in the order of sending."""
        count = len(self.servers)
        if self.plan.split:
            session = None if call.session is None else call.session.encode("utf-8", "surrogatepass")
            order = [(number if session is None else zlib.crc32(session)) % count]
        else:
            order = [(i + number) % count for i in range(count)]
        if not self.plan.greedy and call.body.get("temperature", 1) != 0:
            self.num_sampled += 1
        model = call.body.get("model")
        for server in order:
            if self.plan.model is None and model is not None and self.servers[server].model_for(model) != model:
                self.renamed[str(model), server] += 1
        return [(server, *prepared(call, self.servers[server], self.plan)) for server in order]

    async def _send(self, number: int, call: Call, bodies: list[tuple[int, str, bytes]], due_s: float | None) -> None:
        """Send one call to every server that should receive it, and record the answers."""
        if self.is_stopped:
            return
        self.num_begun += 1
        answers: dict[int, Answer] = {}
        tasks = []
        for server, path, body in bodies:
            if self.is_stopped:
                break
            task = asyncio.create_task(self._ask(server, number, path, body, due_s))
            self.endpoints[server].sent += 1
            self.answer_tasks.add(task)
            task.add_done_callback(self.answer_tasks.discard)
            tasks.append((server, task))
            if due_s is None:
                await asyncio.wait([task])  # a caller sends to one server after the other
        for server, task in tasks:
            try:
                answers[server] = await task
            except asyncio.CancelledError:  # before it started
                now = time.perf_counter()
                answers[server] = Answer(now, ended_s=now, failure="stopped", attempts=0, due_s=due_s)
            self.endpoints[server].take(number, answers[server], number >= self.plan.warmup)
        self._note(number, call, answers)
        self.done += 1

    async def _ask(self, server: int, number: int, path: str, body: bytes, due_s: float | None) -> Answer:
        """Send one call to one server until it is answered or a retry is useless."""
        answer = Answer(time.perf_counter(), due_s=due_s)
        try:
            while True:
                await self.pools[server].post(path, body, f"{self.run_id}-{number}-{answer.attempts}", answer)
                wait_s = answer.backoff_s(self.noise)
                if answer.attempts > self.plan.retries or wait_s is None or not answer.is_retryable:
                    break
                await asyncio.sleep(wait_s)
                answer = Answer(answer.began_s, attempts=answer.attempts + 1, due_s=due_s)
        except asyncio.CancelledError:  # during an answer, or between two attempts
            if not answer.ended_s or answer.failure is not None:
                answer.end(time.perf_counter(), "stopped")
        if self.plan.redact and answer.failure is not None:
            answer.failure = answer.reason  # servers quote the request
        return answer

    def _note(self, number: int, call: Call, answers: dict[int, Answer]) -> None:
        """Compare the answers and write them; they are not kept in memory."""
        name = keyed(call.id, self.secret) if self.plan.redact else call.id
        texts = {server: answer.text for server, answer in answers.items() if answer.kind == "answered"}
        differs = {
            s: self.endpoints[s].with_first.take(name, texts[0], text) for s, text in texts.items() if s and 0 in texts
        }
        if call.answer is not None:
            for server, text in texts.items():
                self.endpoints[server].with_log.take(name, text, call.answer)
        if self.file is None:
            return
        row = {
            "call": number, "id": name, "at_s": call.at_s, "synthetic": call.synthetic or None,
            "servers": {self.servers[i].url: self._row(number, one, differs.get(i)) for i, one in answers.items()},
            "equal": set(differs.values()) == {None} if differs else None,
        }  # fmt: skip
        self.file.write(json.dumps({key: value for key, value in row.items() if value is not None}) + "\n")

    def _row(self, number: int, answer: Answer, differs: int | None) -> dict[str, Any]:
        text = hidden(answer.text, self.secret) if self.plan.redact else answer.text
        row = {
            "outcome": answer.kind, "reason": answer.failure, "status": answer.status, "attempts": answer.attempts,
            "request_id": f"{self.run_id}-{number}-{answer.attempts}",
            "sent_s": round(answer.began_s - self.start_s, 6),
            "late_s": None if answer.due_s is None else round(answer.began_s - answer.due_s, 6),
            "ttft_s": answer.ttft_s,
            "tpot_s": answer.tpot_s, "e2e_s": answer.e2e_s, "tokens": answer.tokens,
            "prompt_tokens": answer.prompt_tokens,
            "pieces": answer.chunks, "finish": answer.finish, "acceptance": answer.acceptance, "answer": text,
            "first_difference": differs,
        }  # fmt: skip
        return {key: value for key, value in row.items() if value is not None}

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            if self.file is not None:
                self.file.flush()
            if self.progress is not None:
                failed = sum(one.failed.total() + one.cut_off.total() for one in self.endpoints)
                self.progress(
                    self.done, f"{len(self.answer_tasks)} in progress" + (f", {failed} failed" if failed else "")
                )

    # ── the result ────────────────────────────────────────────────────────────────────────────────────────────────────

    def result(self, key: str | None) -> ReplayResult:
        plan, trace, first = self.plan, self.trace, self.endpoints[0]
        notes = self._notes()
        for server, endpoint in zip(self.servers, self.endpoints, strict=True):
            endpoint.acceptance, note = self._acceptance(server, key)
            notes += [f"{server.url}: {note}"] if note else []
            endpoint.end(self.start_s)
        late = latencies.spread([value for one in self.endpoints for value in one.late_s])
        if late is not None and late.p99 > LATE_S:
            notes.append(
                f"1 call in 100 was sent {late.p99 * 1e3:.0f} ms late or more: this machine is too busy, which adds to "
                "the latencies"
            )
        answers = [one.with_first if one.with_first.compared else None for one in self.endpoints[1:]]
        comparisons = [
            ServerComparison(one.url, latencies.ratios(first, one, not plan.split), texts)
            for one, texts in zip(self.endpoints[1:], answers, strict=True)
        ]
        return ReplayResult(
            str(trace.path), trace.format, plan.mode, datetime.now(UTC).isoformat(timespec="seconds"), self.calls,
            self.calls - self.num_begun, trace.left_out, trace.num_synthetic, not self.is_stopped, self.seconds,
            late, tuple(self.endpoints), tuple(comparisons),
            {one.url: one.with_log for one in self.endpoints if one.with_log.compared}, plan.slo, tuple(notes),
        )  # fmt: skip

    def _notes(self) -> list[str]:
        notes = []
        if self.trace.num_synthetic:
            notes.append("synthetic text: acceptance and answers are meaningless")
        if self.num_sampled and any(one.with_first.compared or one.with_log.compared for one in self.endpoints):
            notes.append(
                f"{self.num_sampled} calls sample, so their answers may differ; --greedy sends them at temperature 0"
            )
        for (model, i), count in self.renamed.most_common(5):
            server = self.servers[i]
            notes.append(f"{server.url} has no {model}: {count} calls went to {server.model_for(model)}")
        for one in self.endpoints:
            if one.uncounted:
                notes.append(f"{one.url}: {one.uncounted} answers had no token count, so they have no TPOT")
        return notes

    def _acceptance(self, server: Server, key: str | None) -> tuple[dict[str, Any] | None, str | None]:
        """The server's counters over this run, and a note on them."""
        if server.before is None:
            return None, server.no_counters
        try:
            since = server.acceptance(key)
        except DataError as error:
            return None, str(error)
        note = "it restarted during the run: acceptance covers the time after that" if since.restarted else None
        if since.is_interval:
            note = "tokens per step are for its last logging interval, not for this run"
        return since.json(), note
