"""The questions of an evaluation, and which of them a text asks.

GPT-3's rule (arXiv 2005.14165, appendix C) is that texts overlap if they share 13 consecutive words.  But so do two
questions with the same introduction, so here such runs must cover half of the question's content.  A text also asks a
question that it contains word for word as whole sentences, however short, or in nearly the same content words.  What
many questions share is not evidence.  Task layouts and instructions about the answer are left out on both sides, see
`units`.  Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from outrider.data.overlap.near import ALIKE, ALIKE_BY_NUMBERS, CONTAINED, COVERED, NearIndex
from outrider.data.overlap.ngram_hashes import LETTERS, WORDS
from outrider.data.overlap.units import SPECIFIC, Units, placed_runs, statements_of, units

COMMON = 10
"""A phrase in more questions of an evaluation, or more documents of a source, is common and does not count."""
RUNS_COVER = 0.5
"""Minimum share of a question's content that common runs must cover."""
RULE = (
    f"the question without layout and instructions: {RUNS_COVER:.0%} of its content in runs of {WORDS} words, or "
    f"{LETTERS} letters of Chinese, Japanese or Korean, in common; a shorter one, or its sentences, word for word; or "
    f"{ALIKE:.0%} of the content words of both ({ALIKE_BY_NUMBERS[-1]:.0%} where several numbers agree), or "
    f"{CONTAINED:.0%} of one and {COVERED:.0%} of the other; what more than {COMMON}, or more than half of a task's "
    "questions have does not count"
)


class Prompt(Protocol):
    """The parts of a task's prompt that are compared."""

    @property
    def id(self) -> str: ...

    @property
    def questions(self) -> tuple[str, ...]: ...


class Lookup:
    """Hashes of questions, with the owner of each (a prompt or a turn)."""

    def __init__(self, hashes: np.ndarray, owners: np.ndarray):
        self.order = np.argsort(hashes, kind="stable")
        """Indices that sort the given rows by hash."""
        self.hashes, self.owners = hashes[self.order], owners[self.order]

    def rows_in(self, hashes: np.ndarray) -> np.ndarray:
        """[n] int64: the rows that have one of these hashes."""
        at = np.searchsorted(self.hashes, hashes)
        at[at == len(self.hashes)] = 0
        if not len(self.hashes) or not (is_in := self.hashes[at] == hashes).any():
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isin(self.hashes, hashes[is_in]))


class Runs:
    """The runs of questions by hash, and how much of a question a set of runs covers."""

    def __init__(self, lookup: Lookup, begins: np.ndarray, ends: np.ndarray, weights: Sequence[np.ndarray]):
        """lookup: its owners are turns.  begins, ends: words of its rows.  weights: of the words of each question."""
        self.lookup, self._begins, self._ends, self._weights = lookup, begins, ends, weights

    def covered(self, rows: np.ndarray, one_in: int = 1) -> list[int]:
        """The questions mostly covered by these runs.  one_in: n if only one in n runs was looked up."""
        eligible = self.lookup.hashes & np.uint64(one_in - 1) == 0
        numbers = np.unique(self.lookup.owners[rows]).tolist()
        return [number for number in numbers if self._share(number, rows, eligible) >= RUNS_COVER]

    def _share(self, number: int, rows: np.ndarray, eligible: np.ndarray) -> float:
        weights = self._weights[number]
        matched = rows[self.lookup.owners[rows] == number]
        possible = np.flatnonzero((self.lookup.owners == number) & eligible)
        covered, total = (weights[self._words(runs, len(weights))].sum() for runs in (matched, possible))
        return covered / total if total else 1.0

    def _words(self, rows: np.ndarray, count: int) -> np.ndarray:
        """[n] bool: the words of a question that these runs cover."""
        begun, ended = (np.bincount(words[rows], minlength=count + 1) for words in (self._begins, self._ends))
        return np.cumsum(begun - ended)[:count] > 0


class Lookups(NamedTuple):
    """Look-ups that are compared with different units of a text."""

    firsts: Lookup
    """Whole first turns; compared with a whole text and its other statements."""
    wholes: Lookup
    """Specific statements of questions; compared with a text's statements and sentences."""
    pieces: Lookup
    """Questions without their options, and sentences that make up half of a question; compared with a whole text."""


