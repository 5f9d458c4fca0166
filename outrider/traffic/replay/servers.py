"""The servers of a replay: which models each serves, and its counters.  No torch."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from outrider.errors import ConfigError, DataError
from outrider.traffic.address import Address, address_of
from outrider.traffic.counters import Counters, SpeculationStats, scrape

RECHECK_S, RECHECKS = 0.1, 10
"""Servers may count a step after sending its tokens, so counters are read until they are stable, or RECHECKS times."""


class Server(NamedTuple):
    """A server before the replay."""

    address: Address
    models: tuple[str, ...]
    """Empty if the server does not list them."""
    before: Counters | None
    no_counters: str | None
    """Why it has no draft counters; None if it has them."""

    @property
    def url(self) -> str:
        return self.address.shown

    def model_for(self, requested: str | None) -> str | None:
        """The requested model, or the first one if the server does not have it."""
        return requested if requested in self.models or not self.models else self.models[0]

    def acceptance(self, key: str | None = None) -> SpeculationStats:
        """Counters since the start of the replay, once they are stable.  Raises DataError without counters."""
        assert self.before is not None
        with _client(self.address, key) as client:
            now = scrape(self.url, client)
            for _ in range(RECHECKS):
                time.sleep(RECHECK_S)
                former, now = now, scrape(self.url, client)
                if former == now:
                    break
        return now.since(self.before)


def check_servers(urls: Sequence[str]) -> None:
    """Raises ConfigError unless all are addresses of servers and all differ."""
    if not urls:
        raise ConfigError("no server was given; give one or more addresses")
    shown = [address_of(url).shown for url in urls]
    for url in shown:
        if shown.count(url) > 1:
            raise ConfigError(
                f"{url} is named twice, and its counters would mix both; name every server once, and replay twice to "
                "measure the noise"
            )


def server_at(url: str, key: str | None = None) -> Server:
    """The server at `url`, with its models and counters.  Raises DataError if it does not answer."""
    address = address_of(url)
    with _client(address, key) as client:
        try:
            answer = client.get(address.shown + "/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"no server at {address.shown}: {reason}; start it, or correct the address") from None
        if answer.status_code in (401, 403):
            raise DataError(
                f"{address.shown} refuses the key ({answer.status_code}); name one with --key-from VARIABLE"
            )
        try:
            models = tuple(str(entry["id"]) for entry in answer.json()["data"]) if answer.status_code == 200 else ()
        except (ValueError, KeyError, TypeError):
            models = ()
        try:
            return Server(address, models, scrape(address.shown, client), None)
        except DataError as error:
            return Server(address, models, None, str(error))


def _client(address: Address, key: str | None) -> httpx.Client:
    # the same certificates as for the calls
    verify = ssl.create_default_context() if address.tls else True
    return httpx.Client(timeout=10, trust_env=False, verify=verify, headers=address.authorization(key))
