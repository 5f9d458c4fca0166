"""Several processes that answer the prompts of one folder: the ledger shares them out, each writes a file of its own.

    answers.1.part.jsonl    what process 1 has answered, until the first process adds it to answers.jsonl

A process that dies leaves its whole lines, which the next run takes in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol, TypeVar

from outrider.data.answers.store import ANSWERS
from outrider.storage.atomic import sync, whole_lines

T = TypeVar("T")


class Together(Protocol):
    """The processes of a run, as one of them sees them."""

    rank: int
    """Of this process, from 0; the first one brings all answers together."""
    count: int

    def gather(self, value: T) -> list[T]:
        """What every process gives here, by rank; returns when all have asked."""


def part(folder: Path, rank: int) -> Path:
    """The file that a process writes its answers to."""
    return folder / (ANSWERS if rank == 0 else f"answers.{rank}.part.jsonl")


def take_in(folder: Path) -> None:
    """Add the answers of other processes to answers.jsonl, each once, and remove their files."""
    parts = sorted(folder.glob("answers.*.part.jsonl"))
    if not parts:
        return
    path = folder / ANSWERS
    known = {_prompt_hash(line) for _, line in whole_lines(path)}
    with path.open("ab") as file:
        for own in parts:
            for _, line in whole_lines(own):
                if (prompt_hash := _prompt_hash(line)) not in known:
                    known.add(prompt_hash)
                    file.write(line)
    sync(path)
    for own in parts:
        own.unlink()


def _prompt_hash(line: bytes) -> str:
    try:
        return str(json.loads(line)["prompt_hash"])
    except (ValueError, KeyError, TypeError):  # who reads the file names the damaged line
        return ""
