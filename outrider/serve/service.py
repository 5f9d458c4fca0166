"""Requests answered, with or without HTTP: bodies in, answers out, over one engine."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, TypeVar

from outrider.decoding.state import Request
from outrider.errors import DataError
from outrider.serve.bodies.answers import Answer, Choice, error_event
from outrider.serve.bodies.asked import Reader
from outrider.serve.bodies.parsing import parse
from outrider.serve.bodies.refusals import Refusal, draining, internal, invalid
from outrider.serve.bodies.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextFormat,
    TextRequest,
    TokenizeChat,
    TokenizeText,
)
from outrider.serve.calls import Call, EngineStopped, Output, QueueFull
from outrider.serve.config import Config
from outrider.serve.engine import INTERNAL, Engine
from outrider.serve.records.request_log import Ended, RequestLog
from outrider.targets.hf.transformers import TransformersTarget

T = TypeVar("T")
Kind = Literal["completion", "chat"]
BODIES: Mapping[Kind, type[TextRequest]] = {"completion": CompletionRequest, "chat": ChatRequest}
SHORT = 2_000
"""Bytes of a body that is read at once: a thread costs more time than its prompt."""


class Post:
    """Runs the engine's callbacks on the event loop that is running."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, deliver: Callable[[], None]) -> None:
        if self.loop is not None:
            with suppress(RuntimeError):  # it was closed: nobody waits any more
                self.loop.call_soon_threadsafe(deliver)


class Job:
    """A request that is being answered."""

    def __init__(self, body: TextRequest, values: Mapping[str, Any], answer: Answer):
        self.body, self.values, self.answer = body, values, answer
        self.choices: list[Choice] = []
        self.calls: list[Call] = []
        self._arrived: list[tuple[int, Output]] = []
        self._has_more = asyncio.Event()

    def call(self, request: Request, owner: str, deadline: float | None) -> Call:
        """A further answer of this request."""
        index = len(self.calls)
        self.choices.append(Choice(index))
        call = Call(request, functools.partial(self._take, index), owner, deadline)
        call.is_stored = self.body.store is not False
        self.calls.append(call)
        return call

    def _take(self, index: int, output: Output) -> None:
        self._arrived.append((index, output))
        self._has_more.set()

    async def more(self) -> list[tuple[int, Output]]:
        """What was written since the last call, at least one step's."""
        await self._has_more.wait()
        self._has_more.clear()
        found, self._arrived = self._arrived, []
        for index, output in found:
            self.choices[index].add(output)
        return found

    @property
    def is_over(self) -> bool:
        return all(choice.reason is not None for choice in self.choices)

    @property
    def failure(self) -> Refusal | None:
        """What the client is told where a text did not end by itself."""
        for choice in self.choices:
            match choice.reason:
                case "deadline":
                    message = "the request took longer than its timeout; ask for fewer tokens, or for more seconds"
                    return Refusal(408, message, "timeout", "timeout")
                case "cancelled":
                    return draining()
                case "error":
                    return internal() if choice.error == INTERNAL else invalid(choice.error)
        return None


class Service:
    """Answers requests.  Used on one event loop."""

    def __init__(
        self, engine: Engine, target: TransformersTarget, config: Config, *, name: str, drafters: Sequence[str] = (),
        log: RequestLog | None = None,
    ):  # fmt: skip
        """drafters: names that a request may ask for."""
        self.engine, self.config, self.name, self.log = engine, config, name, log
        self.reader = Reader(target, config, name, engine.length, drafters)
        self.jobs: set[Job] = set()
        """Those that are being answered."""
        self._tokenizer = target.tokenizer
        self._left_out = frozenset[int]() if target.detokenizer is None else frozenset(target.detokenizer.skipped)
        self._pool = ThreadPoolExecutor(2, "outrider-read")
        self._names: dict[int, str] = {}

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, kind: Kind, values: Any, size: int, owner: str = "") -> Job:
        """Check a body and queue its texts.  size: of the body, in bytes.  Raises Refusal."""
        began = time.monotonic()
        body = parse(BODIES[kind], values)
        is_slow = size > SHORT or not isinstance(body.response_format, TextFormat | None)
        requests = await self._read(is_slow, lambda: self.reader.requests(body, owner))
        job = Job(body, values, Answer(body, self.name, self.name_of, self.text_of))
        seconds = min(limit for limit in (body.timeout, self.config.timeout_s, float("inf")) if limit is not None)
        deadline = None if seconds == float("inf") else began + seconds
        calls = [job.call(request, owner, deadline) for own in requests for request in own]
        self.jobs.add(job)
        try:
            for call in calls:
                self.engine.submit(call)
        except (QueueFull, EngineStopped, DataError) as error:
            self.cancel(job)
            self.jobs.discard(job)
            raise _refused(error) from None
        return job

    async def whole(self, job: Job) -> dict[str, Any]:
        """The answer, when all of it is written.  Raises Refusal."""
        while not job.is_over and job.failure is None:
            await job.more()
        if job.failure is not None:
            raise job.failure
        return job.answer.whole(job.choices, job.calls)

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """The answer as it is written.  Raises Refusal before the first event only; a later one is an event."""
        answer = job.answer
        opening: bytes | None = answer.opening(job.choices)
        while not job.is_over:
            found = await job.more()
            if job.failure is not None:
                if opening is not None:
                    raise job.failure
                yield error_event(job.failure)
                return
            chunks = b"".join(
                [answer.chunk(job.choices[i], output, job.calls[i]) for i, output in answer.joined(found)]
            )
            if opening is not None:
                yield opening + chunks
                opening = None
            elif chunks:
                yield chunks
        yield answer.closing(job.calls)

    def cancel(self, job: Job) -> None:
        """End a job's texts that are still being written, such as those of a client that is gone."""
        for choice, call in zip(job.choices, job.calls, strict=True):
            if choice.reason is None:
                self.engine.cancel(call)

    def finish(self, job: Job) -> None:
        """Nothing of this job is wanted any more."""
        self.cancel(job)
        self.jobs.discard(job)
        if self.log is not None:
            reasons = [choice.reason or "cancelled" for choice in job.choices]
            texts = [choice.text for choice in job.choices]
            self.log.add(Ended(job.answer.id, job.values, job.calls, reasons, texts))

    # ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def tokenize(self, values: Any, size: int) -> dict[str, Any]:
        is_chat = isinstance(values, dict) and "messages" in values
        body = parse(TokenizeChat, values) if is_chat else parse(TokenizeText, values)
        tokens = await self._read(size > SHORT, lambda: self.reader.tokens(body))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.length}

    async def detokenize(self, values: Any, size: int) -> dict[str, Any]:
        body = parse(DetokenizeRequest, values)
        return {"prompt": await self._read(size > SHORT, lambda: self.reader.text(body))}

    def name_of(self, token: int) -> str:
        """A token by itself, a special one's name too."""
        if token not in self._names:
            self._names[token] = "" if self._tokenizer is None else self._tokenizer.decode([token])
        return self._names[token]

    def text_of(self, token: int) -> str:
        """What a token adds to a text."""
        return "" if token in self._left_out else self.name_of(token)

    async def _read(self, is_slow: bool, read: Callable[[], T]) -> T:
        if not is_slow:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._pool, read)


def _refused(error: QueueFull | EngineStopped | DataError) -> Refusal:
    if isinstance(error, QueueFull):
        return Refusal(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    return draining() if isinstance(error, EngineStopped) else invalid(str(error), "prompt")
