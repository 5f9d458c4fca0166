"""API keys: several, each with a name and a limit, stored as salted hashes, and revoked while a server runs.

A key is 32 random bytes, so one round of SHA-256 is enough: nobody can try them all.  A key that comes in is compared
with every one of the file in constant time, whether it was found before or not.
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
"""Of every key, so that one that leaked can be told from other secrets."""


class Key(Config):
    """What the file holds of a key."""

    name: str = Field(pattern=r"^[\w.@-]{1,64}$")
    salt: str = Field(pattern="^[0-9a-f]{32}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of the salt's bytes and the key's, in hexadecimal digits."""
    made: str
    concurrent: PositiveInt | None = None
    """Requests that it may have running at once; the server's own number unless given."""

    @property
    def identity(self) -> str:
        """Whose requests these are, in caches, queues and logs: a name may be given to another person later."""
        return f"{self.name}#{self.sha256[:12]}"

    def fits(self, given: bytes) -> bool:
        return hmac.compare_digest(_hash(bytes.fromhex(self.salt), given), self.sha256)


class KeyFile(Config):
    """A file of keys."""

    keys: tuple[Key, ...] = ()


def read(path: Path) -> tuple[Key, ...]:
    """The keys of a file.  Raises ConfigError for one that can't be read, or that others may write."""
    try:
        mode = path.stat().st_mode
        found = build(KeyFile, read_object(path), str(path)).keys
    except (OSError, ValueError) as error:
        how = f"make it with: outrider keys add {path} NAME"
        raise ConfigError(f"can't read the keys in {path}: {error}; {how}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} can be written by others, who could add keys of their own; run: chmod 600 {path}")
    return found


def add(path: Path, name: str, concurrent: int | None = None) -> str:
    """Make a key and store its hash; returns the key, which is stored nowhere.  Raises ConfigError for a name that is
    taken."""
    key, salt = PREFIX + secrets.token_urlsafe(32), secrets.token_bytes(16)
    values = {
        "name": name, "salt": salt.hex(), "sha256": _hash(salt, key.encode()),
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "concurrent": concurrent,
    }  # fmt: skip
    new = build(Key, values, "key")
    if not path.parent.is_dir():
        raise ConfigError(f"can't write the keys to {path}: there is no folder {path.parent}; make it first")
    with lock.held(path.parent, ConfigError(f"another process writes into {path.parent}; try again")):
        keys = read(path) if path.exists() else ()
        if any(one.name == name for one in keys):
            raise ConfigError(f"{path} has a key named {name!r} already; choose another name, or revoke that one first")
        _write(path, (*keys, new))
    return key


def revoke(path: Path, name: str) -> None:
    """Remove a key; a running server refuses it from its next request on.  Raises ConfigError where there is none."""
    with lock.held(path.parent, ConfigError(f"another process writes into {path.parent}; try again")):
        keys = read(path)
        if not any(one.name == name for one in keys):
            raise ConfigError(f"{path} has no key named {name!r}{nearest(name, [one.name for one in keys])}")
        _write(path, tuple(one for one in keys if one.name != name))


class KeyRing:
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: str | Path):
        """Raises ConfigError for a file that can't be read, or holds no key."""
        self.path = Path(path)
        self._keys, self._stamp = read(self.path), self._stamped()
        if not self._keys:
            raise ConfigError(f"{path} holds no key, so nobody could ask; add one: outrider keys add {path} NAME")

    def find(self, given: bytes) -> Key | None:
        """The key that this is; None for an unknown one."""
        self._look()
        found = None
        for key in self._keys:  # all of them: how long it takes tells nothing
            if key.fits(given):
                found = key
        return found

    def _look(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read(self.path)
            log.info("%s has changed: %d keys", self.path, len(self._keys))
        except ConfigError as error:
            self._keys = ()  # what can't be read lets nobody in
            log.error("no key is taken any more: %s", error)

    def _stamped(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def _hash(salt: bytes, key: bytes) -> str:
    return hashlib.sha256(salt + key).hexdigest()


def _write(path: Path, keys: tuple[Key, ...]) -> None:
    text = KeyFile(keys=keys).model_dump_json(indent=1) + "\n"
    with replacing(path) as part:
        part.unlink(missing_ok=True)  # of a process that was killed
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
