"""A recorded request: its body, its time, and what the log contains about its answer.  No torch.

If a log has no text, words are generated for its calls.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outrider.data.sources.rows import with_system


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the log."""

    body: Mapping[str, Any]
    """Body for an OpenAI-compatible server: `messages` or `prompt`, and settings."""
    id: str
    at_s: float | None = None
    """Seconds after the first call; None if the log has no times."""
    session: str | None = None
    expected_tokens: int | None = None
    """Length of the answer in the log."""
    synthetic: bool = False
    """Whether the text is generated; if so, only its length and shared prefixes come from the log."""
    answer: str | None = None
    """What the recorded server answered."""

    def __post_init__(self) -> None:
        if not isinstance(self.answer, str | None):
            raise ValueError("the answer is not a text")


class RecordedFailure(Exception):
    """Whether the recorded server failed here, so that there is nothing to replay."""


SECRETS = {"api_key", "apikey", "api-key", "authorization", "headers", "extra_headers", "extra_query"}
"""Keys that are never taken from a log, redacted or not."""


def checked_body(body: Any) -> dict[str, Any]:
    """A body that can be sent, with secrets removed.  Raises ValueError if it can't be sent."""
    if not isinstance(body, dict):
        raise ValueError(f"the body is a {type(body).__name__}; expected an object with messages or prompt")
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is None and not prompt:
        raise ValueError("the body has neither messages nor prompt")
    if messages is not None and not (isinstance(messages, list) and messages and all(map(_has_role, messages))):
        raise ValueError("messages is not a list of objects with a role")
    if messages is None and not isinstance(prompt, str | list):
        raise ValueError("prompt is neither a text nor a list")
    for name in ("max_tokens", "max_completion_tokens"):
        if not isinstance(body.get(name), int | None) or isinstance(body.get(name), bool):
            raise ValueError(f"{name} must be a number of tokens, got {body[name]!r}")
    return with_system({key: value for key, value in body.items() if key.lower() not in SECRETS})


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def seconds_of(value: Any) -> float | None:
    """A time in seconds, from seconds, milliseconds since 1970 or an ISO 8601 date.  Raises ValueError otherwise."""
    if value is None:
        return None
    if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
        return datetime.fromisoformat(value).timestamp()
    seconds = float(value)
    if not math.isfinite(seconds) or isinstance(value, bool):
        raise ValueError(f"a time must be a number of seconds, got {value}")
    return seconds / 1000 if seconds > 1e11 else seconds


def length_of(value: Any) -> int:
    """A count of tokens.  Raises ValueError if `value` is not one."""
    count = int(value)
    if count < 0 or count != float(value):
        raise ValueError(f"a length must be a number of tokens, got {value}")
    return count


# ── generated text ────────────────────────────────────────────────────────────────────────────────────────────────────

VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour"
)
"""Words that are about one token each in most tokenizers."""
WORDS = VOCABULARY.split()
LONGEST = 4_000_000
"""Tokens; a longer call is considered a mistake."""


@functools.lru_cache(maxsize=4096)
def words(seed: str, count: int) -> str:
    """`count` words, determined by `seed`."""
    return " ".join(random.Random(seed).choices(WORDS, k=count)) + " "


def synthetic_call(row: Mapping[str, Any], name: str, at_s: float, session: str | None, block: int) -> Call:
    """A call of the given lengths.  Calls that share hash ids share a prefix of their text."""
    length, answer = length_of(row["input_length"]), length_of(row["output_length"])
    if answer == 0:
        raise RecordedFailure
    if not 0 < length <= LONGEST:
        raise ValueError(f"input_length must be 1 to {LONGEST}, got {length}")
    blocks = [str(entry) for entry in row.get("hash_ids") or ()]
    if blocks and len(blocks) != math.ceil(length / block):
        raise ValueError(f"{len(blocks)} hash_ids don't fit {length} tokens in blocks of {block}")
    # without hashes, each call's text differs from the first word on
    blocks = blocks or [f"{row.get('salt', name)}/{i}" for i in range(math.ceil(length / block))]
    text = "".join(words(entry, min(block, length - block * i)) for i, entry in enumerate(blocks)).rstrip()
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": answer}
    return Call(body, name, seconds_of(at_s), session, answer, synthetic=True)
