"""Which texts ask a question in other words: an inverted index of the content words of an evaluation's questions.

A word that many of the questions have counts less.  A text asks a question where the words that some of its sentences
in a row, or all of them, share with the question make up most of both, or nearly all of one and half of the other; not
where their numbers or rare words differ, where one says `largest` and the other `smallest`, or where a sentence of the
question has no counterpart.  The sentences in a row are a maximum subarray (Bentley, Programming Pearls, 1984).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from outrider.data.overlap.content import KIND_BITS, NUMBER_BIT, RARE, contrasts, weights_of

LIGHTEST, LIGHTEST_TEXT = 1.5, 1.0
"""Weight of a question and of a text that are compared; lighter ones are recognised only word for word."""
ALIKE, ALIKE_BY_NUMBERS = 0.6, (0.6, 0.6, 0.45, 0.38)
"""Twice the shared weight over the weight of both, at least; by how many numbers the two have in common, where these
are all of the question's and nearly all of the text's."""
USUAL_ALIKE = 0.7
"""The same, where a question has no rare word and no number."""
CONTAINED, COVERED = 0.85, 0.5
"""The share of one, at least, where the other's is only COVERED and all of the text is compared."""
NUMBERS, NAMES = 0.75, 0.5
"""Numbers, and rare words, that must be shared, of the side that has fewer."""
SENTENCE, HEAVY = 0.2, 1.5
"""The share of what each sentence adds to a question that must be in the text, if that weighs HEAVY or more."""
SMOOTHING, SHARED_BY_MANY = 30, 0.2

Bags = Sequence[np.ndarray]
"""The bag of content tokens of each sentence, [n] uint32, sorted."""


class Window(NamedTuple):
    """Sentences of a text that may ask a question."""

    text: int
    question: int
    first: int
    end: int
    """Sentences, counted over all texts; the end is not included."""
    is_whole: bool
    """Whether these are all sentences of the text."""


