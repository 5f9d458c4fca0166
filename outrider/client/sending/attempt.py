"""One request, and each time that it is sent: what is reserved before, how it fails, and when its answer begins."""

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
from outrider.client.answers import Refused, Unreadable, is_speculative, refused, without_speculation
from outrider.client.failures import CircuitOpen, ClientError, RefusedError, Unavailable
from outrider.client.prices import Price, Usage, cost_of
from outrider.client.sending.pauses import is_worth_another, wanted_s
from outrider.client.sending.resources import Resources

log = logging.getLogger("outrider.client")
LARGEST_ERROR_BYTES = 64 * 2**10
DRAIN_S = 1.0
"""Seconds that a stream has, after its last event, to end; else its connection is closed."""
BYTES_PER_TOKEN = 4
"""Estimate for the rate of tokens only, until the server has counted them."""
UNSENT = (
    httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.LocalProtocolError, httpx.UnsupportedProtocol,
)  # fmt: skip
"""Errors of a request of which the server got nothing."""
HOPELESS = (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.WriteTimeout)


@dataclass(eq=False, slots=True)
class Call:
    """One request of a caller, however often it is sent."""

    path: str
    body: Mapping[str, Any] | None
    """None asks with GET."""
    deadline: float
    """A time of `time.monotonic`."""
    price: Price | None = None
    is_stream: bool = False
    attempts: int = 0
    is_plain: bool = False
    """Sent again without speculation."""
    request_id: str | None = None
    """The server's, of the last attempt."""
    id: str = field(default_factory=lambda: uuid4().hex)
    """The same for all attempts: a server that knows idempotency keys answers once."""

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def make_plain(self) -> bool:
        """Leave the drafter out from now on; False where the request has nothing to leave out."""
        if self.body is None or self.is_plain or not is_speculative(self.body):
            return False
        self.body, self.is_plain = without_speculation(self.body), True
        return True

    def failed(self, kind: type[ClientError], reason: str, **more: Any) -> ClientError:
        return kind(reason, self.attempts, self.request_id, **more)


class Failure(NamedTuple):
    """Why an attempt has no answer."""

    reason: str
    is_retried: bool
    is_charged: bool = True
    """The server may have worked on it."""
    status: int | None = None
    """None where no whole answer arrived."""
    wanted_s: float | None = None
    """The pause that the server wants."""
    refused: Refused = Refused("")

    def final(self, call: Call) -> ClientError:
        """What the caller is told when it is not sent again."""
        if self.status is not None and not self.is_retried:
            return call.failed(RefusedError, self.reason, status=self.status)
        times = "once" if call.attempts == 1 else f"{call.attempts} times"
        return call.failed(Unavailable, f"no answer; sent {times}, last: {self.reason}")


class Failed(Exception):
    """An attempt has no answer."""

    def __init__(self, failure: Failure):
        super().__init__(failure.reason)
        self.failure = failure


