"""Calls without their text: lengths, settings, and keyed hashes whose key is discarded.  No torch."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from outrider.traffic.logs.calls import Call, length_of, words

HIDDEN = "hidden"
SETTINGS = {
    "model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "ignore_eos", "stream",
    "stream_options", "parallel_tool_calls",
}  # fmt: skip
"""What a redacted body keeps besides lengths; everything else is removed."""


def redacted(call: Call, key: bytes) -> Call:
    """The call without its text."""
    body: dict[str, Any] = {
        name: value
        for name, value in call.body.items()
        if name in SETTINGS and isinstance(value, int | float | bool | None)
    }
    if isinstance(call.body.get("model"), str):
        body["model"] = call.body["model"]
    if "messages" in call.body:
        body["messages"] = [
            {"role": one["role"] if one["role"] in KNOWN_ROLES else "user", "content": hidden(_content_of(one), key)}
            for one in call.body["messages"]
        ]
    else:
        body["prompt"] = hidden(call.body["prompt"], key)
    session = None if call.session is None else keyed(call.session, key)
    return Call(body, keyed(call.id, key), call.at_s, session, call.expected_tokens, call.synthetic)


KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def _content_of(message: Mapping[str, Any]) -> Any:
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "name")}
    content = message.get("content")
    return [content, rest] if rest else content or ""


def hidden(value: Any, key: bytes) -> dict[str, Any]:
    """A keyed hash and the length, in place of a text or of a JSON value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return {HIDDEN: keyed(text, key), "characters": len(text)}


def keyed(text: str, key: bytes) -> str:
    """A hash that can't be reproduced without the key."""
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]


def unredacted(body: Any) -> tuple[Any, bool]:
    """A redacted body with generated words for hidden texts, and whether it had any."""
    has_hidden = False

    def shown(value: Any) -> Any:
        nonlocal has_hidden
        if isinstance(value, dict) and HIDDEN in value:
            has_hidden = True
            length = length_of(value.get("characters", 0))
            return words(str(value[HIDDEN]), length // 3 + 1)[:length]
        return value

    if not isinstance(body, dict):
        return body, False
    filled = {key: shown(value) for key, value in body.items()}
    if isinstance(filled.get("messages"), list):
        filled["messages"] = [
            message | {"content": shown(message.get("content"))} if isinstance(message, dict) else message
            for message in filled["messages"]
        ]
    return filled, has_hidden
