"""One request and every attempt to send it: what is reserved before, how it fails, and when its answer begins."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import uuid4

import httpx

from outrider.client.account import ZERO
from outrider.client.answers import InvalidResponse, ServerError, is_speculative, parse_error, without_speculation
from outrider.client.failures import CircuitOpen, ClientError, RefusedError, Unavailable
from outrider.client.prices import Price, Usage, cost_of
from outrider.client.sending.backoff import is_retryable, retry_after_s
from outrider.client.sending.resources import Resources

log = logging.getLogger("outrider.client")
LARGEST_ERROR_BYTES = 64 * 2**10
DRAIN_S = 1.0
"""Seconds that a stream has to end after its last event; then its connection is closed."""
BYTES_PER_TOKEN = 4
"""Estimate for the token rate only, until the server has counted them."""
UNSENT = (
    httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.LocalProtocolError, httpx.UnsupportedProtocol,
)  # fmt: skip
"""Errors of requests that never reached the server."""
HOPELESS = (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.WriteTimeout)


@dataclass(eq=False, slots=True)
class Call:
    """One request of a caller, however often it is sent."""

    path: str
    body: Mapping[str, Any] | None
    """None for a GET request."""
    deadline: float
    """On the clock of `time.monotonic`."""
    price: Price | None = None
    is_stream: bool = False
    attempts: int = 0
    before: int = 0
    """Attempts with other servers."""
    is_plain: bool = False
    """Resent without speculation."""
    request_id: str | None = None
    """The server's, of the last attempt."""
    id: str = field(default_factory=lambda: uuid4().hex)
    """The same for all attempts: a server that supports idempotency keys answers once."""

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def drop_speculation(self) -> bool:
        """Send the request without speculation from now on; False if it has none."""
        if self.body is None or self.is_plain or not is_speculative(self.body):
            return False
        self.body, self.is_plain = without_speculation(self.body), True
        return True

    def failed(self, kind: type[ClientError], reason: str, **fields: Any) -> ClientError:
        return kind(reason, self.before + self.attempts, self.request_id, **fields)


class Failure(NamedTuple):
    """Why an attempt has no answer."""

    reason: str
    is_retryable: bool
    may_be_charged: bool = True
    """The server may have worked on it."""
    status: int | None = None
    """None if no complete response arrived."""
    retry_after_s: float | None = None
    """The pause that the server asks for."""
    error: ServerError = ServerError("")

    def final(self, call: Call) -> ClientError:
        """The caller's error if the request is not retried."""
        if self.status is not None and not self.is_retryable:
            return call.failed(RefusedError, self.reason, status=self.status)
        times = "once" if call.attempts == 1 else f"{call.attempts} times"
        return call.failed(Unavailable, f"no answer; sent {times}, last: {self.reason}")


