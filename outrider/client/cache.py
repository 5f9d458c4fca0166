"""Answers on disk, keyed by the content of their requests: an identical request is not sent again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from outrider.errors import ConfigError
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import whole_text


def digest(*values: Any) -> str:
    """A hash of JSON values that ignores the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ResponseCache:
    """A folder with a file for each answer.  Several processes may share it.

    Raises ConfigError if the folder can't be created.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"can't create the cache {folder}: {error.strerror}; choose another folder") from None

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer to the request with this digest; None if there is none that can be read."""
        try:
            raw = parse_json(whole_text(self._path(key)))
        except (OSError, ValueError):
            return None
        return raw if isinstance(raw, dict) else None

    def put(self, key: str, raw: Mapping[str, Any]) -> None:
        """Store an answer; errors of the disk are ignored."""
        path = self._path(key)
        part = path.with_name(f"{path.name}.{uuid4().hex}")
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            try:
                part.write_text(json.dumps(raw), encoding="utf-8")
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
