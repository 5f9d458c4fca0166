"""Rows of data sets as prompts: one function for each layout.

A key that is null counts as missing, because Parquet writes missing values so.  A missing key raises KeyError.  A wrong
type raises TypeError, which says what was given and what was wanted.  The caller knows file and line and makes a
DataError of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from outrider.data.overlap.layout_texts import CONTEST, INPUT, STEP_BY_STEP, WITH_STARTER, WITH_STDIN, WITH_TESTS
from outrider.data.sources.conversations import GROUPS

Row = Mapping[str, Any]


class Prompt(NamedTuple):
    """One prompt of a task: the user's turns.  The answers between them are the target's own."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    reference: Any = None
    """What an answer is compared with, or a function that reads it; None where the task has no score."""
    group: str = ""
    """Its language or category, by which figures are given too; empty where its row names none."""
    bare: tuple[str, ...] = ()
    """The turns as the row has them; empty where the layout adds nothing to them."""

    @property
    def questions(self) -> tuple[str, ...]:
        """The turns without what the layout adds, for the search for them in other texts."""
        return self.bare or self.turns

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The conversation up to the next answer, with the answers so far."""
        messages_so_far = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in itertools.zip_longest(self.turns[: len(answers) + 1], answers):
            messages_so_far.append({"role": "user", "content": turn})
            if answer is not None:
                messages_so_far.append({"role": "assistant", "content": answer})
        return messages_so_far


def has(row: Row, key: str) -> bool:
    return row.get(key) is not None


def text(row: Row, key: str) -> str:
    """The text under a key."""
    found: str = _typed(row, key, "a text", lambda value: isinstance(value, str))
    return found


def texts(row: Row, key: str) -> tuple[str, ...]:
    """The list of texts under a key; it may be empty.  A single text is not taken as a list of letters."""
    is_list = lambda value: isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    return tuple(_typed(row, key, "a list of texts", is_list))


def word(row: Row, *keys: str) -> str:
    """The text under the first of these keys that is present; a number is written as text."""
    is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    key = next((key for key in keys if has(row, key)), keys[0])
    return str(_typed(row, key, "a text or a number", lambda value: isinstance(value, str) or is_number(value)))


def _typed(row: Row, key: str, wanted: str, is_right: Callable[[Any], bool]) -> Any:
    if not has(row, key):
        raise KeyError(key)
    if not is_right(row[key]):
        raise TypeError(f"{key} must be {wanted}, not {row[key]!r:.80}")
    return row[key]


# ── layouts ──


def gsm8k(row: Row) -> Prompt:
    answer = text(row, "answer").rpartition("####")[2].strip()
    question = text(row, "question")
    return Prompt("", (question + STEP_BY_STEP,), reference=answer, bare=(question,))


def problem(row: Row) -> Prompt:
    question, answer = text(row, "problem"), word(row, "answer")
    return Prompt(
        _name(row, "unique_id", "problem_idx"), (question + STEP_BY_STEP,), reference=answer, bare=(question,)
    )


def humaneval(row: Row) -> Prompt:
    stub = text(row, "prompt")
    tests = {"stub": stub, "name": text(row, "entry_point"), "test": text(row, "test")}
    return Prompt(word(row, "task_id"), (WITH_TESTS.format(stub=stub),), reference=tests, bare=(stub,))


def mbpp(row: Row) -> Prompt:
    imports = texts(row, "test_imports") if has(row, "test_imports") else ()
    tests = {"imports": list(imports), "asserts": list(texts(row, "test_list"))}
    return Prompt(f"mbpp/{word(row, 'task_id')}", (text(row, "prompt"),), reference=tests)


def livecodebench(row: Row) -> Prompt:
    starter = text(row, "starter_code").strip("\n") if has(row, "starter_code") else ""
    form = WITH_STARTER.format(starter=starter) if starter else WITH_STDIN
    question = text(row, "question_content")
    return Prompt(word(row, "question_id"), (CONTEST.format(question=question, form=form),), bare=(question,))


def mt_bench(row: Row) -> Prompt:
    return Prompt(word(row, "prompt_id"), texts(row, "prompt"), group=_name(row, "category"))


def alpaca(row: Row) -> Prompt:
    instruction, context = text(row, "instruction"), text(row, "input") if has(row, "input") else ""
    if not context:
        return Prompt("", (instruction,))
    return Prompt("", (instruction + INPUT.format(input=context),), bare=(f"{instruction}\n{context}",))


def arena_hard(row: Row) -> Prompt:
    return Prompt(word(row, "uid"), (text(row, "prompt"),))


def plain(row: Row) -> Prompt:
    """The plain layout, which Spec-Bench uses too."""
    system = text(row, "system") if has(row, "system") else None
    name, group = _name(row, "id", "question_id"), _name(row, *GROUPS)
    return Prompt(name, texts(row, "turns"), system, row.get("reference"), group)


def _name(row: Row, *keys: str) -> str:
    """The text or number under the first of these keys that is present; empty where there is none."""
    return word(row, *keys) if any(has(row, key) for key in keys) else ""
