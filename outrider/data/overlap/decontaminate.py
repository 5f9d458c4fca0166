"""Finds conversations that share a question with an evaluation, to leave them out before the target answers them.

The rule is in `overlap.questions`.  Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from outrider.data.overlap.questions import Prompt, Questions
from outrider.data.overlap.units import units


class SharedQuestion(NamedTuple):
    """A question that a conversation shares with an evaluation."""

    task: str
    prompt: str
    """Its id."""
    how: str
    """`whole` or `part`: the question or part of it word for word; `words`: consecutive words; `near`: nearly the same
    content words."""


class EvaluationPrompts:
    """The prompts of an evaluation, for look-ups."""

    def __init__(self, prompts: Mapping[str, Iterable[Prompt]]):
        self._questions = Questions(prompts)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._questions.keys)

    def overlap(self, turns: Sequence[str]) -> SharedQuestion | None:
        """The first question that a conversation shares with a prompt; None if there is none.  turns: the user's."""
        for i, turn in enumerate(turns):
            match = self._questions.first_in(units(turn), is_first=i == 0)
            if match is not None:
                return SharedQuestion(*self._questions.keys[match[0]], match[1])
        return None
