"""A client for servers with OpenAI's API, on asyncio: `chat`, `complete`, their streams, and `models`."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import httpx

from outrider.client.account import ZERO, Account, Totals
from outrider.client.answers import (
    Answer,
    Chunk,
    InvalidResponse,
    Message,
    StreamParser,
    answer_of,
    chat_body,
    parse_answer,
    parse_models,
    text_body,
)
from outrider.client.cache import ResponseCache, digest
from outrider.client.failures import ClientError, TornStream
from outrider.client.prices import Prices
from outrider.client.sending.attempt import Attempt, Call, Failure
from outrider.client.sending.resources import Resources
from outrider.client.sending.sender import Sender
from outrider.client.settings import LIMITS, RETRIES, TIMEOUTS, Limits, Retries, Timeouts
from outrider.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger("outrider.client")
MIN_PREDICTED = 2_000
"""Predicted tokens before their acceptance rate is judged."""


class AsyncClient:
    """A client for one server.  Use it on one event loop; any number of tasks may share it.

    base_url: such as http://127.0.0.1:8000/v1.  model: for requests that name none.  budget: the most that all requests
    together may cost, in the currency of `prices`; needs the model's price, and `max_tokens` in each request.  cache: a
    folder from which a request identical to an earlier one is answered.  transport: replaces that of httpx.

    Every request is answered once or raises one ClientError.  It is retried only before its answer begins.
    """

    def __init__(
        self, base_url: str, *, model: str | None = None, api_key: str | None = None, timeouts: Timeouts = TIMEOUTS,
        retries: Retries = RETRIES, limits: Limits = LIMITS, budget: Decimal | None = None,
        prices: Prices | None = None, cache: Path | None = None, transport: httpx.AsyncBaseTransport | None = None,
    ):  # fmt: skip
        _check_budget(budget, prices, model)
        self.model, self.prices = model, prices
        self._account, self._timeouts, self._retries = Account(budget), timeouts, retries
        self._resources = Resources(base_url, api_key, timeouts, limits, self._account, transport)
        self._sender = Sender(self._resources, retries)
        self._cache = None if cache is None else ResponseCache(Path(cache))
        self._predicts = True

    @property
    def usage(self) -> Totals:
        """Requests, tokens and costs so far."""
        return self._account.totals

    @property
    def budget(self) -> Decimal | None:
        return self._account.budget

    async def chat(self, messages: str | Sequence[Message], **settings: Any) -> Answer:
        """Answer a chat.  Raises ClientError.

        settings: fields of OpenAI's request body, such as max_tokens, temperature, seed and stop, and any others that
        the server supports; `prediction` may be a text.
        """
        return await self._whole("/chat/completions", chat_body(messages, settings))

    async def complete(self, prompt: str | Sequence[int], **settings: Any) -> Answer:
        """Continue a text or token ids.  Raises ClientError."""
        return await self._whole("/completions", text_body(prompt, settings))

    def chat_stream(self, messages: str | Sequence[Message], **settings: Any) -> AsyncGenerator[Chunk, None]:
        """Stream the answer to a chat.  Raises ClientError; TornStream if it breaks off."""
        return self._stream("/chat/completions", chat_body(messages, settings))

    def complete_stream(self, prompt: str | Sequence[int], **settings: Any) -> AsyncGenerator[Chunk, None]:
        """Stream the continuation of a text or token ids.  Raises ClientError; TornStream if it breaks off."""
        return self._stream("/completions", text_body(prompt, settings))

    async def models(self) -> list[str]:
        """Names of the server's models.  Raises ClientError."""
        attempt, names = await self._read(Call("/models", None, self._deadline()), parse_models)
        await attempt.complete(None)
        return names

    async def aclose(self) -> None:
        """Close all connections."""
        await self._resources.http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, path: str, body: dict[str, Any]) -> Answer:
        body = self._with_defaults(body)
        key = digest(self._resources.base_url, path, body)
        if self._cache is not None and (cached := self._cache.get(key)) is not None:
            self.usage.requests += 1
            self.usage.answered += 1
            self.usage.cached += 1
            return answer_of(cached, cost=ZERO, attempts=0, request_id=None, is_cached=True)
        call = self._call(path, body)
        with self._counted():
            attempt, raw = await self._read(call, parse_answer)
            answer = answer_of(raw, cost=None, attempts=call.attempts, request_id=call.request_id or raw.get("id"))
            cost = await attempt.complete(answer.usage)
        if self._cache is not None:
            self._cache.put(key, raw)
        return replace(answer, cost=cost, is_plain=call.is_plain)

    async def _read(self, call: Call, parse: Callable[[bytes], T]) -> tuple[Attempt, T]:
        """A parsed response, and the attempt that it belongs to.  Raises ClientError."""
        while True:
            attempt, body = await self._sender.open(call), bytearray()
            try:
                async for part in attempt.parts():
                    body += part
                return attempt, parse(bytes(body))
            except InvalidResponse as problem:
                await attempt.abort(is_server_fault=True)
                torn = _torn(call, self._resources.redacted(str(problem)))
                if not self._retries.torn or call.attempts >= self._retries.attempts:
                    raise torn from None
                failure = Failure(torn.message, is_retryable=True)
            except BaseException:
                await attempt.abort()
                raise
            await self._sender.back_off(call, failure)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        body = self._with_defaults(body) | {"stream": True}
        body.setdefault("stream_options", {"include_usage": True})
        call = self._call(path, body, is_stream=True)
        with self._counted():
            attempt, parser = await self._sender.open(call), StreamParser()
            try:
                async with aclosing(attempt.parts()) as parts:
                    async for part in parts:
                        for chunk in parser.feed(part):
                            yield chunk
                        if parser.is_done:
                            break
                for chunk in parser.end():
                    yield chunk
            except InvalidResponse as problem:
                await attempt.abort(parser.usage, is_server_fault=True)
                raise _torn(call, self._resources.redacted(str(problem)), parser.text) from None
            except BaseException:
                await attempt.abort(parser.usage)
                raise
            await attempt.complete(parser.usage)

    # ── shared ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _with_defaults(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the client's model, and without a prediction if too few are accepted."""
        if body.get("model") is None and self.model is not None:
            body = {"model": self.model, **body}
        if "prediction" in body and not self._predictions_pay():
            body = {name: value for name, value in body.items() if name != "prediction"}
        return body

    def _predictions_pay(self) -> bool:
        usage, share = self.usage, self._resources.limits.min_accepted
        accepted = usage.accepted_prediction_tokens
        predicted = accepted + usage.rejected_prediction_tokens
        pays = predicted < MIN_PREDICTED or accepted >= share * predicted
        if self._predicts and not pays:
            log.warning("predictions are left out: %d of %d predicted tokens were accepted", accepted, predicted)
        self._predicts = pays
        return pays

    def _call(self, path: str, body: Mapping[str, Any], is_stream: bool = False) -> Call:
        price = None if self.prices is None else self.prices.models.get(str(body.get("model")))
        return Call(path, body, self._deadline(), price, is_stream)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeouts.total_s

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.usage.requests += 1
        yield
        self.usage.answered += 1


def _torn(call: Call, reason: str, text: str = "") -> ClientError:
    message = f"the answer can't be used: {reason}; the request is not retried, since it may be charged"
    return call.failed(TornStream, message, text=text)


def _check_budget(budget: Decimal | None, prices: Prices | None, model: str | None) -> None:
    if budget is None:
        return
    if not isinstance(budget, Decimal) or not budget.is_finite() or budget < 0:
        raise ConfigError(f"budget must be a Decimal of at least 0, got {budget!r}; write Decimal('5.00')")
    if prices is None:
        raise ConfigError("a budget needs prices; give prices=load_prices(FILE)")
    if model is not None and model not in prices.models:
        raise ConfigError(f"a budget needs the price of {model!r}, which is missing in the table of prices; add it")
