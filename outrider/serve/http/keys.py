"""API keys, each with a name and a limit, stored as salted hashes; they can be revoked while a server runs.

A key is 32 random bytes, so one round of SHA-256 is enough: brute force is infeasible.  A request's key is compared
with every key of the file in constant time, whether or not an earlier one matched.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, PositiveInt

from outrider.config import Config, build, nearest, read_object
from outrider.errors import ConfigError
from outrider.storage import lock
from outrider.storage.atomic import replacing

log = logging.getLogger(__name__)

PREFIX = "outrider-"
"""Prefix of every key, so that a leaked key is recognised as one."""


class Key(Config):
    """A key as stored in the file."""

    name: str = Field(pattern=r"^[\w.@-]{1,64}$")
    salt: str = Field(pattern="^[0-9a-f]{32}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the salt followed by the key, in hexadecimal."""
    made: str
    concurrent: PositiveInt | None = None
    """Maximum number of concurrent requests; defaults to the server's limit."""

    @property
    def identity(self) -> str:
        """Identifies the owner in caches, queues and logs: the name alone may be given to another person later."""
        return f"{self.name}#{self.sha256[:12]}"

    def matches(self, secret: bytes) -> bool:
        return hmac.compare_digest(_hash(bytes.fromhex(self.salt), secret), self.sha256)


class KeyFile(Config):
    """A file of keys."""

    keys: tuple[Key, ...] = ()


def read(path: Path) -> tuple[Key, ...]:
    """The keys of a file.  Raises ConfigError for a file that can't be read, or that other users can write."""
    try:
        mode = path.stat().st_mode
        keys = build(KeyFile, read_object(path), str(path)).keys
    except (OSError, ValueError) as error:
        how = f"make it with: outrider keys add {path} NAME"
        raise ConfigError(f"can't read the keys in {path}: {error}; {how}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} can be written by other users, who could add keys; run: chmod 600 {path}")
    return keys


def add(path: Path, name: str, concurrent: int | None = None) -> str:
    """Make a key and store its hash; returns the key, which is not stored.  Raises ConfigError for a name that is
    taken."""
    secret, salt = PREFIX + secrets.token_urlsafe(32), secrets.token_bytes(16)
    values = {
        "name": name, "salt": salt.hex(), "sha256": _hash(salt, secret.encode()),
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "concurrent": concurrent,
    }  # fmt: skip
    new = build(Key, values, "key")
    if not path.parent.is_dir():
        raise ConfigError(f"can't write the keys to {path}: the folder {path.parent} does not exist; create it first")
    with lock.held(path.parent, ConfigError(f"another process writes into {path.parent}; try again")):
        keys = read(path) if path.exists() else ()
        if any(key.name == name for key in keys):
            raise ConfigError(f"{path} already has a key named {name!r}; choose another name, or revoke that key first")
        _write(path, (*keys, new))
    return secret


def revoke(path: Path, name: str) -> None:
    """Remove a key; a running server refuses it from the next request on.  Raises ConfigError for an unknown name."""
    with lock.held(path.parent, ConfigError(f"another process writes into {path.parent}; try again")):
        keys = read(path)
        if not any(key.name == name for key in keys):
            raise ConfigError(f"{path} has no key named {name!r}{nearest(name, [key.name for key in keys])}")
        _write(path, tuple(key for key in keys if key.name != name))


class KeyRing:
    """The keys of a file, which is reloaded when it changes."""

    def __init__(self, path: str | Path):
        """Raises ConfigError for a file that can't be read, or has no keys."""
        self.path = Path(path)
        self._keys, self._stamp = read(self.path), self._stamped()
        if not self._keys:
            raise ConfigError(
                f"{path} has no keys, so no request would be accepted; add one: outrider keys add {path} NAME"
            )

    def find(self, secret: bytes) -> Key | None:
        """The key with this secret; None for an unknown one."""
        self._reload()
        match = None
        for key in self._keys:  # compare all of them, so that timing reveals nothing
            if key.matches(secret):
                match = key
        return match

    def _reload(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read(self.path)
            log.info("%s has changed: %d keys", self.path, len(self._keys))
        except ConfigError as error:
            self._keys = ()  # an unreadable file admits nobody
            log.error("keys are no longer accepted: %s", error)

    def _stamped(self) -> tuple[int, ...] | None:
        try:
            stat_result = os.stat(self.path)
        except OSError:
            return None
        return stat_result.st_ino, stat_result.st_mtime_ns, stat_result.st_size, stat_result.st_mode


def _hash(salt: bytes, key: bytes) -> str:
    return hashlib.sha256(salt + key).hexdigest()


def _write(path: Path, keys: tuple[Key, ...]) -> None:
    text = KeyFile(keys=keys).model_dump_json(indent=1) + "\n"
    with replacing(path) as part:
        part.unlink(missing_ok=True)  # left by a process that was killed
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
