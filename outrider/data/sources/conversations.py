"""Rows of prompts as conversations of a user, an assistant and other roles."""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from outrider.data.answers.batch_file import BatchAnswers
from outrider.data.config import Config, Source
from outrider.data.sources.duplicates import content_hash
from outrider.data.sources.messages import Message, Tool, read_row, texts_of
from outrider.data.sources.readers import Row, Skipped, rows
from outrider.errors import DataError

__all__ = ["Conversation", "Skipped", "at_place", "available", "from_source", "parse", "read", "warn_of_unread"]

log = logging.getLogger(__name__)

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON can hold it, no tokenizer can read it."""
GROUPS = ("language", "category")
"""Keys of a row that may say what it is one of; the first that is present counts."""
ANEW = "messages[].weight, since prepare.regenerate has all answers written anew"
NAMED = 20
"""Fields that are not read and that a message names."""
IDS = ("id", "custom_id", "request_id")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as it is in its source."""

    id: str
    """The row's own, or file and line where it has none."""
    messages: list[Message]
    place: str = ""
    """File and line, for errors."""
    group: str = ""
    """Its language or category; empty where its row names none."""
    tools: Sequence[Tool] = ()
    """Tools that the model is offered, which the chat template shows it."""

    @property
    def has_own_id(self) -> bool:
        return self.id != self.place

    @property
    def questions(self) -> list[str]:
        """What the user writes, one text a turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def characters(self) -> int:
        """Of all its texts and its tools."""
        of_tools = sum(map(len, texts_of(self.tools))) if self.tools else 0
        return of_tools + sum(len(message["content"]) for message in self.messages)

    def content(self, answered: bool) -> list[Any]:
        """What tells it from others: its messages, those of the assistant only with `answered`, and its tools."""
        messages = [message for message in self.messages if answered or message["role"] != "assistant"]
        return [*messages, {"tools": list(self.tools)}] if self.tools else messages

    def prompt_hash(self, answered: bool) -> str:
        """Hash of what its answer depends on: its content, as `content` has it, and its own id, which seeds the
        noise."""
        return content_hash([self.id if self.has_own_id else None, self.content(answered)])

    @property
    def numbered(self) -> "Conversation":
        """The same under an id of its own: for a second row of one id, which gets its line added."""
        return replace(self, id=f"{self.id} at {self.place}")


def read(config: Config, skipped: Skipped | None = None) -> Iterator[Conversation]:
    """Up to `config.count` conversations to train on, the first ones, as they come; `sources.select` chooses among all.

    Raises DataError with file and line for a bad row, or counts it in `skipped`.
    """
    skipped = Skipped() if skipped is None else skipped
    ids: set[str] = set()
    count = sys.maxsize if config.count is None else config.count
    for source in config.training_sources:
        own = source if source.count is not None else source.model_copy(update={"count": config.count})
        for conversation in islice(from_source(own, config, skipped), source.count):
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

    def conversation(row: Row) -> Conversation:
        found = made(row)
        if config.regenerate and any("weight" in message for message in found.messages):
            skipped.unread[ANEW] += 1
        return found

    def made(row: Row) -> Conversation:
        return parse(row[1] if answers is None else answers.joined(row[1], row[0]), row[0], skipped)

    return skipped.usable(rows(source, config.skip_bad, skipped, config.seed), conversation, config.skip_bad)


def warn_of_unread(skipped: Skipped, config: Config) -> None:
    """One line with the fields of rows that no layout knows, if there are any."""
    if skipped.unread:
        most = skipped.unread.most_common(NAMED)
        named = ", ".join(f"{key} ({count:,} rows)" for key, count in most)
        more = f" and {len(skipped.unread) - NAMED} more" if len(skipped.unread) > NAMED else ""
        log.warning(
            "fields of %s that are not read: %s%s; see docs/data.md for those that are", config.label, named, more
        )


def nothing_in(config: Config) -> DataError:
    return DataError(f"{config.label} has no conversation; give rows with messages, turns, prompt or text")


def parse(row: Any, name: str, skipped: Skipped | None = None) -> Conversation:
    """One row in any of the known layouts.  `name`: file and line, for its id and for errors.

    skipped: gets the names of fields that were not read.
    """
    if not isinstance(row, Mapping):
        raise DataError(f'{name}: a row must be a mapping such as {{"prompt": "..."}}, got {type(row).__name__}')
    messages, tools, unread = read_row(row, name)
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise DataError(
            f"{name}: the conversation has no user turn with text; add one, or skip such rows with --skip-bad"
        )
    meta = row.get("meta")
    own = next((row[key] for key in IDS if row.get(key) is not None), None)
    own = meta.get("id") if own is None and isinstance(meta, Mapping) else own
    group = next((row[key] for key in GROUPS if isinstance(row.get(key), str)), "")
    conversation = Conversation(name if own is None else str(own), messages, name, group, tools)
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
    """A DataError from inside says which row it is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{conversation.place or conversation.id}: {error}") from error.__cause__


def available(config: Config) -> int | None:
    """Rows of the sources, used or not; None where one is a data set of the hub, which is not read to its end."""
    if any(source.name is not None for source in config.training_sources):
        return None
    whole: Callable[[Source], Source] = lambda source: source.model_copy(update={"count": sys.maxsize})
    return sum(1 for source in config.training_sources for _ in rows(whole(source), True, Skipped(), config.seed))
