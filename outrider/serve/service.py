"""The service: request bodies in, answers out, over one engine; with or without HTTP."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, TypeVar

from outrider.decoding.state import Request
from outrider.errors import DataError
from outrider.serve.bodies.answers import Answer, Choice
from outrider.serve.bodies.parsing import parse, read
from outrider.serve.bodies.refusals import Refusal, draining, internal, invalid
from outrider.serve.bodies.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextFormat,
    TextRequest,
    TokenizeChat,
    TokenizeText,
    offered_tools,
)
from outrider.serve.bodies.requests import Reader
from outrider.serve.bodies.responses import ResponseAnswer, ResponseRequest, chat_of, renamed
from outrider.serve.calls import Call, EngineStopped, Output, QueueFull
from outrider.serve.config import Config
from outrider.serve.engine import INTERNAL, Engine
from outrider.serve.fair_executor import FairExecutor
from outrider.serve.records.request_log import Ended, RequestLog
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.token_texts import TokenTexts

T = TypeVar("T")
Kind = Literal["completion", "chat", "response"]
BODIES: Mapping[Kind, type[TextRequest]] = {
    "completion": CompletionRequest, "chat": ChatRequest, "response": ChatRequest,
}  # fmt: skip
"""What a response is translated to."""
SHORT, SMALL = 2_000, 32_000
"""Bodies of at most this many bytes are parsed and their prompts encoded on the event loop: a thread would take longer.
"""
AT_ONCE = 16
"""Maximum number of outputs of steps that are formatted before other requests have their turn."""
LATE = "the request took longer than its timeout; request fewer tokens, or a longer timeout"


class Post:
    """Runs the engine's callbacks on the serving event loop."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, deliver: Callable[[], None]) -> None:
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
                self.loop.call_soon_threadsafe(deliver)


class Job:
    """A request in progress."""

    def __init__(self, body: TextRequest, values: Mapping[str, Any], answer: Answer | ResponseAnswer):
        self.body, self.values, self.answer = body, values, answer
        self.choices: list[Choice] = []
        self.calls: list[Call] = []
        self._arrived: list[tuple[int, Output]] = []
        self._has_more = asyncio.Event()

    def call(self, request: Request, owner: str, deadline: float | None) -> Call:
        """Add a call for the next answer of this request."""
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
        """Wait for output, and return all outputs since the last call."""
        await self._has_more.wait()
        self._has_more.clear()
        arrived, self._arrived = self._arrived, []
        for index, output in arrived:
            self.choices[index].add(output)
        return arrived

    @property
    def is_over(self) -> bool:
        return all(choice.reason is not None for choice in self.choices)

    @property
    def failure(self) -> Refusal | None:
        """The refusal to send if a text was not finished."""
        for choice in self.choices:
            match choice.reason:
                case "deadline":
                    return Refusal(408, LATE, "timeout", "timeout")
                case "cancelled":
                    return draining()
                case "error":
                    return internal() if choice.error == INTERNAL else invalid(choice.error)
        return None


