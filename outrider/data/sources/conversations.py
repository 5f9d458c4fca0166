"""Rows of prompts as conversations of a user, an assistant and other roles."""

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from outrider.data.answers.batch_file import BatchAnswers
from outrider.data.config import Config, Source
from outrider.data.sources.duplicates import content_hash
from outrider.data.sources.messages import Message, Tool, texts_of
from outrider.data.sources.readers import Row, Skipped, rows
from outrider.data.sources.rows import read_row
from outrider.errors import DataError

__all__ = ["Conversation", "Skipped", "at_place", "available", "from_source", "parse", "read", "warn_of_unread"]

log = logging.getLogger(__name__)

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: valid in JSON, but not in any tokenizer's input."""
GROUPS = ("language", "category")
"""Keys of a row that may name its group; the first one present counts."""
IGNORED_WEIGHT = "messages[].weight, since prepare.regenerate replaces all answers"
NAMED = 20
"""Maximum number of unread fields that a warning names."""
IDS = ("id", "custom_id", "request_id")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as it is in its source."""

    id: str
    """The row's id, or its file and line if it has none."""
    messages: list[Message]
    place: str = ""
    """File and line, for errors."""
    group: str = ""
    """Its language or category; empty if its row names none."""
    tools: Sequence[Tool] = ()
    """Tools offered to the model."""

    @property
    def has_own_id(self) -> bool:
        return self.id != self.place

    @property
    def questions(self) -> list[str]:
        """The user's messages."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def characters(self) -> int:
        """Number of characters of its texts and tools."""
        in_tools = sum(map(len, texts_of(self.tools))) if self.tools else 0
        return in_tools + sum(len(message["content"]) for message in self.messages)

    def content(self, answered: bool) -> list[Any]:
        """What identifies it: its messages, those of the assistant only with `answered`, and its tools."""
        messages = [message for message in self.messages if answered or message["role"] != "assistant"]
        return [*messages, {"tools": list(self.tools)}] if self.tools else messages

    def prompt_hash(self, answered: bool) -> str:
        """Hash of what its answer depends on: its content and, if its row has one, its id, which seeds the noise."""
        return content_hash([self.id if self.has_own_id else None, self.content(answered)])

    @property
    def numbered(self) -> "Conversation":
        """The same with its line number added to the id, for a row whose id is a repetition."""
        return replace(self, id=f"{self.id} at {self.place}")


def read(config: Config, skipped: Skipped | None = None) -> Iterator[Conversation]:
    """The first `config.count` conversations to train on, in order; `mixture.select` chooses among all.

    Raises DataError with file and line for a bad row, or counts it in `skipped`.
    """
    skipped = Skipped() if skipped is None else skipped
    ids: set[str] = set()
    count = sys.maxsize if config.count is None else config.count
    for source in config.training_sources:
        limited = source if source.count is not None else source.model_copy(update={"count": config.count})
        for conversation in islice(from_source(limited, config, skipped), source.count):
            if len(ids) == count:
                return
            # reports list prompts by their id
            conversation = conversation.numbered if conversation.id in ids else conversation
            ids.add(conversation.id)
            yield conversation
    if not ids:
        raise nothing_in(config)
    warn_of_unread(skipped, config)


def from_source(source: Source, config: Config, skipped: Skipped) -> Iterator[Conversation]:
    """The conversations of one source in its order; raises or counts as `read` does."""
    answers = None if source.answers is None else BatchAnswers(source.answers)

    def parse_row(row: Row) -> Conversation:
        place, content = row
        conversation = parse(content if answers is None else answers.joined(content, place), place, skipped)
        if config.regenerate and any("weight" in message for message in conversation.messages):
            skipped.unread[IGNORED_WEIGHT] += 1
        return conversation

    return skipped.usable(rows(source, config.skip_bad, skipped, config.seed), parse_row, config.skip_bad)


def warn_of_unread(skipped: Skipped, config: Config) -> None:
    """Log one line with the unknown fields of rows, if there are any."""
    if skipped.unread:
        named = ", ".join(f"{key} ({count:,} rows)" for key, count in skipped.unread.most_common(NAMED))
        more = f" and {len(skipped.unread) - NAMED} more" if len(skipped.unread) > NAMED else ""
        log.warning(
            "fields of %s that are not read: %s%s; see docs/data.md for those that are", config.label, named, more
        )


def nothing_in(config: Config) -> DataError:
    return DataError(f"{config.label} has no conversation; give rows with messages, turns, prompt or text")


def parse(row: Any, name: str, skipped: Skipped | None = None) -> Conversation:
    """Parse one row in any of the known layouts.

    name: its file and line, for its id and for errors.  skipped: collects the names of unread fields.
    """
    if not isinstance(row, Mapping):
        raise DataError(f'{name}: a row must be a mapping such as {{"prompt": "..."}}, got {type(row).__name__}')
    messages, tools, unread = read_row(row, name)
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise DataError(
            f"{name}: the conversation has no user turn with text; add one, or skip such rows with --skip-bad"
        )
    meta = row.get("meta")
    row_id = next((row[key] for key in IDS if row.get(key) is not None), None)
    if row_id is None and isinstance(meta, Mapping):
        row_id = meta.get("id")
    group = next((row[key] for key in GROUPS if isinstance(row.get(key), str)), "")
    conversation = Conversation(name if row_id is None else str(row_id), messages, name, group, tools)
    for text in (conversation.id, group, *texts_of(messages), *texts_of(tools)):
        if broken := SURROGATE.search(text):
            raise DataError(
                f"{name}: the text holds {broken[0]!a}, half of a surrogate pair; write the whole character"
            )
    if skipped is not None:
        skipped.unread.update(set(unread).difference(IDS, GROUPS, ("meta",)))
    return conversation


@contextmanager
def at_place(conversation: Conversation) -> Iterator[None]:
    """Add the row's file and line to a DataError raised inside."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{conversation.place or conversation.id}: {error}") from error.__cause__


def available(config: Config) -> int | None:
    """Number of rows of the sources, used or not; None with a data set on the hub, which is not read to the end."""
    if any(source.name is not None for source in config.training_sources):
        return None
    whole = [source.model_copy(update={"count": sys.maxsize}) for source in config.training_sources]
    return sum(1 for source in whole for _ in rows(source, True, Skipped(), config.seed))
