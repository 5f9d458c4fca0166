"""The units of a text that are compared with others: its question, without the layout of a task.

A text states its question as a whole, in the docstring of a code stub, in the prose around code, or in a stem with
options.  Instructions about the answer (`Please reason step by step`, `Answer with the letter only`) and the texts that
task layouts add are left out everywhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from outrider.data.overlap.content import Bags, tokens, weight, word_weight
from outrider.data.overlap.layout_texts import LAYOUTS
from outrider.data.overlap.ngram_hashes import LETTERS, Pieces, once, words_of
from outrider.data.overlap.plain import plain_text
from outrider.data.overlap.vocabulary import INSTRUCTION, OPENERS, STOP, TRIGGERS

SPECIFIC = 1.0
"""Minimum weight of a short text's content words for its occurrence inside a longer text to be evidence."""
_INSTRUCTING = STOP | INSTRUCTION
_LONGEST_INSTRUCTION = 40
_BREAK = re.compile(r"(?<=[.!?:;])[\"')\]*_]*\s+|\s*\n\s*|(?<=[。！？；：])")
_PLACEHOLDER = re.compile(r"\{\w+\}")
_DOCSTRING = re.compile(r"(?:\"\"\"|''')(.*?)(?:\"\"\"|'''|\Z)", re.DOTALL)
_EXAMPLES = re.compile(r">>>|\b[Ff]or example\b|\b[Ee]xamples?\b\s*[:\n]|\be\.g\.|\[input/output\]", re.IGNORECASE)
_APPENDIX = re.compile(
    r"\n\W*(?:(?:examples?|constraints|input|output|notes?)\b[ \d]*\W*(?:\n|$)|(?:example|sample)\b)", re.IGNORECASE
)
"""Where the examples and constraints of a problem begin."""
_OPTION = re.compile(r"(?:^|(?<=\s))[(\[]?([A-Ja-j])[).:\]]\s+", re.MULTILINE)
_FIRST_OPTION = tuple(f"{letter}{mark}" for letter in "Aa" for mark in ").:]")
_FEWEST_OPTIONS = 3

Words = Sequence[str]


class Units(NamedTuple):
    """The units of one text."""

    runs: np.ndarray
    """[n] uint64, hashes of its runs of 13 words; empty if it is shorter."""
    whole: int | None
    """Hash of all its words; None without words."""
    wholes: np.ndarray
    """[n] uint64, hashes of other statements of its question: docstring, or stem and options in any order."""
    stem: int | None
    """Hash of a question without its options."""
    spans: np.ndarray
    """[n] uint64, hashes of consecutive sentences that are shorter than a run, but specific."""
    span_weights: np.ndarray
    """[n] float, weight of the content words in each."""
    weight: float
    """Weight of all its content words."""
    statements: tuple[Bags, ...]
    """The content tokens of each sentence: of the whole text, and of each docstring."""


def sentences(text: str) -> list[list[str]]:
    """The normalised words of each sentence, line or label."""
    return [words for piece in _BREAK.split(text) if (words := words_of(piece))]


@functools.cache
def _of_layouts() -> frozenset[tuple[str, ...]]:
    """All sentences that task layouts add."""
    texts = (_PLACEHOLDER.sub("\n", layout) for layout in LAYOUTS)
    return frozenset(tuple(words) for text in texts for words in sentences(text))


def is_instruction(words: Words) -> bool:
    """Whether a sentence is only an instruction about the answer, a label or a greeting."""
    if len(words) > _LONGEST_INSTRUCTION:
        return False
    is_labelled = words[0] in TRIGGERS
    is_about_answer = all(word in _INSTRUCTING or (is_labelled and word.isdecimal()) for word in words)
    return (is_about_answer and not TRIGGERS.isdisjoint(words)) or tuple(words) in _of_layouts()


def bare(text: str) -> list[list[str]]:
    """The question of a text, as sentences of normalised words, without layouts and instructions.

    A text that has nothing else is returned as a whole.
    """
    listed = sentences(plain_text(text))
    return [_without_openers(words) for words in listed if not is_instruction(words)] or listed


def _without_openers(words: list[str]) -> list[str]:
    begin = next((i for i, word in enumerate(words) if word not in OPENERS), 0)
    end = len(words) - (words[-1] in ("please", "thanks") and len(words) > begin + 1)
    return words[begin:end]


