"""Prompt sets by name: `stdlib` is the demo's held-out code; any FILE.jsonl or FILE.txt is a task under its stem."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from outrider import demo
from outrider.errors import DataError
from outrider.prepare.conversations import Config as Source
from outrider.prepare.conversations import read


class Prompt(NamedTuple):
    """One prompt of a task."""

    id: str
    messages: list[dict[str, str]]
    """Everything up to the first answer wanted."""


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
            yield Prompt(name, [{"role": "user", "content": text}])
        return
    for conversation in read(Source(conversations=task, count=most)):
        first = next((i for i, m in enumerate(conversation.messages) if m["role"] == "user"), 0)
        yield Prompt(conversation.id, conversation.messages[: first + 1])
