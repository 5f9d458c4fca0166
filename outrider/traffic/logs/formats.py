"""The formats of logs: for each, a function from a row to its calls.  No torch.

Logs with lengths but no text (Mooncake, BurstGPT, Bailian, timed traces) get generated words of about that many tokens.
Equal hash ids become equal text, so shared prefixes stay shared.  Acceptance on such text says nothing about real text;
these calls are marked `synthetic`.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.data.sources.messages import decoded
from outrider.data.sources.rows import answer_of, answered, read_row
from outrider.errors import DataError
from outrider.traffic.logs.calls import Call, checked_body, length_of, seconds_of, synthetic_call
from outrider.traffic.logs.redaction import unredacted

Parse = Callable[[Any, str], list[Call]]
"""(row, default id) → its calls, with the times of the row."""
UNREADABLE = (csv.Error, DataError, LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Raised for a row that is not in the format."""


def format_of(row: Mapping[str, Any]) -> str | None:
    """The format of a log, by one of its rows; None if it is unknown."""
    if "hash_ids" in row or "input_length" in row:
        if "chat_id" in row:
            return "bailian"
        try:
            return "mooncake" if not row.get("hash_ids") or _is_block(row, 512) else "timed"
        except UNREADABLE:  # reported when the row is read
            return "mooncake"
    if isinstance(decoded(row.get("request")), dict) or ("body" in row and "response" in row):
        return "gateway"
    if "body" in row:
        return "openai-batch" if "url" in row or "custom_id" in row else "outrider"
    if "conversations" in row:
        return "sharegpt"
    if "messages" in row:
        return "raw"
    if "prompt" in row:
        return "raw" if "model" in row and "output_tokens" not in row else "vllm-custom"
    return None


def _is_block(row: Mapping[str, Any], size: int) -> bool:
    return math.ceil(length_of(row["input_length"]) / size) == len(row["hash_ids"])


def _time(row: Mapping[str, Any]) -> float | None:
    return seconds_of(next((row[key] for key in TIMES if key in row), None))


def _session(row: Mapping[str, Any], key: str = "session_id") -> str | None:
    value = row.get(key)
    return None if value is None else str(value)


def _outrider(row: Any, name: str) -> list[Call]:
    meta = row.get("meta") or {}
    body, hidden = unredacted(row["body"])
    expected = row.get("expected_output_tokens")
    return [
        Call(
            checked_body(body), str(meta.get("id", name)), seconds_of(row.get("t")), _session(row, "session"),
            None if expected is None else length_of(expected), hidden or bool(meta.get("synthetic")),
            meta.get("answer"),
        )
    ]  # fmt: skip


def _batch(row: Any, name: str) -> list[Call]:
    return [Call(checked_body(row["body"]), str(row.get("custom_id", name)), _time(row), _session(row))]


def _raw(row: Any, name: str) -> list[Call]:
    body = {key: value for key, value in row.items() if key not in NOT_SENT}
    return [Call(checked_body(body), str(row.get("id", name)), _time(row), _session(row))]


def _gateway(row: Any, name: str) -> list[Call]:
    """Logs of proxies: request, response and time."""
    request, response = decoded(row.get("request", row.get("body"))), answered(row)
    message = answer_of(row, "the row")
    usage = response.get("usage") if isinstance(response, dict) else None
    tokens = usage.get("completion_tokens", usage.get("output_tokens")) if isinstance(usage, dict) else None
    request_id = str(row.get("id", row.get("request_id", name)))
    body = checked_body(decoded(request.get("body", request)) if isinstance(request, dict) else request)
    answer = None if message is None else message["content"]
    return [Call(body, request_id, _time(row), _session(row), tokens, answer=answer)]


def _lengths(row: Any, name: str, block: int, per_second: float) -> list[Call]:
    """Mooncake and similar: a length, and for every block of tokens a hash of it and all previous blocks."""
    return [synthetic_call(row, name, row["timestamp"] / per_second, _session(row), block)]


def _timed(row: Any, name: str) -> list[Call]:
    block = next((size for size in (16, 64, 512) if not row.get("hash_ids") or _is_block(row, size)), None)
    if block is None:
        raise ValueError(f"{len(row['hash_ids'])} hash_ids don't fit an input_length of {row['input_length']}")
    return _lengths(row, name, block, 1.0)


def _bailian(row: Any, name: str, roots: dict[int, int]) -> list[Call]:
    chat, parent = int(row["chat_id"]), int(row.get("parent_chat_id", -1))
    roots[chat] = roots.get(parent, parent) if parent >= 0 else chat
    return [synthetic_call(row, str(chat), float(row["timestamp"]), str(roots[chat]), 16)]


def _burstgpt(row: Any, name: str) -> list[Call]:
    """Lengths in CSV, without shared prefixes."""
    lengths = {"input_length": int(row["Request tokens"]), "output_length": int(row["Response tokens"])}
    session = _session(row, "Session ID") or None  # an empty cell
    return [synthetic_call(lengths | {"salt": name}, name, float(row["Timestamp"]), session, 512)]


def _sharegpt(row: Any, name: str) -> list[Call]:
    """A call for each user turn, with the system text, the tools, and the log's answers to earlier turns."""
    if row["conversations"] == []:
        return []
    reading, calls, session = read_row(row, "the row"), list[Call](), str(row.get("id", name))
    tools = {"tools": list(reading.tools)} if reading.tools else {}
    for end, message in enumerate(reading.messages, 1):
        if message["role"] == "user":
            body = {"messages": reading.messages[:end], **tools}
            calls.append(Call(body, f"{session}-{len(calls)}", None, session))
        elif message["role"] == "assistant" and calls and reading.messages[end - 2]["role"] == "user":
            calls[-1] = replace(calls[-1], answer=message["content"])
    return calls


def _custom(row: Any, name: str) -> list[Call]:
    """vLLM's format: a prompt for the chat template."""
    tokens, reading = row.get("output_tokens"), read_row(row, "the row")
    messages = list(reading.messages)
    answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    body: dict[str, Any] = {"messages": messages} | ({"tools": list(reading.tools)} if reading.tools else {})
    if tokens is not None:
        body["max_tokens"] = length_of(tokens)
    call_id = str(row.get("id", name))
    return [Call(checked_body(body), call_id, seconds_of(row.get("timestamp")), None, tokens, answer=answer)]


FORMATS: dict[str, Callable[[], Parse]] = {
    "outrider": lambda: _outrider,
    "openai-batch": lambda: _batch,
    "raw": lambda: _raw,
    "gateway": lambda: _gateway,
    "mooncake": lambda: functools.partial(_lengths, block=512, per_second=1000.0),
    "timed": lambda: _timed,
    "bailian": lambda: functools.partial(_bailian, roots={}),
    "burstgpt": lambda: _burstgpt,
    "sharegpt": lambda: _sharegpt,
    "vllm-custom": lambda: _custom,
}
"""docs/replay.md describes them."""
TIMES = ("timestamp", "t", "time", "created_at", "created")
NOT_SENT = {*TIMES, "session_id", "id", "delay"}
"""Keys next to a raw request body that are not sent."""
