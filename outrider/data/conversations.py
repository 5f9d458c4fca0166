"""Rows of prompts as conversations of a user, an assistant and other roles.

Sources: `stdlib:train` and `stdlib:held_out` (the demo's prompts), FILE.jsonl, FILE.json (a list of rows), FILE.txt (a
prompt a line), or a data set's name on the Hugging Face hub.  A row of JSON has one of `messages`, `conversations`,
`turns`, `prompt` (with `response`), `instruction` (with `input` and `output`), `text`.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from outrider import demo
from outrider.data.config import Config
from outrider.errors import DataError
from outrider.hub import missing_path

T = TypeVar("T")
U = TypeVar("U")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
"bard": "assistant",
         "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool"}  # fmt: skip
LIBRARY_COUNT = 1000
"""Pieces of the standard library, where no count is given."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON can hold it, no tokenizer can read it."""


GROUPS = ("language", "category")
"""Keys of a row that may say what it is one of; the first that is present counts."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as it is in its source."""

    id: str
    """The row's own, or file and line where it has none."""
    messages: list[dict[str, str]]
    place: str = ""
    """File and line, for errors."""
    group: str = ""
    """Its language or category; empty where its row names none."""

    @property
    def has_own_id(self) -> bool:
        return self.id != self.place


@dataclass(slots=True)
class Skipped:
    """Rows left out, and why."""

    reasons: list[str] = field(default_factory=list)

    def usable(self, items: Iterable[T], make: Callable[[T], U], skip_bad: bool) -> Iterator[U]:
        """`make(item)` of every item; with `skip_bad`, an item that raises DataError is counted instead."""
        for item in items:
            try:
                made = make(item)
            except DataError as error:
                if not skip_bad:
                    raise
                self.reasons.append(str(error))
            else:
                yield made


def read(config: Config, skipped: Skipped | None = None) -> Iterator[Conversation]:
    """Up to `config.count` conversations.  Raises DataError with file and line for a bad row, or counts it in
    `skipped`."""
    skipped = Skipped() if skipped is None else skipped
    ids: set[str] = set()
    for conversation in skipped.usable(rows(config, skipped), lambda row: parse(row[1], row[0]), config.skip_bad):
        if conversation.id in ids:  # reports list prompts by their id, so a second row of one id gets its line added
            conversation = replace(conversation, id=f"{conversation.id} at {conversation.place}")
        ids.add(conversation.id)
        yield conversation
        if len(ids) == config.count:
            return
    if not ids:
        raise DataError(f"{config.conversations} has no conversation; give rows with messages, turns, prompt or text")


def parse(row: Any, name: str) -> Conversation:
    """One row in any of the known layouts.  `name`: file and line, for its id and for errors."""
    if not isinstance(row, Mapping):
        raise DataError(f'{name}: a row must be a mapping such as {{"prompt": "..."}}, got {type(row).__name__}')
    messages = _messages(row, name)
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise DataError(
            f"{name}: the conversation has no user turn with text; add one, or skip such rows with --skip-bad"
        )
    group = next((row[key] for key in GROUPS if isinstance(row.get(key), str)), "")
    conversation = Conversation(name if row.get("id") is None else str(row["id"]), messages, name, group)
    for text in (conversation.id, group, *(message["content"] for message in messages)):
        if broken := SURROGATE.search(text):
            raise DataError(
                f"{name}: the text holds {broken[0]!a}, half of a surrogate pair; write the whole character"
            )
    return conversation