class Attempt:
    """Sends a call once.  `start`, then `parts`, then exactly one of `complete` and `abort`."""

    def __init__(self, resources: Resources, call: Call):
        """Raises ConfigError if a budget can't be guaranteed for this request."""
        self.resources, self.call = resources, call
        self.content, self.max_cost, self.tokens = None, ZERO, 0
        if call.body is not None:
            self.content = json.dumps(call.body, separators=(",", ":")).encode()
            self.max_cost = resources.highest_cost(call.body, len(self.content), call.price)
            self.tokens = len(self.content) // BYTES_PER_TOKEN + _max_tokens(call.body)
        self.response: httpx.Response | None = None
        self._parts: AsyncIterator[bytes] | None = None
        self._first = b""

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Failure | None:
        """Send, and return when the first byte of an answer has arrived, or with the failure.  Raises ClientError if
        nothing may be sent."""
        try:
            async with asyncio.timeout(self.call.left_s):
                await self._acquire()
        except TimeoutError:
            total_s = self.resources.timeouts.total_s
            message = f"no capacity for the request within {total_s:g} s; send fewer at once"
            raise self.call.failed(Unavailable, message) from None
        try:
            failure = await self._send()
        except BaseException:
            await self.abort()
            raise
        if failure is not None:
            self._fail(failure)
            await self._close()
        return failure

    async def _acquire(self) -> None:
        """Wait for concurrency, rates and budget, and ask the breaker."""
        resources, call = self.resources, self.call
        await resources.permits.acquire()
        try:
            if resources.requests is not None:
                await resources.requests.take()
            if resources.tokens is not None and self.tokens:
                await resources.tokens.take(self.tokens)
            await resources.account.reserve(self.max_cost, call.attempts)
            try:
                resources.breaker.enter(call.attempts)
            except CircuitOpen:
                resources.account.release(self.max_cost)
                raise
        except BaseException:
            resources.permits.release()
            raise

    async def _send(self) -> Failure | None:
        resources, call = self.resources, self.call
        call.attempts += 1
        resources.account.totals.attempts += call.body is not None
        limit_s = min(resources.timeouts.first_byte_s, call.left_s) if call.is_stream else call.left_s
        until = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(until):
                self.response = await resources.http.send(self._request(), stream=True)
                call.request_id = self.response.headers.get("x-request-id")
                log.debug("%s, attempt %d: %d", call.id, call.attempts, self.response.status_code)
                if not self.response.is_success:
                    return await self._refusal(self.response)
                self._parts = self.response.aiter_bytes()
                self._first = await anext(self._parts, b"")
        except TimeoutError:
            return Failure(f"no byte of an answer within {limit_s:.3g} s", is_retryable=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _failure(error, resources.base_url)
        return None

    def _request(self) -> httpx.Request:
        resources, call = self.resources, self.call
        headers = {"x-client-request-id": f"outrider-{call.id}.{call.attempts}"}
        if call.body is not None:
            key = f"outrider-{call.id}" + ("-plain" if call.is_plain else "")  # another body is another request
            headers |= {"content-type": "application/json", "idempotency-key": key}
        if call.is_stream:
            headers["accept"] = "text/event-stream"
        method, url = "GET" if call.body is None else "POST", resources.base_url + call.path
        return resources.http.build_request(method, url, content=self.content, headers=headers)

    async def _refusal(self, response: httpx.Response) -> Failure:
        body = bytearray()
        with suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(self.resources.timeouts.idle_s):
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > LARGEST_ERROR_BYTES:
                        break
        status, error = response.status_code, parse_error(bytes(body))
        reason = f"HTTP {status}" + (f": {error.message}" if error.message else "")
        is_retried = is_retryable(status, response.headers, error.codes)
        delay_s = retry_after_s(response.headers, time.time())
        if is_retried and delay_s is not None:
            reason += f" (the server asks for a pause of {delay_s:.3g} s)"
        return Failure(self.resources.redacted(reason), is_retried, False, status, delay_s, error)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The bytes of the answer as they arrive.  Raises InvalidResponse if they stop too early."""
        assert self._parts is not None
        size, limit, part = 0, self.resources.limits.answer_bytes, self._first
        while part:
            size += len(part)
            if size > limit:
                raise InvalidResponse(f"more than {limit} bytes, the limit of an answer")
            yield part
            part = await self._next(self._parts)

    async def _next(self, parts: AsyncIterator[bytes]) -> bytes:
        """The next bytes; empty at the end."""
        idle_s = min(self.resources.timeouts.idle_s, self.call.left_s)
        try:
            async with asyncio.timeout(idle_s):
                return await anext(parts, b"")
        except TimeoutError:
            raise InvalidResponse(f"no byte for {idle_s:.3g} s") from None
        except httpx.HTTPError as error:
            raise InvalidResponse(_described(error)) from None

    # ── ending ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def complete(self, usage: Usage | None) -> Decimal | None:
        """The answer is complete; returns its cost."""
        cost = cost_of(usage, self.call.price)
        if self.call.body is None:  # nothing was generated
            self.resources.account.release(self.max_cost)
        else:
            self.resources.account.charge(self.max_cost, usage, cost)
        self.resources.breaker.success()
        try:
            await self._drain()
            await self._close()
        finally:
            self._release(None if usage is None else usage.total_tokens)
        return cost

    async def abort(self, usage: Usage | None = None, is_server_fault: bool = False) -> None:
        """The answer is incomplete, because of the server or because the caller stopped."""
        self._mark_uncertain()
        if is_server_fault:
            self.resources.breaker.failure()
        else:
            self.resources.breaker.leave()
        self._release(None if usage is None else usage.total_tokens)
        await self._close()

    def _fail(self, failure: Failure) -> None:
        """There is no answer."""
        breaker = self.resources.breaker
        if failure.may_be_charged:
            self._mark_uncertain()
        else:
            self.resources.account.release(self.max_cost)
        if failure.status == 429:
            breaker.leave()
        elif failure.status is None or failure.status >= 500:
            breaker.failure()
        else:
            breaker.success()
        self._release(None if failure.may_be_charged else 0)

    def _mark_uncertain(self) -> None:
        """The attempt may be charged, unless it was a GET request."""
        if self.call.body is None:
            self.resources.account.release(self.max_cost)
        else:
            self.resources.account.mark_uncertain(self.max_cost)

    def _release(self, used_tokens: int | None) -> None:
        """Release the permit, and the tokens of the rate limit that were not used."""
        self.resources.permits.release()
        if self.resources.tokens is not None and used_tokens is not None:
            self.resources.tokens.correct(used_tokens - self.tokens)

    async def _drain(self) -> None:
        """Read what follows a complete stream, so that its connection can be reused."""
        with suppress(TimeoutError, httpx.HTTPError, InvalidResponse):
            async with asyncio.timeout(DRAIN_S):
                while self._parts is not None and await self._next(self._parts):
                    pass

    async def _close(self) -> None:
        if self.response is not None:
            with suppress(httpx.HTTPError):
                await self.response.aclose()


def _max_tokens(body: Mapping[str, Any]) -> int:
    """The limit of an answer's tokens; 0 if the request has none."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return limit if isinstance(limit, int) else 0


def _failure(error: Exception, server: str) -> Failure:
    is_retried = not isinstance(error, (*HOPELESS, httpx.InvalidURL))
    reason = _described(error)
    if isinstance(error, httpx.ConnectError):
        reason = f"{server} can't be reached ({reason}); start a server there, or give another address"
    return Failure(reason, is_retried, may_be_charged=not isinstance(error, UNSENT))


def _described(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
