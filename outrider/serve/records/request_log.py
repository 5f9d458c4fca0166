"""The request log: a line for every request that ended, in a file for `outrider replay` and in Python's logging.

The file has Outrider's trace format, `{t, session, body, expected_output_tokens, meta}`, t in seconds since 1970.
Without consent to log prompts it has no text: each text is replaced by its length and a keyed hash.  The key is never
stored; equal texts stay equal within a run, and a replay sends different words of the same length.

A thread writes, so neither the engine nor a client ever waits for the disk.  If the disk is full or the folder is gone,
a warning is logged, the file ends with its last whole line, and serving continues.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.serve.calls import Call
from outrider.serve.records.traces import Traces, span_of

log = logging.getLogger("outrider.serve")

MOST_WAITING = 10_000
"""Requests that may wait for the disk; beyond it, requests are not logged."""
BATCH = 256
SETTINGS = {
    "model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "ignore_eos", "stream",
    "speculative",
}  # fmt: skip
"""Fields of a body that are logged without consent if they are numbers or booleans, and the model's name."""
SECRETS = {"api_key", "apikey", "api-key", "authorization", "headers", "extra_headers", "extra_query"}
"""Never logged."""
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


class Ended(NamedTuple):
    """A request that ended."""

    id: str
    body: Mapping[str, Any]
    """As sent: `messages` or `prompt`, and settings."""
    calls: Sequence[Call]
    """One per answer."""
    reasons: Sequence[str]
    """Why each answer ended."""
    answers: Sequence[str] = ()
    """The texts, which are logged only with consent."""