def units(text: str) -> Units:
    """The units of a text."""
    listed = bare(text)
    words = list(chain.from_iterable(listed))
    if not words:
        nothing = np.empty(0, np.uint64)
        return Units(nothing, None, nothing, None, nothing, np.empty(0), 0.0, ())
    pieces = Pieces(words)
    sentence_tokens = [tokens(sentence) for sentence in listed]
    spans, span_weights = _spans(pieces, listed, sentence_tokens)
    docstrings = _stated_in_docstrings(text)
    wholes, stem = [_hash(chain.from_iterable(docstring)) for docstring in docstrings], None
    if (places := _options(text)) is not None:
        wholes.append(_hash(_with_options(text, places)))
        stem = _hash(_words(text[: places[0].start()]))
    statements = [sentence_tokens, *(list(map(tokens, docstring)) for docstring in docstrings)]
    return Units(
        pieces.runs(), int(pieces.wholes([0], [len(words)])[0]), once(np.array(wholes, np.uint64)), stem, spans,
        span_weights, weight(list(chain.from_iterable(sentence_tokens))),
        tuple(tuple(_bag(ids) for ids in statement if ids) for statement in statements),
    )  # fmt: skip


def statements_of(question: str) -> list[Bags]:
    """The content tokens of each sentence that states a question.

    From its docstrings, if it has any, else from the text before its examples and constraints.
    """
    statements = _stated_in_docstrings(question)
    if not statements:
        head = bare(_APPENDIX.split(question, maxsplit=1)[0])
        statements = [head if _weight(head) >= SPECIFIC else bare(question)]
    return [[_bag(ids) for ids in map(tokens, statement) if ids] for statement in statements]


class PlacedRuns(NamedTuple):
    """The runs of a question."""

    hashes: np.ndarray
    """[n] uint64."""
    begins: np.ndarray
    """[n] int64, index of the first word."""
    ends: np.ndarray
    """[n] int64, index after the last word."""
    weights: np.ndarray
    """[w] float, weight of each word of the question."""


def placed_runs(question: str) -> PlacedRuns:
    """Every run of a question, with its place."""
    words = _words(question)
    return PlacedRuns(*Pieces(words).placed_runs(), np.array(list(map(word_weight, words))))


def _stated_in_docstrings(text: str) -> list[list[list[str]]]:
    """The sentences of each docstring with enough content to state a question."""
    return [docstring for docstring in map(bare, _docstrings(text)) if _weight(docstring) >= SPECIFIC]


def _bag(ids: Sequence[int]) -> np.ndarray:
    return np.array(sorted(set(ids)), np.uint32)


def _weight(statement: Sequence[Words]) -> float:
    return weight(list(chain.from_iterable(map(tokens, statement))))


def _hash(words: Iterable[str]) -> int:
    words = list(words)
    return int(Pieces(words).wholes([0], [len(words)])[0])


def _spans(
    pieces: Pieces, listed: Sequence[Words], sentence_tokens: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Hashes and weights of all consecutive sentences that are shorter than a run."""
    places = [0, *accumulate(map(len, listed))]
    totals = [0.0, *accumulate(weight(ids) if len(ids) < LETTERS else 0.0 for ids in sentence_tokens)]
    begins, ends, weights = list[int](), list[int](), list[float]()
    for first, begin in enumerate(places[:-1]):
        for last in range(first + 1, len(places)):
            if not pieces.is_short(begin, places[last]):
                break
            if totals[last] - totals[first] >= SPECIFIC:
                begins.append(begin)
                ends.append(places[last])
                weights.append(totals[last] - totals[first])
    return pieces.wholes(begins, ends), np.array(weights)


def _docstrings(text: str) -> list[str]:
    """The docstrings of code stubs, without their examples."""
    if '"""' not in text and "'''" not in text:
        return []
    return [_EXAMPLES.split(docstring, maxsplit=1)[0] for docstring in _DOCSTRING.findall(text)]


def _words(text: str) -> list[str]:
    return list(chain.from_iterable(bare(text)))


def _options(text: str) -> list[re.Match[str]] | None:
    """The labels a, b, c, … of a multiple-choice question; None for any other text."""
    if not any(mark in text for mark in _FIRST_OPTION):
        return None
    places = list[re.Match[str]]()
    for match in _OPTION.finditer(text):
        if ord(match[1].lower()) == ord("a") + len(places):
            places.append(match)
    return places if len(places) >= _FEWEST_OPTIONS else None


def _with_options(text: str, places: Sequence[re.Match[str]]) -> list[str]:
    """The stem, then the options without their letters, sorted."""
    texts = [text[label.end() : following.start()] for label, following in pairwise(places)]
    last = text[places[-1].end() :].split("\n", 1)[0]
    options = sorted(_words(option) for option in [*texts, last])
    return [*_words(text[: places[0].start()]), *chain.from_iterable(options)]
