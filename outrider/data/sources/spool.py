"""The prompts of a run in a temporary file, so that its sources are read only once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outrider.data.answers.dialogue import HashedConversation
from outrider.data.sources.conversations import Conversation
from outrider.storage.json_text import parse_json


class Spool:
    """Prompts in order, on disk until this is closed; a killed process leaves nothing behind."""

    def __init__(self, folder: Path):
        """folder: where the unnamed temporary file is."""
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder)  # noqa: SIM115, closed with this object

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, prompt: HashedConversation) -> None:
        """Append a prompt.  Raises OSError for a full disk, now or when the prompts are read."""
        it = prompt.conversation
        row = [prompt.prompt_hash, it.id, it.messages, it.place, it.group, list(it.tools)]
        self._file.write(json.dumps(row) + "\n")

    def __iter__(self) -> Iterator[HashedConversation]:
        """All prompts from the start; only one iteration at a time."""
        self._file.seek(0)
        for line in self._file:
            prompt_hash, name, messages, place, group, tools = parse_json(line)
            yield HashedConversation(Conversation(name, messages, place, group, tuple(tools)), prompt_hash)
