"""A client for servers with OpenAI's API, on asyncio: `chat`, `complete`, their streams, and `models`."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
from outrider.client.failures import CircuitOpen, ClientError, TornStream, Unavailable
from outrider.client.prices import Prices
from outrider.client.sending.attempt import Attempt, Call, Failure
from outrider.client.sending.resources import Resources
from outrider.client.sending.sender import Sender
from outrider.client.settings import LIMITS, RETRIES, TIMEOUTS, Fallback, Limits, Profile, Retries, Timeouts
from outrider.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger("outrider.client")
MIN_PREDICTED = 2_000
"""Predicted tokens before their acceptance rate is judged."""


class Route(NamedTuple):
    """A server and a model that answer requests."""

    resources: Resources
    sender: Sender
    model: str | None
    """None: the model that the request names, or else the client's."""


class AsyncClient:
    """A client for a server, and for others as fallbacks.  Use it on one event loop; any number of tasks may share it.

    base_url: such as http://127.0.0.1:8000/v1.  model: for requests that name none.  budget: the most that all requests
    together may cost, in the currency of `prices`; needs the model's price, and `max_tokens` in each request.  cache: a
    folder from which a request identical to an earlier one is answered.  fallbacks: asked in this order for what the
    server does not answer, within the same budget.  fallback_on: the errors after which the next one is asked; none is
    once a stream has begun.  profile: defaults of the requests.  transport: replaces that of httpx.

    Every request is answered once or raises one ClientError.  It is retried only before its answer begins.
    """

    def __init__(
        self, base_url: str, *, model: str | None = None, api_key: str | None = None, timeouts: Timeouts | None = None,
        retries: Retries = RETRIES, limits: Limits = LIMITS, budget: Decimal | None = None,
        prices: Prices | None = None, cache: Path | None = None, transport: httpx.AsyncBaseTransport | None = None,
        fallbacks: Sequence[Fallback] = (), fallback_on: tuple[type[ClientError], ...] = (Unavailable, CircuitOpen),
        profile: Profile | None = None,
    ):  # fmt: skip
        for name in (model, *(fallback.model for fallback in fallbacks)):
            _check_budget(budget, prices, name)
        self.model, self.prices = model, prices
        self._account, self._retries, self._fallback_on = Account(budget), retries, fallback_on
        self._settings = {} if profile is None else profile.settings
        default = TIMEOUTS if profile is None else profile.timeouts

        def route(server: Fallback) -> Route:
            is_clients = server.base_url is None
            resources = Resources(
                server.base_url or base_url, server.api_key or (api_key if is_clients else None),
                server.timeouts or timeouts or default, server.limits or limits, self._account, transport,
            )  # fmt: skip
            return Route(resources, Sender(resources, server.retries or retries), server.model)

        self._routes = [route(Fallback(base_url, api_key=api_key)), *map(route, fallbacks)]
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
        first = self._routes[0]
        attempt, names = await self._read(first, Call("/models", None, _deadline(first)), parse_models)
        await attempt.complete(None)
        return names

    async def aclose(self) -> None:
        """Close all connections."""
        for route in self._routes:
            await route.resources.http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, path: str, body: dict[str, Any]) -> Answer:
        if self._cache is not None and (cached := self._cache.get(self._key(self._routes[0], path, body))) is not None:
            self.usage.requests += 1
            self.usage.answered += 1
            self.usage.cached += 1
            return answer_of(cached, cost=ZERO, attempts=0, request_id=None, is_cached=True)
        with self._counted():
            return await self._by_first(path, body, self._answer)

    async def _answer(self, route: Route, path: str, body: dict[str, Any], before: int) -> Answer:
        """A whole answer by this server.  before: attempts with others."""
        call = self._call(route, path, body, before)
        attempt, raw = await self._read(route, call, parse_answer)
        answer = answer_of(
            raw, cost=None, attempts=before + call.attempts, request_id=call.request_id or raw.get("id"),
            server=route.resources.base_url,
        )  # fmt: skip
        cost = await attempt.complete(answer.usage)
        if self._cache is not None:
            self._cache.put(self._key(route, path, body), raw)
        return replace(answer, cost=cost, is_plain=call.is_plain)

    async def _by_first(
        self, path: str, body: dict[str, Any], work: Callable[[Route, str, dict[str, Any], int], Awaitable[T]]
    ) -> T:  # fmt: skip
        """What `work` returns with the first server with which it does not fail.  Raises the last one's error."""
        attempts = 0
        for route in self._routes[:-1]:
            try:
                return await work(route, path, body, attempts)
            except self._fallback_on as error:
                attempts = max(attempts, error.attempts)
                log.warning("%s: %s; the next server is asked", route.resources.base_url, type(error).__name__)
        return await work(self._routes[-1], path, body, attempts)

    def _key(self, route: Route, path: str, body: dict[str, Any]) -> str:
        return digest(route.resources.base_url, path, self._with_defaults(route, body))

    async def _read(self, route: Route, call: Call, parse: Callable[[bytes], T]) -> tuple[Attempt, T]:
        """A parsed response, and the attempt that it belongs to.  Raises ClientError."""
        while True:
            attempt, body = await route.sender.open(call), bytearray()
            try:
                async for part in attempt.parts():
                    body += part
                return attempt, parse(bytes(body))
            except InvalidResponse as problem:
                await attempt.abort(is_server_fault=True)
                torn, retries = _torn(call, route.resources.redacted(str(problem))), route.sender.retries
                if not retries.torn or call.attempts >= retries.attempts:
                    raise torn from None
                failure = Failure(torn.message, is_retryable=True)
            except BaseException:
                await attempt.abort()
                raise
            await route.sender.back_off(call, failure)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        body = {"stream_options": {"include_usage": True}} | body | {"stream": True}
        with self._counted():
            attempt, parser = await self._by_first(path, body, self._open), StreamParser()
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
                raise _torn(attempt.call, attempt.resources.redacted(str(problem)), parser.text) from None
            except BaseException:
                await attempt.abort(parser.usage)
                raise
            await attempt.complete(parser.usage)

    async def _open(self, route: Route, path: str, body: dict[str, Any], before: int) -> Attempt:
        """The attempt with this server whose stream began.  before: attempts with others."""
        return await route.sender.open(self._call(route, path, body, before, is_stream=True))

    # ── shared ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _with_defaults(self, route: Route, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the profile's settings and the server's model, and without a prediction if too few are
        accepted."""
        body = self._settings | body
        if (model := route.model or body.get("model") or self.model) is not None:
            body = {**body, "model": model}
        if "prediction" in body and not self._predictions_pay():
            body = {name: value for name, value in body.items() if name != "prediction"}
        return body

    def _predictions_pay(self) -> bool:
        usage, share = self.usage, self._routes[0].resources.limits.min_accepted
        accepted = usage.accepted_prediction_tokens
        predicted = accepted + usage.rejected_prediction_tokens
        pays = predicted < MIN_PREDICTED or accepted >= share * predicted
        if self._predicts and not pays:
            log.warning("predictions are left out: %d of %d predicted tokens were accepted", accepted, predicted)
        self._predicts = pays
        return pays

    def _call(
        self, route: Route, path: str, body: dict[str, Any], before: int, is_stream: bool = False
    ) -> Call:  # fmt: skip
        body = self._with_defaults(route, body)
        price = None if self.prices is None else self.prices.models.get(str(body.get("model")))
        return Call(path, body, _deadline(route), price, is_stream, before=before)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.usage.requests += 1
        yield
        self.usage.answered += 1


def _deadline(route: Route) -> float:
    return time.monotonic() + route.resources.timeouts.total_s


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
