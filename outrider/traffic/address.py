"""The address of a server as users write it, and without its password for output.  No torch."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from outrider.errors import ConfigError


class Address(NamedTuple):
    """The address of a server."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Before /v1; mostly empty."""
    basic: str | None
    """user:password, in base64."""
    query: str
    """Part after `?`, for metrics that need a key; usually empty."""

    @property
    def shown(self) -> str:
        """The address without its password and query."""
        return f"{'https' if self.tls else 'http'}://{self._bracketed}:{self.port}{self.prefix}"

    @property
    def host_header(self) -> str:
        standard = self.port == (443 if self.tls else 80)
        return self._bracketed if standard else f"{self._bracketed}:{self.port}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def authorization(self, key: str | None = None) -> dict[str, str]:
        """The header with the key or, without one, with the password of the address; empty without either."""
        secret = f"Bearer {key}" if key else f"Basic {self.basic}" if self.basic else None
        return {"Authorization": secret} if secret else {}


def address_of(url: str) -> Address:
    """The server at `url`, which may end in /v1, /metrics, or the path of an endpoint.  Raises ConfigError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise ConfigError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000")
    if not re.fullmatch(r"[\x21-\x7e]*", parts.path):
        raise ConfigError(f"the path of {url!r} has characters that are not ASCII; write them as %xx")
    basic = None
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        basic = base64.b64encode(secret.encode()).decode()
    prefix = re.sub(r"/*(v1)?(/(chat/)?completions|/metrics)?/*$", "", parts.path)
    return Address(parts.hostname, port, parts.scheme == "https", prefix, basic, parts.query)
