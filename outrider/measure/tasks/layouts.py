"""Rows of data sets as prompts: one function per layout.

A null key counts as missing, because that is how Parquet writes missing values.  A missing key raises KeyError, a wrong
type raises TypeError with the expected and the actual value.  The caller knows file and line and turns both into
DataErrors.
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
    """One prompt of a task: the user's turns.  The target's own answers come between them."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    group: str = ""
    """Language or category, by which reports break down their figures; empty if the row names none."""
    bare: tuple[str, ...] = ()
    """The turns as in the row; empty if the layout adds nothing to them."""

    @property
    def questions(self) -> tuple[str, ...]:
        """The turns without what the layout adds, for finding them in other texts."""
        return self.bare or self.turns

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The conversation up to the next answer, including the answers so far."""
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
    return _typed(row, key, "a text", lambda value: isinstance(value, str))


def texts(row: Row, key: str) -> tuple[str, ...]:
    """The list of texts under a key, possibly empty.  A single text is not treated as a list of letters."""
    is_list = lambda value: isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    return tuple(_typed(row, key, "a list of texts", is_list))


def word(row: Row, *keys: str) -> str:
    """The text under the first of these keys that is present; numbers become text."""
    is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    key = next((key for key in keys if has(row, key)), keys[0])
    return str(_typed(row, key, "a text or a number", lambda value: isinstance(value, str) or is_number(value)))


def _typed(row: Row, key: str, expected: str, is_valid: Callable[[Any], bool]) -> Any:
    if not has(row, key):
        raise KeyError(key)
    if not is_valid(row[key]):
        raise TypeError(f"{key} must be {expected}, not {row[key]!r:.80}")
    return row[key]


# ── layouts ──


def gsm8k(row: Row) -> Prompt:
    question = text(row, "question")
    return Prompt("", (question + STEP_BY_STEP,), bare=(question,))


def problem(row: Row) -> Prompt:
    question = text(row, "problem")
    return Prompt(_name(row, "unique_id", "problem_idx"), (question + STEP_BY_STEP,), bare=(question,))


def humaneval(row: Row) -> Prompt:
    stub = text(row, "prompt")
    return Prompt(word(row, "task_id"), (WITH_TESTS.format(stub=stub),), bare=(stub,))


def mbpp(row: Row) -> Prompt:
    return Prompt(f"mbpp/{word(row, 'task_id')}", (text(row, "prompt"),))


def livecodebench(row: Row) -> Prompt:
    starter = text(row, "starter_code").strip("\n") if has(row, "starter_code") else ""
    form = WITH_STARTER.format(starter=starter) if starter else WITH_STDIN
    question = text(row, "question_content")
    return Prompt(word(row, "question_id"), (CONTEST.format(question=question, form=form),), bare=(question,))


def mt_bench(row: Row) -> Prompt:
    return Prompt(word(row, "prompt_id"), texts(row, "prompt"), group=_name(row, "category"))


def alpaca(row: Row) -> Prompt:
    instruction = text(row, "instruction")
    context = text(row, "input") if has(row, "input") else ""
    if not context:
        return Prompt("", (instruction,))
    return Prompt("", (instruction + INPUT.format(input=context),), bare=(f"{instruction}\n{context}",))


def arena_hard(row: Row) -> Prompt:
    return Prompt(word(row, "uid"), (text(row, "prompt"),))


def plain(row: Row) -> Prompt:
    """The plain layout, also used by Spec-Bench."""
    system = text(row, "system") if has(row, "system") else None
    return Prompt(_name(row, "id", "question_id"), texts(row, "turns"), system, _name(row, *GROUPS))


def _name(row: Row, *keys: str) -> str:
    """The text or number under the first of these keys that is present, otherwise an empty text."""
    return word(row, *keys) if any(has(row, key) for key in keys) else ""
