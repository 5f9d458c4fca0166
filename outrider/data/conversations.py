"""Rows as conversations: of a user, an assistant, and whoever else speaks.

A JSONL row has one of `messages`, `conversations`, `turns`, `prompt` (with `response`), `instruction` (with `input` and
`output`), `text`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from outrider.data.config import Config
from outrider.data.sources import Skipped, rows
from outrider.errors import DataError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
         "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool"}  # fmt: skip
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON can hold it, no tokenizer can read it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, as it was given."""

    id: str
    """The row's own, or its place where it has none."""
    messages: list[dict[str, str]]
    place: str = ""
    """File and line, for errors."""

    @property
    def has_own_id(self) -> bool:
        return self.id != self.place


def read(config: Config, skipped: Skipped | None = None) -> Iterator[Conversation]:
    """Up to `config.count` conversations.  Raises DataError with file and line for a bad row, or counts it in `skipped`."""
    skipped = Skipped() if skipped is None else skipped
    seen: set[str] = set()
    for name, row in rows(config, skipped):
        try:
            conversation = parse(row, name)
        except DataError as error:
            skipped.add(error, config.skip_bad)
            continue
        if conversation.id in seen:  # reports list prompts by their id: a second row of one id gets its place added
            conversation = replace(conversation, id=f"{conversation.id} at {name}")
        seen.add(conversation.id)
        yield conversation
        if len(seen) == config.count:
            return
    if not seen:
        raise DataError(
            f"{config.conversations} holds no conversation; a row needs one of messages, conversations, turns, prompt, text"
        )


def parse(row: Any, name: str) -> Conversation:
    """One row in any of the known layouts.  `name` says where it stands, for its id and for errors."""
    if not isinstance(row, Mapping):
        raise DataError(f"{name}: a row must be a mapping, not {type(row).__name__}")
    given, turns = row.get("messages") or row.get("conversations"), row.get("turns")
    if given and not isinstance(given, list):
        raise DataError(f"{name}: messages or conversations must be a list of messages, not {given!r:.80}")
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise DataError(f"{name}: turns must be a list of texts, not {turns!r:.80}")
    if given:
        messages = [_message(message, name) for message in given]
    elif turns:
        messages = [{"role": "user", "content": turn} for turn in turns]
    elif row.get("prompt") or row.get("instruction") or row.get("text"):
        messages = _prompt_and_answer(row, name)
    else:
        raise DataError(
            f"{name}: none of messages, conversations, turns, prompt, text is there; keys: {', '.join(map(str, row)) or 'none'}"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise DataError(f"{name}: the conversation has no user turn with text")
    conversation = Conversation(name if row.get("id") is None else str(row["id"]), messages, name)
    for text in (conversation.id, *(message["content"] for message in messages)):
        if broken := SURROGATE.search(text):
            raise DataError(
                f"{name}: the text holds {broken[0]!a}, one half of a surrogate pair, which is not a character; "
                "write the character itself or leave it out"
            )
    return conversation


def _prompt_and_answer(row: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    """The messages of a row that holds one prompt, with the answer given where there is one."""
    asked = _text(row, ("prompt", "instruction", "text"), name)
    given = "" if row.get("prompt") else _text(row, ("input",), name)
    messages = [{"role": "user", "content": asked + (f"\n\n### Input:\n{given}" if given else "")}]
    if answer := _text(row, ("response", "completion", "output"), name):
        messages.append({"role": "assistant", "content": answer})
    return messages


def _text(row: Mapping[str, Any], keys: Sequence[str], name: str) -> str:
    """The first of these fields that is filled in; empty where none is.  Raises DataError for one that is not text."""
    key = next((key for key in keys if row.get(key) not in (None, "")), None)
    if key is None:
        return ""
    text = row[key]
    if not isinstance(text, str):
        raise DataError(f"{name}: {key} must be text, not {text!r:.80}; a list of messages belongs in `messages`")
    return text


def _message(message: Any, name: str) -> dict[str, str]:
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        raise DataError(
            f"{name}: a message needs a role ({', '.join(sorted(set(ROLES.values())))}) and text as content, "
            f"not {message!r:.80}"
        )
    return {"role": ROLES[role], "content": content}


@contextmanager
def at_place(conversation: Conversation) -> Iterator[None]:
    """A DataError from inside says which row it is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{conversation.place or conversation.id}: {error}") from error.__cause__
