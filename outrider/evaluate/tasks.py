"""Prompt sets by name: `stdlib` is the demo's held-out code; any FILE.jsonl or FILE.txt is a task under its stem."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider import demo
from outrider.errors import DataError
from outrider.prepare.conversations import Config as Source
from outrider.prepare.conversations import read


class Prompt(NamedTuple):
    """One prompt of a task: the user's turns.  The answers between them are the target's own."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    reference: Any = None
    """What the task's scorer compares an answer with; None where the task has no score."""

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The conversation up to the next answer wanted, with the answers given so far."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in itertools.zip_longest(self.turns[: len(answers) + 1], answers):
            said.append({"role": "user", "content": turn})
            if answer is not None:
                said.append({"role": "assistant", "content": answer})
        return said


def task_name(task: str) -> str:
    return Path(task).stem if task.endswith((".jsonl", ".txt")) else task


def check(task: str) -> str:
    """The task's name, known.  Raises DataError naming those there are."""
    if task != "stdlib" and not task.endswith((".jsonl", ".txt")):
        raise DataError(f"unknown task {task!r}; known: stdlib, or a file of prompts such as prompts/gsm8k.jsonl")
    return task


def prompts(task: str, most: int, seed: int = 0) -> Iterator[Prompt]:
    """Up to `most` prompts.  Raises DataError for an unknown task, naming those there are."""
    if check(task) == "stdlib":
        for name, text in demo.prompts("held_out", most, seed):
            yield Prompt(name, (text,))
        return
    for conversation in read(Source(conversations=task, count=most)):
        said = {role: [m["content"] for m in conversation.messages if m["role"] == role] for role in ("system", "user")}
        yield Prompt(conversation.id, tuple(said["user"]), said["system"][0] if said["system"] else None)
