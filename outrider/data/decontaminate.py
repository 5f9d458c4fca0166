"""Conversations that ask what an evaluation asks: found before the target answers them, and left out.

Two rules.  GPT-3's (arXiv 2005.14165, appendix C; see `ngram_hashes`): 13 words in a row in common, or 24 letters of
Chinese, Japanese or Korean; what more than 10 prompts of the evaluation have is a common phrase.  And MinHash of runs
of 5 characters: a first turn that is nearly that of a prompt, which finds short ones that differ in a few letters.
Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from outrider.data.duplicates import NEAR, SIZE, signature
from outrider.data.hash_files import COMMON
from outrider.data.ngram_hashes import hashes

RULE = (
    f"13 words or 24 letters in a row in common, what more than {COMMON} prompts have not counted; or a first turn "
    f"that is the same, or {NEAR:.0%} the same in runs of 5 characters"
)


class Prompt(Protocol):
    """The parts of a task's prompt that are compared."""

    @property
    def id(self) -> str: ...

    @property
    def turns(self) -> tuple[str, ...]: ...


class Overlap(NamedTuple):
    """What a conversation shares with an evaluation."""

    task: str
    prompt: str
    """Its id."""
    how: str
    """`words`, `whole` or `near`."""


class Evaluated:
    """The prompts of an evaluation, to be looked for in conversations."""

    def __init__(self, prompts: Mapping[str, Iterable[Prompt]]):
        self.keys: list[tuple[str, str]] = []
        """Task and id of each."""
        runs, owners = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        self._firsts, self._longs = dict[int, int](), dict[int, int]()
        """Hashes of first turns, and of turns that are no shorter than a run, to the prompt's number."""
        self._index: Any = None
        self._signatures = dict[int, np.ndarray]()
        for number, (task, prompt) in enumerate(_each(prompts)):
            self.keys.append((task, prompt.id))
            found = [hashes(turn) for turn in prompt.turns]
            own = np.unique(np.concatenate([np.empty(0, np.uint64), *(one.runs for one in found)]))
            runs.append(own)
            owners.append(np.full(len(own), number))
            for i, one in enumerate(found):
                if one.whole is not None and i == 0:
                    self._firsts.setdefault(one.whole, number)
                if one.whole is not None and len(one.runs):
                    self._longs.setdefault(one.whole, number)
            self._add_signature(number, prompt.turns)
        self._runs, at, counts = np.unique(np.concatenate(runs), return_index=True, return_counts=True)
        self._owners = np.concatenate(owners)[at]
        rare = counts <= COMMON
        self._runs, self._owners = self._runs[rare], self._owners[rare]

    def _add_signature(self, number: int, turns: Sequence[str]) -> None:
        if not turns or hashes(turns[0]).whole is None:
            return
        if self._index is None:
            from datasketch import MinHashLSH  # loads scipy, and only needed here

            self._index = MinHashLSH(threshold=NEAR, num_perm=SIZE)
        made = signature(turns[0])
        self._index.insert(number, made)
        self._signatures[number] = made.hashvalues.astype(np.uint32)

    def overlap(self, turns: Sequence[str]) -> Overlap | None:
        """What a conversation, given by the user's turns, shares with a prompt; None where it shares nothing."""
        for i, turn in enumerate(turns):
            found = hashes(turn)
            if found.whole is None:
                continue
            number = self._longs.get(found.whole, self._firsts.get(found.whole) if i == 0 else None)
            if number is not None:
                return Overlap(*self.keys[number], "whole")
            at = np.searchsorted(self._runs, found.runs)
            at[at == len(self._runs)] = 0
            if len(self._runs) and (there := self._runs[at] == found.runs).any():
                return Overlap(*self.keys[int(self._owners[at[there][0]])], "words")
            if i == 0 and self._index is not None and (near := self._near(turn)) is not None:
                return Overlap(*self.keys[near], "near")
        return None

    def _near(self, turn: str) -> int | None:
        mine = signature(turn)
        numbers = mine.hashvalues.astype(np.uint32)
        # the index gives candidates; which of them are near, the signatures tell
        candidates = sorted(self._index.query(mine))
        return next((one for one in candidates if (self._signatures[one] == numbers).mean() >= NEAR), None)


def _each(prompts: Mapping[str, Iterable[Prompt]]) -> Iterator[tuple[str, Prompt]]:
    return ((task, prompt) for task, own in prompts.items() for prompt in own)
