"""Recognises rephrased questions by an inverted index of the content words of an evaluation's questions.

A word that occurs in many questions counts less.  A text asks a question if the words that some consecutive sentences
of it (or all of them) share with the question make up most of both, or nearly all of one and half of the other.  It
does not if their numbers or rare words differ, if one says `largest` and the other `smallest`, or if a sentence of the
question has no counterpart.  The consecutive sentences are a maximum subarray (Bentley, Programming Pearls, 1984).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from outrider.data.overlap.content import KIND_BITS, NUMBER_BIT, RARE, Bags, contrasts, weights_of

LIGHTEST, LIGHTEST_TEXT = 1.5, 1.0
"""Minimum weight of a question and of a text to be compared; lighter ones are recognised only word for word."""
ALIKE, ALIKE_BY_NUMBERS = 0.6, (0.6, 0.6, 0.45, 0.38)
"""Minimum of twice the shared weight divided by the total weight of both.  The second, by the number of shared numbers,
applies if these are all numbers of the question and nearly all of the text."""
USUAL_ALIKE = 0.7
"""The same for a question without rare words and numbers."""
CONTAINED, COVERED = 0.85, 0.5
"""Minimum share on one side if the other side's share is only COVERED and the whole text is compared."""
NUMBERS, NAMES = 0.75, 0.5
"""Minimum share of numbers and of rare words in common, relative to the side that has fewer."""
SENTENCE, HEAVY = 0.2, 1.5
"""Minimum share of the words that each sentence adds to a question to be in the text, if they weigh HEAVY or more."""
SMOOTHING, SHARED_BY_MANY = 30, 0.2


class Window(NamedTuple):
    """Consecutive sentences of a text that may ask a question."""

    text: int
    question: int
    first: int
    end: int
    """Sentences [first, end), counted over all texts."""
    is_whole: bool
    """Whether these are all sentences of the text."""


class NearIndex:
    """An index of the content words of questions."""

    def __init__(self, questions: Sequence[Bags], owners: Sequence[int], count: int):
        """owners: the number of each question's prompt.  count: number of distinct questions, for weighting words."""
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
        """[q], weights; infinite for questions that are too light."""

    def near(self, texts: Sequence[Bags]) -> list[tuple[int, int]]:
        """Pairs (text number, prompt number) for which the text asks a question of the prompt."""
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
        """Whole texts, and the consecutive sentences that resemble a question most."""
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
        """The consecutive sentences ending at each sentence with the largest gain, if it is at least `least`."""
        best, start = np.zeros(len(least)), np.zeros(len(least), np.int64)
        for sentence, gain in enumerate(gains):
            is_new = best <= 0
            start = np.where(is_new, sentence, start)
            best = gain + np.where(is_new, 0.0, best)
            for question in np.flatnonzero(best >= least).tolist():
                yield Window(text, question, first + int(start[question]), first + sentence + 1, False)

    def _is_inside(self, shared: np.ndarray, total: float) -> np.ndarray:
        """[q] bool: whether nearly all of a text of this weight may be in the question, or vice versa."""
        low, high = np.minimum(total, self._least), np.maximum(total, self._least)
        return (shared >= CONTAINED * low) & (shared >= COVERED * high)

    def _places(self, bag: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Index of each token in the vocabulary [n], and whether it is in it [n] bool."""
        at = np.searchsorted(self._vocabulary, bag)
        at[at == len(self._vocabulary)] = 0
        return at, self._vocabulary[at] == bag

    def _weigh(self, bag: np.ndarray) -> float:
        at, is_shared = self._places(bag)
        return float((weights_of(bag) * np.where(is_shared, self._factors[at], 1.0)).sum())

    def _shared(self, sentences: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
        """[s, q]: weight of the words that each sentence shares with each question."""
        sizes = self._starts[columns + 1] - self._starts[columns]
        ends = np.cumsum(sizes)
        rows = self._rows[np.repeat(self._starts[columns] - ends + sizes, sizes) + np.arange(sizes.sum())]
        cells = np.repeat(sentences * len(self.owners), sizes) + rows
        shared = np.bincount(cells, np.repeat(self._weights[columns], sizes), minlength=count * len(self.owners))
        return shared.reshape(count, len(self.owners))

    def _asks(self, bag: np.ndarray, number: int, is_whole: bool) -> bool:
        """Whether the words of a text match those of a question."""
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
        heavy = (added for added in self._additions[number] if self._weigh(added) >= HEAVY)
        return all(self._weigh(added[np.isin(added, bag)]) >= SENTENCE * self._weigh(added) for added in heavy)


class Counts(NamedTuple):
    """Number of words of one kind: shared and on each side."""

    shared: int
    text: int
    question: int


def _counts(text: np.ndarray, question: np.ndarray) -> Counts:
    return Counts(int(np.isin(text, question).sum()), len(text), len(question))


def _union(bags: Bags) -> np.ndarray:
    return bags[0] if len(bags) == 1 else np.unique(np.concatenate([np.empty(0, np.uint32), *bags]))


def _additions(bags: Bags) -> list[np.ndarray]:
    """The words of each sentence that are in no earlier sentence."""
    return [bag[~np.isin(bag, _union(bags[:i]))] for i, bag in enumerate(bags)]


def _factors(num_questions: np.ndarray, count: int) -> np.ndarray:
    """Weight factors of words by the number of questions that have them: 1 for one question, then decreasing; small if
    more than half have them."""
    factors = np.clip(np.log((count + SMOOTHING) / num_questions) / math.log(SMOOTHING), SHARED_BY_MANY, 1.0)
    return np.where(num_questions > max(1, count / 2), SHARED_BY_MANY, factors)


def _is_alike(shared: np.ndarray | float, text: float, question: np.ndarray | float, alike: float) -> np.ndarray:
    return np.asarray(2 * shared >= alike * (text + question))


def _is_number(bag: np.ndarray) -> np.ndarray:
    return (bag & NUMBER_BIT) > 0


def _is_rare(bag: np.ndarray) -> np.ndarray:
    return (bag & (NUMBER_BIT | KIND_BITS)) == RARE


_contrasts = functools.cache(contrasts)


def _contrast(text: np.ndarray, question: np.ndarray, group: np.ndarray) -> bool:
    """Whether both have words of the group, but none in common."""
    first, second = (group[np.isin(group, bag)] for bag in (text, question))
    return bool(len(first) and len(second)) and not np.isin(first, second).any()