class Service:
    """Answers requests.  For one event loop."""

    def __init__(
        self, engine: Engine, target: TransformersTarget, config: Config, *, name: str, drafters: Sequence[str] = (),
        log: RequestLog | None = None,
    ):  # fmt: skip
        """drafters: names that a request may choose from."""
        self.engine, self.config, self.name, self.log = engine, config, name, log
        self.reader = Reader(target, config, name, engine.length, drafters)
        self.jobs: set[Job] = set()
        """Requests in progress."""
        self._tokenizer = target.tokenizer
        self._skipped = frozenset[int]() if target.detokenizer is None else frozenset(target.detokenizer.skipped)
        self._executor = FairExecutor(2, "outrider-read", self._is_shared)
        self.texts = TokenTexts(target.tokenizer)
        self._token_texts: dict[int, str] = {}

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def values(self, body: bytes, owner: str, arrived: float) -> Any:
        """The JSON of a body whose request arrived then, by `time.monotonic`.  Raises Refusal."""
        deadline = None if self.config.timeout_s is None else arrived + self.config.timeout_s
        return await self._read(len(body) > SMALL, owner, lambda: read(body), deadline)

    async def start(
        self, kind: Kind, values: Any, size: int, owner: str = "", arrived: float | None = None
    ) -> Job:  # fmt: skip
        """Validate a body and queue its texts.  size: of the body, in bytes.  arrived: when the request arrived, by
        `time.monotonic`; defaults to now.  Raises Refusal."""
        began = time.monotonic() if arrived is None else arrived
        response: ResponseRequest | None = None
        if kind == "response":
            response = await self._read(size > SMALL, owner, lambda: parse(ResponseRequest, values))
            values = chat_of(response)
        with nullcontext() if response is None else renamed():
            body = await self._read(size > SMALL, owner, lambda: parse(BODIES[kind], values))
            seconds = min(limit for limit in (body.timeout, self.config.timeout_s, float("inf")) if limit is not None)
            deadline = None if seconds == float("inf") else began + seconds
            has_grammar = not isinstance(body.response_format, TextFormat | None) or bool(offered_tools(body))
            is_slow = size > SHORT or has_grammar
            requests = await self._read(is_slow, owner, lambda: self.reader.requests(body, owner), deadline)
        answer = Answer(body, self.name, self.texts, self.text_of, lambda: self.reader.calls(body))
        job = Job(body, values, answer if response is None else ResponseAnswer(response, answer))
        calls = [job.call(request, owner, deadline) for of_prompt in requests for request in of_prompt]
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
        """The complete answer.  Raises Refusal."""
        await self._until_over(job)
        return job.answer.whole(job.choices, job.calls)

    async def content(self, job: Job) -> bytes:
        """The complete answer as JSON.  Raises Refusal."""
        await self._until_over(job)
        is_long, owner = job.answer.is_long(job.choices), job.calls[0].owner
        return await self._read(is_long, owner, lambda: job.answer.content(job.choices, job.calls))

    async def _until_over(self, job: Job) -> None:
        while not job.is_over and job.failure is None:
            await job.more()
        if job.failure is not None:
            raise job.failure

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """The answer as server-sent events.  Raises Refusal before the first event only; later, it is sent as an
        event."""
        answer = job.answer
        opening: bytes | None = answer.opening(job.choices)
        while not job.is_over:
            outputs = await job.more()
            if job.failure is not None:
                if opening is not None:
                    raise job.failure
                yield answer.failed(job.failure)
                return
            joined = answer.joined(outputs)
            for begin in range(0, len(joined), AT_ONCE):  # a client that reads slowly gets many steps at once
                chunks = b"".join(
                    [answer.chunk(job.choices[i], output, job.calls[i]) for i, output in joined[begin:][:AT_ONCE]]
                )
                if opening is not None:
                    yield opening + chunks
                    opening = None
                elif chunks:
                    yield chunks
                if len(joined) > AT_ONCE:
                    await asyncio.sleep(0)
        yield answer.closing(job.calls)

    def cancel(self, job: Job) -> None:
        """End a job's unfinished texts, for example when its client has disconnected."""
        for choice, call in zip(job.choices, job.calls, strict=True):
            if choice.reason is None:
                self.engine.cancel(call)

    def finish(self, job: Job) -> None:
        """Release a job, cancelling its unfinished texts, and log it."""
        self.cancel(job)
        self.jobs.discard(job)
        if self.log is not None:
            reasons = [choice.reason or "cancelled" for choice in job.choices]
            texts = [choice.text for choice in job.choices]
            self.log.add(Ended(job.answer.id, job.values, job.calls, reasons, texts))

    # ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def tokenize(self, values: Any, size: int, owner: str = "") -> dict[str, Any]:
        is_chat = isinstance(values, dict) and "messages" in values
        kind: type[TokenizeChat | TokenizeText] = TokenizeChat if is_chat else TokenizeText
        tokens = await self._read(size > SHORT, owner, lambda: self.reader.tokens(parse(kind, values)))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.length}

    async def detokenize(self, values: Any, size: int, owner: str = "") -> dict[str, Any]:
        text = await self._read(size > SHORT, owner, lambda: self.reader.text(parse(DetokenizeRequest, values)))
        return {"prompt": text}

    def text_of(self, token: int) -> str:
        """The text of a single token; "" for special tokens."""
        if token not in self._token_texts:
            has_text = self._tokenizer is not None and token not in self._skipped
            self._token_texts[token] = self._tokenizer.decode([token]) if has_text else ""
        return self._token_texts[token]

    def _is_shared(self, owner: str) -> bool:
        return any(job.calls[0].owner != owner for job in self.jobs)

    async def _read(self, is_slow: bool, owner: str, work: Callable[[], T], deadline: float | None = None) -> T:
        if not is_slow:
            return work()
        try:
            return await self._executor.run(owner, work, deadline)
        except TimeoutError:
            raise Refusal(408, LATE, "timeout", "timeout") from None


def _refused(error: QueueFull | EngineStopped | DataError) -> Refusal:
    if isinstance(error, QueueFull):
        return Refusal(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    return draining() if isinstance(error, EngineStopped) else invalid(str(error), "prompt")