class Attempt:
    """One sending of a call.  `begin`, then `parts`, then exactly one of `answered` and `broken`."""

    def __init__(self, resources: Resources, call: Call):
        """Raises ConfigError where a budget can't be kept with this request."""
        self.resources, self.call = resources, call
        self.content, self.most, self.tokens = None, ZERO, 0
        if call.body is not None:
            self.content = json.dumps(call.body, separators=(",", ":")).encode()
            self.most = resources.highest_cost(call.body, len(self.content), call.price)
            self.tokens = len(self.content) // BYTES_PER_TOKEN + _asked(call.body)
        self.response: httpx.Response | None = None
        self._parts: AsyncIterator[bytes] | None = None
        self._first = b""

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self) -> None:
        """Send, and return when the first byte of an answer is there.  Raises Failed, or a ClientError."""
        try:
            async with asyncio.timeout(self.call.left_s):
                await self._take()
        except TimeoutError:
            total_s = self.resources.timeouts.total_s
            message = f"no place for the request within {total_s:g} s; send fewer at once"
            raise self.call.failed(Unavailable, message) from None
        try:
            await self._send()
        except Failed as failed:
            self._leave(failed.failure)
            await self._close()
            raise
        except BaseException:
            await self.broken()
            raise

    async def _take(self) -> None:
        """A place among those under way, the rates' leave, the budget's, and the breaker's."""
        resources, call = self.resources, self.call
        await resources.permits.acquire()
        try:
            if resources.requests is not None:
                await resources.requests.take()
            if resources.tokens is not None and self.tokens:
                await resources.tokens.take(self.tokens)
            await resources.account.reserve(self.most, call.attempts)
            try:
                resources.breaker.enter(call.attempts)
            except CircuitOpen:
                resources.account.free(self.most)
                raise
        except BaseException:
            resources.permits.release()
            raise

    async def _send(self) -> None:
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
                    raise Failed(await self._refusal(self.response))
                self._parts = self.response.aiter_bytes()
                self._first = await anext(self._parts, b"")
        except TimeoutError:
            raise Failed(Failure(f"no byte of an answer within {limit_s:.3g} s", is_retried=False)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Failed(_failure(error, resources.base_url)) from None

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
        status, found = response.status_code, refused(bytes(body))
        reason = f"HTTP {status}" + (f": {found.message}" if found.message else "")
        is_retried = is_worth_another(status, response.headers, found.codes)
        wanted = wanted_s(response.headers, time.time())
        if is_retried and wanted is not None:
            reason += f" (it wants to be left alone for {wanted:.3g} s)"
        return Failure(self.resources.redacted(reason), is_retried, False, status, wanted, found)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The bytes of the answer as they arrive.  Raises Unreadable where they stop too early."""
        assert self._parts is not None
        size, limit, part = 0, self.resources.limits.answer_bytes, self._first
        while part:
            size += len(part)
            if size > limit:
                raise Unreadable(f"more than {limit} bytes, the limit of an answer")
            yield part
            part = await self._next(self._parts)

    async def _next(self, parts: AsyncIterator[bytes]) -> bytes:
        """The next bytes; none at the end."""
        idle_s = min(self.resources.timeouts.idle_s, self.call.left_s)
        try:
            async with asyncio.timeout(idle_s):
                return await anext(parts, b"")
        except TimeoutError:
            raise Unreadable(f"no byte for {idle_s:.3g} s") from None
        except httpx.HTTPError as error:
            raise Unreadable(_described(error)) from None

    # ── over ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def answered(self, usage: Usage | None) -> Decimal | None:
        """The answer is whole; what it cost."""
        cost = cost_of(usage, self.call.price)
        if self.call.body is None:  # no text was asked for
            self.resources.account.free(self.most)
        else:
            self.resources.account.charge(self.most, usage, cost)
        self.resources.breaker.success()
        try:
            await self._drain()
            await self._close()
        finally:
            self._give_back(None if usage is None else usage.total_tokens)
        return cost

    async def broken(self, usage: Usage | None = None, is_ours: bool = True) -> None:
        """The answer is not whole.  is_ours: the caller wanted no more of it, so the server is not to blame."""
        self._doubt()
        if is_ours:
            self.resources.breaker.leave()
        else:
            self.resources.breaker.failure()
        self._give_back(None if usage is None else usage.total_tokens)
        await self._close()

    def _leave(self, failure: Failure) -> None:
        """There is no answer."""
        breaker = self.resources.breaker
        if failure.is_charged:
            self._doubt()
        else:
            self.resources.account.free(self.most)
        if failure.status == 429:
            breaker.leave()
        elif failure.status is None or failure.status >= 500:
            breaker.failure()
        else:
            breaker.success()
        self._give_back(None if failure.is_charged else 0)

    def _doubt(self) -> None:
        """It may be charged, unless it asked for no text."""
        if self.call.body is None:
            self.resources.account.free(self.most)
        else:
            self.resources.account.doubt(self.most)

    def _give_back(self, used: int | None) -> None:
        """The place, and tokens of the rate that were not used."""
        self.resources.permits.release()
        if self.resources.tokens is not None and used is not None:
            self.resources.tokens.correct(used - self.tokens)

    async def _drain(self) -> None:
        """Read what follows a whole stream, so that its connection can carry another request."""
        with suppress(TimeoutError, httpx.HTTPError, Unreadable):
            async with asyncio.timeout(DRAIN_S):
                while self._parts is not None and await self._next(self._parts):
                    pass

    async def _close(self) -> None:
        if self.response is not None:
            with suppress(httpx.HTTPError):
                await self.response.aclose()


def _asked(body: Mapping[str, Any]) -> int:
    """Tokens that an answer may have, as far as the request says."""
    longest = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return longest if isinstance(longest, int) else 0


def _failure(error: Exception, server: str) -> Failure:
    is_retried = not isinstance(error, (*HOPELESS, httpx.InvalidURL))
    reason = _described(error)
    if isinstance(error, httpx.ConnectError):
        reason = f"{server} can't be reached ({reason}); start a server there, or give another address"
    return Failure(reason, is_retried, is_charged=not isinstance(error, UNSENT))


def _described(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
