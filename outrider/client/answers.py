"""Request bodies, whole answers, and the chunks of streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from outrider.client.prices import Usage, usage_of
from outrider.client.sending.events import EventDecoder
from outrider.errors import ConfigError
from outrider.storage.json_text import parse_json

LONGEST_MESSAGE = 300
"""Characters of a server's error message that are passed on."""
SPECULATION = ("speculative", "prediction")
"""Settings that change what is drafted, and never the text."""
Message = Mapping[str, Any]


class InvalidResponse(Exception):
    """The response is incomplete, malformed, or an error with status 200."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    """Of the first choice; `raw` has all of them."""
    finish_reason: str | None
    usage: Usage | None
    """Tokens as the server counted them; None if it did not."""
    cost: Decimal | None
    """None if the tokens or their price are unknown; 0 from the cache."""
    attempts: int
    """How often the request was sent; 0 from the cache."""
    raw: Mapping[str, Any]
    """The response, decoded."""
    request_id: str | None
    """The server's."""
    is_cached: bool = False
    is_plain: bool = False
    """The request was resent without speculation, because the server failed with it."""
    server: str = ""
    """Address of the server that answered."""


class Chunk(NamedTuple):
    """An event of a stream."""

    text: str
    """What it adds to the first choice."""
    raw: Mapping[str, Any]
    """The event, decoded."""

    @property
    def finish_reason(self) -> str | None:
        return _finish_reason(_first_choice(self.raw))


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def chat_body(messages: str | Sequence[Message], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Body for /chat/completions.  A string becomes one user message."""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if not messages:
        raise ConfigError("messages is empty; give a text, or a list of {role, content}")
    return {"messages": messages, **_checked(settings)}


def text_body(prompt: str | Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Body for /completions.  prompt: a text or token ids."""
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **_checked(settings)}


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    if "stream" in settings:
        raise ConfigError("stream is not a setting; call chat_stream or complete_stream for a stream")
    body = {name: value for name, value in settings.items() if value is not None}
    if isinstance(body.get("prediction"), str):
        body["prediction"] = {"type": "content", "content": body["prediction"]}
    return body


def without_speculation(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without a prediction, and with speculation turned off if it was requested."""
    plain = {name: value for name, value in body.items() if name != "prediction"}
    return plain | ({"speculative": False} if "speculative" in body else {})


def is_speculative(body: Mapping[str, Any]) -> bool:
    return bool(body.get("prediction") or body.get("speculative"))


# ── errors of the server ──────────────────────────────────────────────────────────────────────────────────────────────


class ServerError(NamedTuple):
    """OpenAI's error object, or the closest equivalent that the server sent."""

    message: str
    param: str = ""
    codes: frozenset[str] = frozenset()
    """`code` and `type`."""

    @property
    def is_about_speculation(self) -> bool:
        return self.param.partition(".")[0] in SPECULATION


def parse_error(body: bytes) -> ServerError:
    """The error in the body of a response that is not 2xx."""
    try:
        content = parse_json(body)
    except ValueError:
        return ServerError(body[:LONGEST_MESSAGE].decode("utf-8", "replace").strip())
    return error_in(content) or ServerError(json.dumps(content)[:LONGEST_MESSAGE])


def error_in(content: Any) -> ServerError | None:
    """The error in decoded JSON; None if it has none."""
    if not isinstance(content, dict):
        return None
    error = content if content.get("object") == "error" else content.get("error", content.get("detail"))
    if error is None:
        return None
    if not isinstance(error, dict):
        return ServerError(str(error)[:LONGEST_MESSAGE])
    codes = frozenset(str(error[name]) for name in ("code", "type") if error.get(name) is not None)
    return ServerError(str(error.get("message", error))[:LONGEST_MESSAGE], str(error.get("param") or ""), codes)


# ── responses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_answer(body: bytes) -> dict[str, Any]:
    """A whole answer, decoded.  Raises InvalidResponse."""
    try:
        content = parse_json(body)
    except ValueError:
        raise InvalidResponse(f"{len(body)} bytes that are not JSON" if body else "an empty response") from None
    if (error := error_in(content)) is not None:
        raise InvalidResponse(f"an error with status 200: {error.message}")
    if not isinstance(content, dict) or _first_choice(content) is None:
        raise InvalidResponse("JSON without choices")
    return content


def text_of(choice: Mapping[str, Any] | None) -> str:
    """The text in a choice of an answer or of a chunk."""
    part = {} if choice is None else choice.get("message") or choice.get("delta") or choice
    text = part.get("content", part.get("text")) if isinstance(part, Mapping) else None
    if isinstance(text, list):  # parts, as some servers send them
        pieces = [part.get("text") for part in text if isinstance(part, Mapping) and part.get("type") == "text"]
        return "".join(piece for piece in pieces if isinstance(piece, str))
    return text if isinstance(text, str) else ""


def answer_of(raw: Mapping[str, Any], **fields: Any) -> Answer:
    """fields: of the Answer, those that `raw` does not have."""
    first = _first_choice(raw)
    return Answer(text_of(first), _finish_reason(first), usage_of(raw), raw=raw, **fields)


def _first_choice(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The choice with index 0."""
    choices = raw.get("choices")
    if not isinstance(choices, list):
        return None
    return next((choice for choice in choices if isinstance(choice, Mapping) and choice.get("index", 0) == 0), None)


def _finish_reason(choice: Mapping[str, Any] | None) -> str | None:
    reason = None if choice is None else choice.get("finish_reason")
    return reason if isinstance(reason, str) else None


class StreamParser:
    """Parses a stream as it arrives: the text and usage so far, and whether it is complete."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.usage: Usage | None = None
        self.is_done = False
        """[DONE] arrived."""
        self._events = EventDecoder()
        self._open: set[int] = set()
        self._ended: set[int] = set()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_complete(self) -> bool:
        """Some servers leave out [DONE]; then every choice must have ended."""
        return self.is_done or (bool(self._ended) and self._open <= self._ended)

    def feed(self, part: bytes) -> Iterator[Chunk]:
        """The chunks that `part` completes.  Raises InvalidResponse for an error in the stream and for a malformed
        event."""
        return self._chunks(self._events.feed(part))

    def end(self) -> Iterator[Chunk]:
        """The last chunk, if no empty line terminated it.  Raises InvalidResponse if the stream is incomplete."""
        yield from self._chunks(self._events.end())
        if not self.is_complete:
            raise InvalidResponse("the stream ended before its text")

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
            content = parse_json(event)
        except ValueError:
            raise InvalidResponse("an event that is not JSON") from None
        if (error := error_in(content)) is not None:
            raise InvalidResponse(f"an error in the stream: {error.message}")
        if not isinstance(content, dict):
            raise InvalidResponse(f"an event that is a {type(content).__name__}")
        choices = content.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                raise InvalidResponse("a choice that is not an object")
            index = choice.get("index", 0)
            indices = self._open if _finish_reason(choice) is None else self._ended
            indices.add(index if isinstance(index, int) else 0)
        self.usage = usage_of(content) or self.usage
        return Chunk(text_of(_first_choice(content)), content)


def parse_models(body: bytes) -> list[str]:
    """Model names in a response of /models.  Raises InvalidResponse."""
    try:
        return [str(entry["id"]) for entry in parse_json(body)["data"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise InvalidResponse("not a list of models") from None
