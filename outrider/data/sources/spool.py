"""The prompts of a run in a file of its own, so that its sources are read once for all that is done with them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outrider.data.answers.talks import Asked
from outrider.data.sources.conversations import Conversation


class Spool:
    """Prompts in their order, on disk until this is closed; a killed process leaves nothing."""

    def __init__(self, folder: Path):
        """folder: the file lies there, without a name."""
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder)  # noqa: SIM115, closed with this object

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, one: Asked) -> None:
        """Append a prompt.  Raises OSError for a full disk, now or when the prompts are read."""
        talk = one.conversation
        row = [one.prompt_hash, talk.id, talk.messages, talk.place, talk.group, list(talk.tools)]
        self._file.write(json.dumps(row) + "\n")

    def __iter__(self) -> Iterator[Asked]:
        """All prompts, from the first one; one reading at a time."""
        self._file.seek(0)
        for line in self._file:
            prompt_hash, name, messages, place, group, tools = json.loads(line)
            yield Asked(Conversation(name, messages, place, group, tuple(tools)), prompt_hash)
