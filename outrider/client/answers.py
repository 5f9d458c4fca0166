"""What is asked and what comes back: bodies of requests, whole answers, and chunks of streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from outrider.client.prices import Usage, usage_of
from outrider.client.sending.events import Events
from outrider.errors import ConfigError

LONGEST_MESSAGE = 300
"""Characters of what a server says that are passed on."""
SPECULATION = ("speculative", "prediction")
"""Settings that change who drafts, and never the text."""
Message = Mapping[str, Any]


class Unreadable(Exception):
    """Bytes that are not the answer that was asked for."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    """Of the first choice; `raw` has all of them."""
    finish_reason: str | None
    usage: Usage | None
    """Tokens as the server counted them; None where it did not."""
    cost: Decimal | None
    """None where the tokens or their price are unknown; 0 from the cache."""
    attempts: int
    """How often the request was sent; 0 from the cache."""
    raw: Mapping[str, Any]
    """What came back, decoded."""
    request_id: str | None
    """The server's."""
    is_cached: bool = False
    is_plain: bool = False
    """It was asked again without speculation, because the server failed with it."""


class Chunk(NamedTuple):
    """An event of a stream."""

    text: str
    """What it adds to the first choice."""
    raw: Mapping[str, Any]
    """The event, decoded."""

    @property
    def finish_reason(self) -> str | None:
        return _reason(_first(self.raw))


# ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def chat_body(messages: str | Sequence[Message], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Body of /chat/completions.  A text is a user's message."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if not given:
        raise ConfigError("messages is empty; give a text, or a list of {role, content}")
    return {"messages": given, **_checked(settings)}


def text_body(prompt: str | Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Body of /completions.  prompt: a text or token ids."""
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **_checked(settings)}


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    if "stream" in settings:
        raise ConfigError("stream is no setting; call chat_stream or complete_stream for a stream")
    found = {name: value for name, value in settings.items() if value is not None}
    if isinstance(found.get("prediction"), str):
        found["prediction"] = {"type": "content", "content": found["prediction"]}
    return found


def without_speculation(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body that leaves the text to the target alone."""
    found = {name: value for name, value in body.items() if name != "prediction"}
    return found | ({"speculative": False} if "speculative" in body else {})


def is_speculative(body: Mapping[str, Any]) -> bool:
    return bool(body.get("prediction") or body.get("speculative"))


# ── refused ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Refused(NamedTuple):
    """OpenAI's error object, or what there is instead."""

    message: str
    param: str = ""
    codes: frozenset[str] = frozenset()
    """`code` and `type`."""

    @property
    def is_of_speculation(self) -> bool:
        return self.param.partition(".")[0] in SPECULATION


def refused(body: bytes) -> Refused:
    """What the body of a refusal says."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return Refused(body[:LONGEST_MESSAGE].decode("utf-8", "replace").strip())
    return refused_in(found) or Refused(json.dumps(found)[:LONGEST_MESSAGE])


def refused_in(found: Any) -> Refused | None:
    """The error in an object; None where it has none."""
    if not isinstance(found, dict):
        return None
    error = found if found.get("object") == "error" else found.get("error", found.get("detail"))
    if error is None:
        return None
    if not isinstance(error, dict):
        return Refused(str(error)[:LONGEST_MESSAGE])
    codes = frozenset(str(error[name]) for name in ("code", "type") if error.get(name) is not None)
    return Refused(str(error.get("message", error))[:LONGEST_MESSAGE], str(error.get("param") or ""), codes)


# ── answered ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_answer(data: bytes) -> dict[str, Any]:
    """A whole answer, decoded.  Raises Unreadable where it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Unreadable(f"{len(data)} bytes that are not JSON" if data else "nothing") from None
    if (error := refused_in(found)) is not None:
        raise Unreadable(f"an error with status 200: {error.message}")
    if not isinstance(found, dict) or not isinstance(_first(found), Mapping):
        raise Unreadable("JSON without choices")
    return found


def text_of(choice: Mapping[str, Any] | None) -> str:
    """What the model wrote in a choice, whole or in part."""
    part = {} if choice is None else choice.get("message") or choice.get("delta") or choice
    text = part.get("content", part.get("text")) if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else ""


def answer_of(raw: Mapping[str, Any], **more: Any) -> Answer:
    """more: what is known besides."""
    first = _first(raw)
    return Answer(text_of(first), _reason(first), usage_of(raw), raw=raw, **more)


def _first(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The choice with index 0."""
    choices = raw.get("choices")
    found = [one for one in choices if isinstance(one, Mapping)] if isinstance(choices, list) else []
    return next((one for one in found if one.get("index", 0) == 0), None)


def _reason(choice: Mapping[str, Any] | None) -> str | None:
    reason = None if choice is None else choice.get("finish_reason")
    return reason if isinstance(reason, str) else None


class Reading:
    """A stream while it is read: what it holds so far, and whether it is whole."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.usage: Usage | None = None
        self.is_done = False
        """[DONE] came."""
        self._events = Events()
        self._open: set[int] = set()
        self._ended: set[int] = set()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_whole(self) -> bool:
        """Servers may leave out [DONE]; each choice then must have ended."""
        return self.is_done or (bool(self._ended) and self._open <= self._ended)

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The events that `data` completes.  Raises Unreadable for an error in them, and for what is no event."""
        return self._chunks(self._events.feed(data))

    def end(self) -> Iterator[Chunk]:
        """The last event, where nothing closed it.  Raises Unreadable where the stream is not whole."""
        yield from self._chunks(self._events.end())
        if not self.is_whole:
            raise Unreadable("a stream that ended before its text")

    def _chunks(self, events: Iterator[str]) -> Iterator[Chunk]:
        for event in events:
            if event == "[DONE]":
                self.is_done = True
            if self.is_done or not event:
                continue
            chunk = self._chunk(event)
            self.pieces.append(chunk.text)
            yield chunk

    def _chunk(self, event: str) -> Chunk:
        try:
            found = json.loads(event)
        except (ValueError, RecursionError):
            raise Unreadable("an event that is not JSON") from None
        if (error := refused_in(found)) is not None:
            raise Unreadable(f"an error in the stream: {error.message}")
        if not isinstance(found, dict):
            raise Unreadable(f"an event that is a {type(found).__name__}")
        choices = found.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                raise Unreadable("a choice that is no object")
            index = choice.get("index", 0)
            own = self._ended if _reason(choice) is not None else self._open
            own.add(index if isinstance(index, int) else 0)
        self.usage = usage_of(found) or self.usage
        return Chunk(text_of(_first(found)), found)


def read_models(data: bytes) -> list[str]:
    """Names in what /models answers.  Raises Unreadable."""
    try:
        return [str(entry["id"]) for entry in json.loads(data)["data"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Unreadable("no list of models") from None
