"""The client without asyncio: the same requests, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import httpx

from outrider.client.account import Totals
from outrider.client.answers import Answer, Chunk, Message
from outrider.client.asynchronous import AsyncClient
from outrider.client.failures import CircuitOpen, ClientError, Unavailable
from outrider.client.prices import Prices
from outrider.client.settings import LIMITS, RETRIES, Fallback, Limits, Profile, Retries, Timeouts

T = TypeVar("T")


class Client:
    """Like AsyncClient, for programs without an event loop.  Thread-safe."""

    def __init__(
        self, base_url: str, *, model: str | None = None, api_key: str | None = None, timeouts: Timeouts | None = None,
        retries: Retries = RETRIES, limits: Limits = LIMITS, budget: Decimal | None = None,
        prices: Prices | None = None, cache: Path | None = None, transport: httpx.AsyncBaseTransport | None = None,
        fallbacks: Sequence[Fallback] = (), fallback_on: tuple[type[ClientError], ...] = (Unavailable, CircuitOpen),
        profile: Profile | None = None,
    ):  # fmt: skip
        self._client = AsyncClient(
            base_url, model=model, api_key=api_key, timeouts=timeouts, retries=retries, limits=limits, budget=budget,
            prices=prices, cache=cache, transport=transport, fallbacks=fallbacks, fallback_on=fallback_on,
            profile=profile,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

    @property
    def model(self) -> str | None:
        """The model of requests that name none."""
        return self._client.model

    @model.setter
    def model(self, name: str | None) -> None:
        self._client.model = name

    @property
    def usage(self) -> Totals:
        """Requests, tokens and costs so far."""
        return self._client.usage

    def chat(self, messages: str | Sequence[Message], **settings: Any) -> Answer:
        """Answer a chat.  Raises ClientError."""
        return self._run(self._client.chat(messages, **settings))

    def complete(self, prompt: str | Sequence[int], **settings: Any) -> Answer:
        """Continue a text or token ids.  Raises ClientError."""
        return self._run(self._client.complete(prompt, **settings))

    def chat_stream(self, messages: str | Sequence[Message], **settings: Any) -> Iterator[Chunk]:
        """Stream the answer to a chat.  Raises ClientError; TornStream if it breaks off."""
        return self._streamed(self._client.chat_stream(messages, **settings))

    def complete_stream(self, prompt: str | Sequence[int], **settings: Any) -> Iterator[Chunk]:
        """Stream the continuation of a text or token ids.  Raises ClientError; TornStream if it breaks off."""
        return self._streamed(self._client.complete_stream(prompt, **settings))

    def models(self) -> list[str]:
        """Names of the server's models.  Raises ClientError."""
        return self._run(self._client.models())

    def close(self) -> None:
        """Close all connections.  The client can't be used afterwards."""
        if self._loop.is_closed():
            return
        self._run(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C, the request is abandoned
            raise

    def _streamed(self, chunks: AsyncGenerator[Chunk, None]) -> Iterator[Chunk]:
        try:
            while (chunk := self._run(_next(chunks))) is not None:
                yield chunk
        finally:
            self._run(chunks.aclose())


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)
