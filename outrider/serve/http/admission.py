"""Admission of requests: API keys, host names, concurrent requests per key, and whether the server is stopping."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from outrider.serve.bodies.refusals import Refusal, draining
from outrider.serve.config import Config
from outrider.serve.http.keys import Key, KeyRing
from outrider.serve.pacing import REFUSAL_S, Pace
from outrider.serve.records.metrics import Telemetry

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = {"/", "/health", "/ready", "/metrics", "/stats", "/openapi.json"}
"""Pages that show no user's text, as in vLLM: they need no key and are served even while the server is stopping."""
PACE_STEP_S = 0.25
"""A refusal that is held back is sent at most so many seconds after the server begins to stop."""
LOCAL = {"localhost", "ip6-localhost"}


class Admission:
    """Admits requests to an app; `scope["state"]` has their `owner` and when they `arrived`, in seconds of
    `time.monotonic`."""

    def __init__(self, app: App, config: Config, keys: KeyRing | None, telemetry: Telemetry):
        self.app, self.config, self.keys, self.telemetry = app, config, keys, telemetry
        self.is_closed = False
        """The server is stopping and admits no more requests."""
        self.num_active = 0
        """Number of requests being answered, excluding those for open pages."""
        self._active_by_key: Counter[str] = Counter()
        self._pace = Pace()
        # DNS rebinding: a page of another site can make a browser call a name of that site that resolves to this
        # machine
        names = LOCAL | {socket.gethostname().lower(), config.host.lower()}
        self._names = None if keys is not None else names | {name.lower() for name in config.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        is_open = scope["path"] in OPEN
        try:
            self._check_host(scope)
            key = None if is_open else self._admitted(scope)
        except Refusal as refusal:
            await response_to(refusal)(scope, receive, send)
            return
        if is_open:
            await self._answer(scope, receive, send)
            return
        owner = "" if key is None else key.identity
        scope.setdefault("state", {}).update(owner=owner, arrived=time.monotonic())
        self.num_active += 1
        self._active_by_key[owner] += 1
        try:
            await self._answer(scope, receive, self._paced(owner, send))
        finally:
            self.num_active -= 1
            self._active_by_key[owner] -= 1
            if not self._active_by_key[owner]:
                del self._active_by_key[owner]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal is_whole
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientDisconnect:  # before its request had arrived
            return
        except Exception:
            log.exception("a request failed")
            if not is_whole:  # breaks the connection, so that no client takes the answer for a complete one
                raise

    def _paced(self, owner: str, send: Send) -> Send:
        """Holds back refusals of an owner that causes many while others are served; at most its `concurrent` requests
        wait."""

        async def paced(message: MutableMapping[str, Any]) -> None:
            is_refusal = message["type"] == "http.response.start" and 400 <= message["status"] < 500
            if is_refusal and message["status"] != 408 and self._active_by_key.keys() - {owner}:
                seconds = self._pace.wait_s(owner, REFUSAL_S)
                while seconds > 0 and not self.is_closed:
                    await asyncio.sleep(min(seconds, PACE_STEP_S))
                    seconds -= PACE_STEP_S
            await send(message)

        return paced

    def _admitted(self, scope: Scope) -> Key | None:
        """The key of an admitted request; None where no keys are configured.  Raises Refusal."""
        if self.is_closed:
            self.telemetry.refused("stopping")
            raise draining()
        if self.keys is None:
            return None
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, secret = header.partition(b" ")
        key = self.keys.find(secret.strip()) if scheme.lower() == b"bearer" else None
        if key is None:
            self.telemetry.refused("unauthorized")
            problem = "this key is unknown, or was revoked" if header else "no key was given"
            raise Refusal(401, f"{problem}; send the header `Authorization: Bearer KEY`", code="invalid_api_key")
        limit = key.concurrent or self.config.concurrent
        if self._active_by_key[key.identity] >= limit:
            self.telemetry.refused("key_busy")
            message = f"this key has {limit} requests running, which is its limit; wait for one to finish"
            raise Refusal(429, message, code="too_many_requests", retry_after_s=1)
        return key

    def _check_host(self, scope: Scope) -> None:
        if self._names is None:
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        sites = [text.partition("://")[2] for text in origins if text.startswith(("http://", "https://"))]
        foreign = [host for host in hosts if not (self._is_ours(_name_of(host)) or _is_address(_name_of(host)))]
        foreign += [site for site in sites if not (self._is_ours(_name_of(site)) or [site] == hosts)]
        foreign += [origin for origin in origins if origin == "null"]  # a page that hides its origin
        if foreign:
            self.telemetry.refused("unknown_host")
            raise Refusal(
                403, f"{foreign[0][:80]!r} is not a name of this server; start it with "
                f"serve.hosts={_name_of(foreign[0])[:80]}, or with keys", code="unknown_host",
            )  # fmt: skip

    def _is_ours(self, name: str) -> bool:
        return not name or name in (self._names or ()) or name.endswith(".localhost")


def response_to(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