def _messages(row: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    """The messages of a row: as a list, as the user's turns, or as one prompt with its answer where it has one."""
    given, turns = row.get("messages") or row.get("conversations"), row.get("turns")
    if given and not isinstance(given, list):
        raise DataError(f"{name}: messages or conversations must be a list of messages, got {given!r:.80}")
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise DataError(f"{name}: turns must be a list of texts, got {turns!r:.80}")
    if spoken := given or [{"role": "user", "content": turn} for turn in turns or ()]:
        return [_message(one, name) for one in spoken]
    asked = _text(row, ("prompt", "instruction", "text"), name)
    if not asked:
        keys = ", ".join(map(str, row)) or "none"
        wanted = "messages, conversations, turns, prompt, instruction or text"
        raise DataError(f"{name}: a row needs a non-empty {wanted}; got keys: {keys}")
    shown = "" if row.get("prompt") else _text(row, ("input",), name)
    messages = [{"role": "user", "content": asked + (f"\n\n### Input:\n{shown}" if shown else "")}]
    if answer := _text(row, ("response", "completion", "output"), name):
        messages.append({"role": "assistant", "content": answer})
    return messages


def _text(row: Mapping[str, Any], keys: Sequence[str], name: str) -> str:
    """The first of these fields that is filled in; empty where none is.  Raises DataError for one that is not text."""
    key, text = next(((key, row[key]) for key in keys if row.get(key) not in (None, "")), ("", ""))
    if not isinstance(text, str):
        raise DataError(f"{name}: {key} must be text, got {text!r:.80}; put a list of messages under `messages`")
    return text


def _message(message: Any, name: str) -> dict[str, str]:
    fields = message if isinstance(message, Mapping) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        roles = ", ".join(sorted(set(ROLES.values())))
        raise DataError(f"{name}: a message needs a role ({roles}) and text as content, got {message!r:.80}")
    return {"role": ROLES[role], "content": content}


@contextmanager
def at_place(conversation: Conversation) -> Iterator[None]:
    """A DataError from inside says which row it is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{conversation.place or conversation.id}: {error}") from error.__cause__


# ── sources of rows ──────────────────────────────────────────────────────────────────────────────────────────


def rows(config: Config, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    """(file and line, row) of every row of `config.conversations`; with skip_bad, lines that can't be read are
    counted."""
    source = config.conversations
    if source.startswith("stdlib:"):
        return _library(source.removeprefix("stdlib:"), config.count or LIBRARY_COUNT, config.seed)
    if source.endswith(".jsonl"):
        return _jsonl(Path(source), config.skip_bad, skipped)
    if source.endswith(".json"):
        return _json(Path(source), config.skip_bad, skipped)
    return _text_file(Path(source)) if source.endswith(".txt") else _hub(source, config.split)


def available(config: Config) -> int | None:
    """Rows of the source, used or not; None for a data set of the hub, which is not read to its end."""
    source = config.conversations
    if not source.startswith("stdlib:") and not source.endswith((".jsonl", ".json", ".txt")):
        return None
    everything = config.model_copy(update={"count": sys.maxsize, "skip_bad": True})
    return sum(1 for _ in rows(everything, Skipped()))


def _library(split: str, count: int, seed: int) -> Iterator[tuple[str, Any]]:
    if split not in get_args(demo.Split):
        raise DataError(f"stdlib:{split} is unknown; use stdlib:train or stdlib:held_out")
    # short prompts to train on: reading a prompt costs as much as writing an answer, and trains nothing
    characters = 240 if split == "train" else 600
    for name, text in demo.prompts(cast(demo.Split, split), count, seed, characters):
        yield name, {"id": name, "prompt": text}


def _text_file(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number} is not UTF-8 text: {error}") from None
        if text.strip():
            yield f"{path.name}:{number}", {"prompt": text}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines as bytes, so that a torn character affects its own line only.  A byte order mark at the start is left
    out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f"{path}, line 1 begins with a UTF-16 byte order mark; save the file as UTF-8")
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except FileNotFoundError:
        wanted = "a file of prompts, or stdlib:train for the demo's prompts"
        raise DataError(f"{path} does not exist; give {wanted}") from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from None


def _jsonl(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    def row(numbered: tuple[int, bytes]) -> tuple[str, Any]:
        number, line = numbered
        try:
            return f"{path.name}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = "" if line.endswith(b"\n") else " (the line is cut off)"
            problem = f"{path}, line {number} is not JSON{cut}: {error}"
            raise DataError(f"{problem}; correct it, or skip such lines with --skip-bad") from None

    return skipped.usable(((number, line) for number, line in _lines(path) if line.strip()), row, skip_bad)


def _json(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    """Rows of a list, as ShareGPT's file has them; lines of JSON under this name are read too."""
    try:
        found = json.loads(b"".join(line for _, line in _lines(path)))
    except (ValueError, RecursionError) as error:
        if "Extra data" in str(error):
            yield from _jsonl(path, skip_bad, skipped)
            return
        raise DataError(f"{path} is not JSON: {error}; correct it, or give FILE.jsonl with one row per line") from None
    if not isinstance(found, list):
        raise DataError(
            f"{path} must hold a list of rows, got {type(found).__name__}; give a list, or FILE.jsonl with one row "
            "per line"
        )
    for number, row in enumerate(found):
        yield f"{path.name}[{number}]", row


def _hub(name: str, split: str) -> Iterator[tuple[str, Any]]:
    if (problem := missing_path(name)) is not None:
        raise DataError(f"{problem}; name a file of prompts, a data set of the hub, or stdlib:train")
    import datasets  # a second to import, and only needed here

    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        for number, row in enumerate(rows):
            yield f"{name}[{number}]", row
    except (OSError, ValueError, ConnectionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"can't load data set {name!r}: {first}; give a local .jsonl file where there is no network"
        ) from None