class NearIndex:
    """The content words of questions, to be compared with those of texts."""

    def __init__(self, questions: Sequence[Bags], owners: Sequence[int], count: int):
        """owners: the number of each question's prompt.  count: of different questions, for the weight of words."""
        self.owners = np.array(owners, np.int64)
        self._bags = [_union(bags) for bags in questions]
        self._additions = [_additions(bags) for bags in questions]
        flat = np.concatenate([np.empty(0, np.uint32), *self._bags])
        rows = np.repeat(np.arange(len(questions)), [len(bag) for bag in self._bags])
        self._vocabulary, columns = np.unique(flat, return_inverse=True)
        holders = np.unique(np.stack([columns, self.owners[rows]]), axis=1)[0]
        self._factors = _factors(np.bincount(holders, minlength=len(self._vocabulary)), count)
        order = np.argsort(columns, kind="stable")
        self._rows = rows[order]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=len(self._vocabulary)))])
        self._weights = weights_of(self._vocabulary) * self._factors
        self._totals = np.bincount(rows, self._weights[columns], minlength=len(questions))
        self._least = np.where(self._totals >= LIGHTEST, self._totals, np.inf)
        """[q], infinite for questions that are too light."""

    def near(self, texts: Sequence[Bags]) -> list[tuple[int, int]]:
        """Pairs of a text's number and a prompt's number, where the text asks a question of the prompt."""
        sentences = [bag for bags in texts for bag in bags]
        if not len(self._vocabulary) or not sentences:
            return []
        flat = np.concatenate(sentences)
        of_sentence = np.repeat(np.arange(len(sentences)), [len(bag) for bag in sentences])
        at, is_shared = self._places(flat)
        weights = weights_of(flat) * np.where(is_shared, self._factors[at], 1.0)
        shared = self._shared(of_sentence[is_shared], at[is_shared], len(sentences))
        totals = np.bincount(of_sentence, weights, minlength=len(sentences))
        bounds = list(accumulate(map(len, texts), initial=0))
        pairs = dict[tuple[int, int], None]()
        for window in self._windows(shared, totals, bounds, sentences):
            pair = (window.text, int(self.owners[window.question]))
            bag = _union(sentences[window.first : window.end])
            if pair not in pairs and self._asks(bag, window.question, window.is_whole):
                pairs[pair] = None
        return list(pairs)

    def _windows(
        self, shared: np.ndarray, totals: np.ndarray, bounds: Sequence[int], sentences: Bags
    ) -> Iterator[Window]:
        """Whole texts, and the sentences in a row that resemble a question most."""
        for text, (first, end) in enumerate(pairwise(bounds)):
            if first == end:
                continue
            whole = totals[first] if end == first + 1 else self._weigh(_union(sentences[first:end]))
            is_candidate = _is_alike(shared[first:end].sum(0), whole, self._least, ALIKE_BY_NUMBERS[-1])
            for question in np.flatnonzero(is_candidate | self._is_inside(shared[first:end].sum(0), whole)).tolist():
                yield Window(text, question, first, end, True)
            for alike in (ALIKE, ALIKE_BY_NUMBERS[-1]) if end > first + 1 else ():
                gains = 2 * shared[first:end] - alike * totals[first:end, None]
                yield from self._parts(text, first, gains, alike * self._least)

    def _parts(self, text: int, first: int, gains: np.ndarray, least: np.ndarray) -> Iterator[Window]:
        """The sentences in a row, up to each sentence, that gain most, where they gain enough."""
        best, start = np.zeros(len(least)), np.zeros(len(least), np.int64)
        for sentence, gain in enumerate(gains):
            is_new = best <= 0
            start = np.where(is_new, sentence, start)
            best = gain + np.where(is_new, 0.0, best)
            for question in np.flatnonzero(best >= least).tolist():
                yield Window(text, question, first + int(start[question]), first + sentence + 1, False)

    def _is_inside(self, shared: np.ndarray, total: float) -> np.ndarray:
        """[q] bool: whether a text of this weight may be nearly all in a question, or the question in the text."""
        low, high = np.minimum(total, self._least), np.maximum(total, self._least)
        return (shared >= CONTAINED * low) & (shared >= COVERED * high)

    def _places(self, bag: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in the vocabulary each token is [n], and whether it is there [n] bool."""
        at = np.searchsorted(self._vocabulary, bag)
        at[at == len(self._vocabulary)] = 0
        return at, self._vocabulary[at] == bag

    def _weigh(self, bag: np.ndarray) -> float:
        at, is_shared = self._places(bag)
        return float((weights_of(bag) * np.where(is_shared, self._factors[at], 1.0)).sum())

    def _shared(self, sentences: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
        """[s, q]: the weight of the words that each sentence shares with each question."""
        sizes = self._starts[columns + 1] - self._starts[columns]
        ends = np.cumsum(sizes)
        rows = self._rows[np.repeat(self._starts[columns] - ends + sizes, sizes) + np.arange(sizes.sum())]
        cells = np.repeat(sentences * len(self.owners), sizes) + rows
        shared = np.bincount(cells, np.repeat(self._weights[columns], sizes), minlength=count * len(self.owners))
        return shared.reshape(count, len(self.owners))

    def _asks(self, bag: np.ndarray, number: int, is_whole: bool) -> bool:
        """Whether the words of a text are those of a question."""
        question, total = self._bags[number], self._weigh(bag)
        shared = self._weigh(bag[np.isin(bag, question)])
        numbers, names = (_counts(bag[kind(bag)], question[kind(question)]) for kind in (_is_number, _is_rare))
        all_numbers = numbers.shared == numbers.question and numbers.text <= numbers.shared + 1
        alike = ALIKE_BY_NUMBERS[min(numbers.shared, len(ALIKE_BY_NUMBERS) - 1)] if all_numbers else ALIKE
        if not numbers.question and not names.question:
            alike = USUAL_ALIKE
        is_alike = bool(_is_alike(shared, total, self._totals[number], alike))
        is_inside = is_whole and bool(self._is_inside(np.full(len(self._least), shared), total)[number])
        return (
            total >= LIGHTEST_TEXT and (is_inside or (is_alike and self._has_each_sentence(bag, number)))
            and numbers.shared >= NUMBERS * min(numbers.text, numbers.question)
            and names.shared >= NAMES * min(names.text, names.question)
            and (names.shared > 0 or not names.question or numbers.shared > 1)
            and not any(_contrast(bag, question, group) for group in _contrasts())
        )  # fmt: skip

    def _has_each_sentence(self, bag: np.ndarray, number: int) -> bool:
        heavy = (one for one in self._additions[number] if self._weigh(one) >= HEAVY)
        return all(self._weigh(one[np.isin(one, bag)]) >= SENTENCE * self._weigh(one) for one in heavy)


class Counts(NamedTuple):
    """Words of one kind, in common and of each side."""

    shared: int
    text: int
    question: int


def _counts(text: np.ndarray, question: np.ndarray) -> Counts:
    return Counts(int(np.isin(text, question).sum()), len(text), len(question))


def _union(bags: Bags) -> np.ndarray:
    return bags[0] if len(bags) == 1 else np.unique(np.concatenate([np.empty(0, np.uint32), *bags]))


def _additions(bags: Bags) -> list[np.ndarray]:
    """The words of each sentence that no earlier one has."""
    return [bag[~np.isin(bag, _union(bags[:i]))] for i, bag in enumerate(bags)]


def _factors(num_questions: np.ndarray, count: int) -> np.ndarray:
    """Of words that so many of the questions have: 1 for one question, the less the more, little for over half."""
    factors = np.clip(np.log((count + SMOOTHING) / num_questions) / math.log(SMOOTHING), SHARED_BY_MANY, 1.0)
    return np.where(num_questions > max(1, count / 2), SHARED_BY_MANY, factors)


def _is_alike(shared: np.ndarray | float, one: float, other: np.ndarray | float, alike: float) -> np.ndarray:
    return np.asarray(2 * shared >= alike * (one + other))


def _is_number(bag: np.ndarray) -> np.ndarray:
    return (bag & NUMBER_BIT) > 0


def _is_rare(bag: np.ndarray) -> np.ndarray:
    return (bag & (NUMBER_BIT | KIND_BITS)) == RARE


_contrasts = functools.cache(contrasts)


def _contrast(one: np.ndarray, other: np.ndarray, group: np.ndarray) -> bool:
    """Whether both have words of a group, but none in common."""
    first, second = (group[np.isin(group, bag)] for bag in (one, other))
    return bool(len(first) and len(second)) and not np.isin(first, second).any()