class Questions:
    """The questions of an evaluation, for look-ups.

    A later turn counts only if it is at least as long as a run: `Now make it rhyme` is not a question without the turns
    before it.
    """

    def __init__(self, prompts: Mapping[str, Iterable[Prompt]]):
        self.keys = list[tuple[str, str]]()
        """Task and id of each prompt."""
        self.has_text = list[bool]()
        """Whether a prompt has any word to look up."""
        self._turns = list[Turn]()
        numbers = defaultdict[str, set[int]](set)
        keyed = ((task, prompt) for task, of_task in prompts.items() for prompt in of_task)
        for number, (task, prompt) in enumerate(keyed):
            self.keys.append((task, prompt.id))
            turns = [Turn(number, question, units(question), i == 0) for i, question in enumerate(prompt.questions)]
            self.has_text.append(any(turn.units.whole is not None for turn in turns))
            self._turns += [turn for turn in turns if turn.counts]
            numbers[task].update(turn.units.whole for turn in turns if turn.units.whole is not None)
        counts = {task: len(wholes) for task, wholes in numbers.items()}
        self.is_long = np.zeros(len(self.keys), np.bool_)
        """[p] bool, whether a prompt has a run of 13 words."""
        self.is_long[[turn.prompt for turn in self._turns if len(turn.units.runs)]] = True
        self.lookups = Lookups(*(self._lookup(name, {} if name == "firsts" else counts) for name in Lookups._fields))
        self.runs = self._runs(counts)
        statements = [(turn.prompt, bags) for turn in self._turns for bags in statements_of(turn.question)]
        self.near = NearIndex([bags for _, bags in statements], [prompt for prompt, _ in statements],
                              sum(counts.values()))  # fmt: skip

    def first_in(self, text: Units, is_first: bool) -> tuple[int, str] | None:
        """The prompt that a turn asks, and how; None if it asks none.  is_first: whether it is the first of its
        conversation."""
        if text.whole is None:
            return None
        whole = np.append(text.wholes, np.uint64(text.whole))
        exact = self.lookups.firsts.rows_in(whole) if is_first else whole[:0]
        if len(exact):
            return int(self.lookups.firsts.owners[exact[0]]), "whole"
        stem = whole[:0] if text.stem is None else np.array([text.stem], np.uint64)
        exact = self.lookups.wholes.rows_in(np.concatenate([whole, stem, text.spans]))
        if len(exact):
            return int(self.lookups.wholes.owners[exact[0]]), "whole"
        if len(rows := self.runs.lookup.rows_in(text.runs)) and (turns := self.runs.covered(rows)):
            return self._turns[turns[0]].prompt, "words"
        if len(rows := self.lookups.pieces.rows_in(whole[-1:])):
            return int(self.lookups.pieces.owners[rows[0]]), "part"
        pairs = self.near.near(text.statements)
        return (pairs[0][1], "near") if pairs else None

    def prompts_of(self, turns: Iterable[int]) -> set[int]:
        return {self._turns[turn].prompt for turn in turns}

    def _lookup(self, name: str, counts: Mapping[str, int]) -> Lookup:
        hashes = [turn.evidence[name] for turn in self._turns]
        owners = np.repeat([turn.prompt for turn in self._turns], list(map(len, hashes))).astype(np.int64)
        flat = np.concatenate([np.empty(0, np.uint64), *hashes])
        is_rare = self._is_rare(flat, np.repeat(np.arange(len(hashes)), list(map(len, hashes))), counts)
        return Lookup(flat[is_rare], owners[is_rare])

    def _runs(self, counts: Mapping[str, int]) -> Runs:
        placed = [placed_runs(turn.question) for turn in self._turns]
        hashes = np.concatenate([np.empty(0, np.uint64), *(runs.hashes for runs in placed)])
        begins = np.concatenate([np.empty(0, np.int64), *(runs.begins for runs in placed)])
        ends = np.concatenate([np.empty(0, np.int64), *(runs.ends for runs in placed)])
        turns = np.repeat(np.arange(len(placed)), [len(runs.hashes) for runs in placed])
        is_rare = self._is_rare(hashes, turns, counts)
        lookup = Lookup(hashes[is_rare], turns[is_rare])
        order = lookup.order
        return Runs(lookup, begins[is_rare][order], ends[is_rare][order], [runs.weights for runs in placed])

    def _is_rare(self, hashes: np.ndarray, turns: np.ndarray, counts: Mapping[str, int]) -> np.ndarray:
        """[n] bool: whether few questions have each hash.

        turns [n]: the turn of each hash.  counts: number of questions per task; if empty, nothing counts as common.
        """
        if not len(hashes) or not counts:
            return np.ones(len(hashes), np.bool_)
        wholes = np.array([turn.units.whole for turn in self._turns], np.uint64)[turns]
        tasks = np.array([self.keys[turn.prompt][0] for turn in self._turns])[turns]
        common = [_repeated(hashes, wholes, COMMON)]
        for task, count in counts.items():
            in_task = tasks == task
            common.append(_repeated(hashes[in_task], wholes[in_task], max(1, count // 2)))
        return ~np.isin(hashes, np.concatenate(common))


class Turn(NamedTuple):
    """One turn of a prompt."""

    prompt: int
    """Number of its prompt."""
    question: str
    units: Units
    is_first: bool

    @property
    def counts(self) -> bool:
        return self.units.whole is not None and (self.is_first or len(self.units.runs) > 0)

    @property
    def evidence(self) -> dict[str, np.ndarray]:
        """The hashes for each look-up."""
        hashes = (self.units.whole, self.units.stem)
        whole, stem = (np.array([] if value is None else [value], np.uint64) for value in hashes)
        is_specific = len(self.units.runs) > 0 or self.units.weight >= SPECIFIC
        pieces = self.units.spans[self.units.span_weights >= COVERED * self.units.weight]
        return {
            "firsts": whole if self.is_first else whole[:0],
            "wholes": np.concatenate([self.units.wholes, whole if is_specific else whole[:0]]),
            "pieces": np.concatenate([pieces, stem]),
        }  # fmt: skip


def _repeated(hashes: np.ndarray, questions: np.ndarray, most: int) -> np.ndarray:
    """The hashes shared by more than `most` different questions."""
    if not len(hashes):
        return hashes
    order = np.lexsort((questions, hashes))
    hashes, questions = hashes[order], questions[order]
    is_new = np.append(True, (hashes[1:] != hashes[:-1]) | (questions[1:] != questions[:-1]))
    values, counts = np.unique(hashes[is_new], return_counts=True)
    return values[counts > most]