class RequestLog:
    """Logs requests until `stop`.

    path: of the file; None writes only to the logger `outrider.serve`, which gets one line of JSON per request, without
    text.  Raises ConfigError if it can't be written.
    log_prompts: write prompts and answers to the file.
    traces: also gets a span for each request.
    largest_bytes: a file that would become larger is renamed to PATH.1, PATH.1 to PATH.2 and so on; `files` are kept.
    """

    def __init__(
        self, path: Path | None = None, *, log_prompts: bool = False, largest_bytes: int = 64 * 2**20, files: int = 5,
        traces: Traces | None = None,
    ) -> None:  # fmt: skip
        if largest_bytes < 1 or files < 1:
            raise ConfigError(f"largest_bytes and files must be at least 1, got {largest_bytes} and {files}")
        self.is_off = path is None
        """The file is no longer written."""
        self.path, self.log_prompts, self.largest_bytes, self.files = path, log_prompts, largest_bytes, files
        self._traces = traces
        self._spans: list[dict[str, Any]] = []
        """Not sent yet."""
        self._key = secrets.token_bytes(32)
        self._file = -1
        if path is not None:
            try:
                self._open(path)
            except OSError as error:
                raise ConfigError(
                    f"can't write a log of requests to {path}: {error.strerror}; name a file in a folder that "
                    "exists and can be written to"
                ) from None
        self._ended: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="outrider-request-log", daemon=True)
        self._thread.start()

    def add(self, ended: Ended) -> None:
        """Log a request; returns at once.  Any thread."""
        if self._ended.qsize() < MOST_WAITING:
            self._ended.put(ended)
            return
        self._lost += 1
        if self._lost == 1:
            log.warning("the disk is too slow: %d requests wait to be logged; further ones are dropped", MOST_WAITING)

    def stop(self) -> None:
        """Write all pending lines; returns once they are on disk."""
        self._ended.put(None)
        self._thread.join()

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        is_last = False
        while not is_last:
            batch = [self._ended.get()]
            while batch[-1] is not None and len(batch) < BATCH:
                with suppress(queue.Empty):
                    batch.append(self._ended.get_nowait())
                    continue
                break
            is_last = batch[-1] is None
            lines = [self._line(ended) for ended in batch if ended is not None]
            if not self.is_off and any(lines):
                self._write("".join(lines).encode())
            if self._traces is not None and self._spans:
                self._traces.send(self._spans)
                self._spans = []
        if not self.is_off:
            with suppress(OSError):
                os.fsync(self._file)
        self._close()

    def _line(self, ended: Ended) -> str:
        """The file's line; also writes to the logger."""
        try:
            figures = figures_of(ended.calls, ended.reasons)
            if self._traces is not None:
                self._spans.append(span_of(ended.id, ended.calls, ended.reasons, figures))
            if log.isEnabledFor(logging.INFO):
                log.info(json.dumps({"request": ended.id} | figures))
            if self.is_off:
                return ""
            return json.dumps(row_of(ended, figures, None if self.log_prompts else self._key), default=str) + "\n"
        except Exception as error:  # one malformed body must not stop the log
            log.warning("request %s is not logged: %s: %s", ended.id, type(error).__name__, error)
            return ""

    def _write(self, data: bytes) -> None:
        assert self.path is not None
        size = 0
        try:
            if not self._is_in_place(self.path):  # moved by a log rotation tool, or removed
                self._close()
                self._open(self.path)
            size = os.fstat(self._file).st_size
            if size and size + len(data) > self.largest_bytes:
                self._rotate(self.path)
                size = 0
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, size)  # a part of a line would make the file unreadable
            self.is_off = True
            self._close()
            log.warning(
                "can't write to %s: %s; requests are served, but not logged there until a restart",
                self.path, error.strerror,
            )  # fmt: skip

    def _is_in_place(self, path: Path) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self._file))
        return False

    def _rotate(self, path: Path) -> None:
        self._close()
        for number in range(self.files - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(_numbered(path, number - 1), _numbered(path, number))
        if self.files == 1:
            path.unlink()
        self._open(path)

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # the last line was cut off by a crash
            self._rotate(path)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


# ── a line ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def figures_of(calls: Sequence[Call], reasons: Sequence[str]) -> dict[str, Any]:
    """Totals of a request's answers: counts and times; None for events that did not happen."""
    # a call whose client has disconnected may end a step later
    arrived, finished = min(call.arrived for call in calls), max(call.finished or time.monotonic() for call in calls)
    admitted = [call.admitted for call in calls if call.admitted]
    first = [call.first for call in calls if call.first]
    return {
        "owner": calls[0].owner, "finish_reason": reasons[0] if len(reasons) == 1 else list(reasons),
        "prompt_tokens": sum(map(len, {tuple(call.request.prompt) for call in calls})),
        "cached_tokens": sum(call.cached for call in calls), "tokens": sum(call.written for call in calls),
        "steps": sum(call.steps for call in calls), "drafted": sum(call.drafted for call in calls),
        "accepted": sum(call.accepted for call in calls),
        "queue_s": round(min(admitted) - arrived, 6) if admitted else None,
        "first_token_s": round(min(first) - arrived, 6) if first else None,
        "seconds": round(finished - arrived, 6),
    }  # fmt: skip


def row_of(ended: Ended, figures: Mapping[str, Any], key: bytes | None) -> dict[str, Any]:
    """A row in Outrider's trace format.  key: of the hashes that replace texts; None keeps the texts."""
    arrived = min(call.arrived for call in ended.calls)
    answer = {"answer": ended.answers[0]} if key is None and ended.answers else {}
    return {
        "t": round(time.time() - (time.monotonic() - arrived), 4),
        "body": _shown(ended.body) if key is None else _hidden(ended.body, key),
        "expected_output_tokens": max(call.written for call in ended.calls),
        "meta": {"id": ended.id, **figures, **answer},
    }


def _shown(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name.lower() not in SECRETS}


def _hidden(body: Mapping[str, Any], key: bytes) -> dict[str, Any]:
    """The body's settings, with hashes and lengths in place of texts."""
    shown = {
        name: value
        for name, value in body.items()
        if name in SETTINGS and (isinstance(value, int | float) or (name == "model" and isinstance(value, str)))
    }
    if body.get("messages") is not None:
        return shown | {"messages": [_hidden_message(message, key) for message in body["messages"]]}
    return shown | {"prompt": _hash_of(body.get("prompt", ""), key)}


def _hidden_message(message: Mapping[str, Any], key: bytes) -> dict[str, Any]:
    rest = {name: value for name, value in message.items() if name not in ("role", "content", "name") and value}
    content = message.get("content") or ""
    role = message.get("role")
    return {"role": role if role in ROLES else "user", "content": _hash_of([content, rest] if rest else content, key)}


def _hash_of(value: Any, key: bytes) -> dict[str, Any]:
    """Replaces a text or a JSON value; a replay sends different words of this length."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    digest = hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]
    return {"hidden": digest, "characters": len(text)}
