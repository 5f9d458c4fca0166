"""Several processes answer the prompts of one folder; the ledger assigns prompts, and each process has its own file.

    answers.1.part.jsonl    answers of process 1, until the first process adds them to answers.jsonl

Complete lines of a process that died are merged by the next run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

from outrider.data.answers.store import ANSWERS
from outrider.storage.atomic import sync, whole_lines
from outrider.storage.json_text import parse_json

T = TypeVar("T")


class ProcessGroup(Protocol):
    """The processes of a run, as seen by one of them."""

    rank: int
    """Rank of this process, from 0; process 0 merges the answers."""
    count: int

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank; returns once all have called this."""


def part_path(folder: Path, rank: int) -> Path:
    """The file that a process writes its answers to."""
    return folder / (ANSWERS if rank == 0 else f"answers.{rank}.part.jsonl")


def merge_parts(folder: Path) -> None:
    """Add the answers of other processes to answers.jsonl, without repetitions, and remove their files."""
    parts = sorted(folder.glob("answers.*.part.jsonl"))
    if not parts:
        return
    path = folder / ANSWERS
    written = {_prompt_hash(line) for _, line in whole_lines(path)}
    with path.open("ab") as file:
        for part in parts:
            for _, line in whole_lines(part):
                if (prompt_hash := _prompt_hash(line)) not in written:
                    written.add(prompt_hash)
                    file.write(line)
    sync(path)
    for part in parts:
        part.unlink()


def _prompt_hash(line: bytes) -> str:
    try:
        return str(parse_json(line)["prompt_hash"])
    except (ValueError, KeyError, TypeError):  # the reader of the merged file reports the damaged line
        return ""
