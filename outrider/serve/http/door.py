"""Who may come in, and how many: keys, names of this machine, requests at once, and whether the server is stopping."""

from __future__ import annotations

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
from outrider.serve.records.metrics import Telemetry

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = {"/", "/health", "/metrics", "/stats", "/openapi.json"}
"""Pages without text of anybody, as in vLLM: no key is needed, and they are there while the server is stopping."""
LOCAL = {"localhost", "ip6-localhost"}


class Door:
    """Lets requests into an app, which finds in `scope["state"]` their `owner`, and when they `arrived`, in seconds of
    `time.monotonic`."""

    def __init__(self, app: App, config: Config, keys: KeyRing | None, telemetry: Telemetry):
        self.app, self.config, self.keys, self.telemetry = app, config, keys, telemetry
        self.is_closed = False
        """The server is stopping: nobody comes in any more."""
        self.inside = 0
        """Requests that are being answered, those for open pages left out."""
        self._of_key: Counter[str] = Counter()
        # a page of another site can make a browser call a name of its own that leads to this machine
        own = LOCAL | {socket.gethostname().lower(), config.host.lower()}
        self._names = None if keys is not None else own | {name.lower() for name in config.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        is_open = scope["path"] in OPEN
        try:
            self._check_host(scope)
            key = None if is_open else self._admitted(scope)
        except Refusal as refusal:
            await reply(refusal)(scope, receive, send)
            return
        if is_open:
            await self._answered(scope, receive, send)
            return
        owner = "" if key is None else key.identity
        scope.setdefault("state", {}).update(owner=owner, arrived=time.monotonic())
        self.inside += 1
        self._of_key[owner] += 1
        try:
            await self._answered(scope, receive, send)
        finally:
            self.inside -= 1
            self._of_key[owner] -= 1
            if not self._of_key[owner]:
                del self._of_key[owner]

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal is_whole
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientDisconnect:  # before its request was here
            return
        except Exception:
            log.exception("a request failed")
            if not is_whole:  # the connection ends in the middle of the answer, so that nobody takes it for a whole one
                raise

    def _admitted(self, scope: Scope) -> Key | None:
        """The key of a request.  Raises Refusal."""
        if self.is_closed:
            self.telemetry.refused("stopping")
            raise draining()
        if self.keys is None:
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, secret = given.partition(b" ")
        key = self.keys.find(secret.strip()) if scheme.lower() == b"bearer" else None
        if key is None:
            self.telemetry.refused("unauthorized")
            what = "this key is unknown, or was revoked" if given else "no key was given"
            raise Refusal(401, f"{what}; send the header `Authorization: Bearer KEY`", code="invalid_api_key")
        most = key.concurrent or self.config.concurrent
        if self._of_key[key.identity] >= most:
            self.telemetry.refused("key_busy")
            message = f"this key has {most} requests running, which is its limit; wait for one to end"
            raise Refusal(429, message, code="too_many_requests", retry_after_s=1)
        return key

    def _check_host(self, scope: Scope) -> None:
        if self._names is None:
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        sites = [text.partition("://")[2] for text in origins if text.startswith(("http://", "https://"))]
        foreign = [host for host in hosts if not (self._is_own(_name_of(host)) or _is_address(_name_of(host)))]
        foreign += [site for site in sites if not (self._is_own(_name_of(site)) or [site] == hosts)]
        if foreign:
            self.telemetry.refused("unknown_host")
            raise Refusal(
                403, f"{foreign[0][:80]!r} is not a name of this server; start it with "
                f"serve.hosts={_name_of(foreign[0])[:80]}, or with keys", code="unknown_host",
            )  # fmt: skip

    def _is_own(self, name: str) -> bool:
        return not name or name in (self._names or ()) or name.endswith(".localhost")


def reply(refusal: Refusal) -> JSONResponse:
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
