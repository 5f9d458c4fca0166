"""What all requests of a client share: connections, permits, rate limits, the account and the breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import httpx

from outrider.client.account import ZERO, Account
from outrider.client.prices import Price, highest_cost
from outrider.client.sending.rates import Breaker, TokenBucket
from outrider.client.settings import Limits, Timeouts
from outrider.errors import ConfigError

LOCAL = {"localhost", "127.0.0.1", "::1"}


def base_of(url: str) -> str:
    """The base address for paths such as /chat/completions: `url`, with /v1 if it has no path.

    Raises ConfigError if it is not an address.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


class Resources:
    """Shared by all requests of a client.  Used on one event loop."""

    def __init__(
        self, base_url: str, api_key: str | None, timeouts: Timeouts, limits: Limits, account: Account,
        transport: httpx.AsyncBaseTransport | None,
    ):  # fmt: skip
        self.base_url, self.timeouts, self.limits, self.account = base_of(base_url), timeouts, limits, account
        self._key = api_key
        self.permits = asyncio.Semaphore(limits.concurrency)
        self.requests = None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute)
        self.tokens = None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute)
        self.breaker = Breaker(limits.failures, limits.reset_s)
        headers = {"user-agent": "outrider", "accept": "application/json"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self.http = httpx.AsyncClient(
            headers=headers,
            transport=transport,
            trust_env=urlsplit(self.base_url).hostname not in LOCAL,  # proxies do not apply to this machine
            timeout=httpx.Timeout(None, connect=timeouts.connect_s, write=timeouts.write_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=limits.concurrency),
        )

    def highest_cost(self, body: Mapping[str, Any], size: int, price: Price | None) -> Decimal:
        """The most that an attempt can cost; 0 if that is unknown and there is no budget.  Raises ConfigError.

        size: of the body in bytes.
        """
        if self.account.budget is None:
            with suppress(ConfigError):
                return ZERO if price is None else highest_cost(body, size, price)
            return ZERO
        if price is None:
            raise ConfigError(
                f"a budget needs the price of {body.get('model')!r}, which is missing in the table of prices; add it"
            )
        return highest_cost(body, size, price)

    def redacted(self, text: str) -> str:
        """A server's message without the API key, which some servers repeat."""
        return text.replace(self._key, "***") if self._key else text
