"""A client of servers with OpenAI's API, on asyncio: `chat`, `complete`, their streams, and the models there are."""

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
    Message,
    Reading,
    Unreadable,
    answer_of,
    chat_body,
    read_answer,
    read_models,
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
"""Predicted tokens of which the server counted how many were accepted, before they are judged."""


class AsyncClient:
    """A client of one server.  Used on one event loop, by any number of tasks at once.

    base_url: such as http://127.0.0.1:8000/v1.  model: of requests that name none.  budget: the most that all requests
    together may cost, in the currency of `prices`; needs the model's price, and `max_tokens` in each request.  cache: a
    folder; a request that was answered before, word for word, is answered from there.  transport: instead of httpx's
    own.

    Every request is answered once or raises one ClientError.  It is sent again only before its answer began.
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
        """What was used so far."""
        return self._account.totals

    @property
    def budget(self) -> Decimal | None:
        return self._account.budget

    async def chat(self, messages: str | Sequence[Message], **settings: Any) -> Answer:
        """Answer a chat.  settings: as in OpenAI's body, such as max_tokens, temperature, seed, stop, and others that
        the server knows; `prediction` may be a text.  Raises a ClientError."""
        return await self._whole("/chat/completions", chat_body(messages, settings))

    async def complete(self, prompt: str | Sequence[int], **settings: Any) -> Answer:
        """Continue a text, or token ids.  Raises a ClientError."""
        return await self._whole("/completions", text_body(prompt, settings))

    def chat_stream(self, messages: str | Sequence[Message], **settings: Any) -> AsyncGenerator[Chunk, None]:
        """The answer to a chat as it is written.  Raises a ClientError, after some chunks a TornStream."""
        return self._stream("/chat/completions", chat_body(messages, settings))

    def complete_stream(self, prompt: str | Sequence[int], **settings: Any) -> AsyncGenerator[Chunk, None]:
        """A continuation as it is written.  Raises a ClientError, after some chunks a TornStream."""
        return self._stream("/completions", text_body(prompt, settings))

    async def models(self) -> list[str]:
        """Names of the server's models.  Raises a ClientError."""
        attempt, data = await self._read(Call("/models", None, self._deadline()), read_models)
        await attempt.answered(None)
        return data

    async def aclose(self) -> None:
        """Close all connections."""
        await self._resources.http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, path: str, asked: dict[str, Any]) -> Answer:
        body = self._completed(asked)
        key = digest(self._resources.base_url, path, body)
        if self._cache is not None and (found := self._cache.get(key)) is not None:
            self.usage.requests += 1
            self.usage.answered += 1
            self.usage.cached += 1
            return answer_of(found, cost=ZERO, attempts=0, request_id=None, is_cached=True)
        call = self._call(path, body)
        with self._counted():
            attempt, raw = await self._read(call, read_answer)
            answer = answer_of(raw, cost=None, attempts=call.attempts, request_id=call.request_id or raw.get("id"))
            cost = await attempt.answered(answer.usage)
        if self._cache is not None:
            self._cache.put(key, raw)
        return replace(answer, cost=cost, is_plain=call.is_plain)

    async def _read(self, call: Call, read: Callable[[bytes], T]) -> tuple[Attempt, T]:
        """A whole answer, and the attempt that brought it.  Raises a ClientError."""
        while True:
            attempt, data = await self._sender.open(call), bytearray()
            try:
                async for part in attempt.parts():
                    data += part
                return attempt, read(bytes(data))
            except Unreadable as problem:
                await attempt.broken(is_ours=False)
                torn = _torn(call, self._resources.redacted(str(problem)))
                if not self._retries.torn or call.attempts >= self._retries.attempts:
                    raise torn from None
                failure = Failure(torn.message, is_retried=True)
            except BaseException:
                await attempt.broken()
                raise
            await self._sender.pause(call, failure)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stream(self, path: str, asked: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        body = self._completed(asked) | {"stream": True}
        body.setdefault("stream_options", {"include_usage": True})
        call = self._call(path, body, is_stream=True)
        with self._counted():
            attempt, reading = await self._sender.open(call), Reading()
            try:
                async with aclosing(attempt.parts()) as parts:
                    async for part in parts:
                        for chunk in reading.feed(part):
                            yield chunk
                        if reading.is_done:
                            break
                for chunk in reading.end():
                    yield chunk
            except Unreadable as problem:
                await attempt.broken(reading.usage, is_ours=False)
                raise _torn(call, self._resources.redacted(str(problem)), reading.text) from None
            except BaseException:
                await attempt.broken(reading.usage)
                raise
            await attempt.answered(reading.usage)

    # ── what both need ────────────────────────────────────────────────────────────────────────────────────────────────

    def _completed(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The body with the client's model, and without a prediction where these do not pay."""
        if asked.get("model") is None and self.model is not None:
            asked = {"model": self.model, **asked}
        if "prediction" in asked and not self._predictions_pay():
            asked = {name: value for name, value in asked.items() if name != "prediction"}
        return asked

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
    message = f"the answer can't be used: {reason}; it was not asked for again, since it may be charged"
    return call.failed(TornStream, message, text=text)


def _check_budget(budget: Decimal | None, prices: Prices | None, model: str | None) -> None:
    if budget is None:
        return
    if not isinstance(budget, Decimal) or not budget.is_finite() or budget < 0:
        raise ConfigError(f"budget must be a Decimal of at least 0, got {budget!r}; write Decimal('5.00')")
    if prices is None:
        raise ConfigError("a budget needs prices; give prices=load_prices(FILE)")
    if model is not None and model not in prices.models:
        raise ConfigError(f"a budget needs the price of {model!r}, which the table of prices does not have; add it")
