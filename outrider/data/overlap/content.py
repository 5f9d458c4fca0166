"""A text as the set of its content words, each a 32-bit token that includes its weight.

Stop words are dropped; inflected forms and synonyms have the same token, and so do `7`, `seven` and `7.0`.  In Chinese,
Japanese and Korean, letters and adjacent pairs are tokens.  The lowest bits of a token are its weight class and whether
it is a number, so a stored token needs no table.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from outrider.data.overlap.ngram_hashes import is_dense, word_hash
from outrider.data.overlap.vocabulary import CJK_STOP, COMMON, CONTRASTS, INSTRUCTION, NUMBERS, STOP, SYNONYMS

Bags = Sequence[np.ndarray]
"""The content tokens of each sentence, [n] uint32, sorted."""
FAINT, USUAL, SMALL_NUMBER, RARE = range(4)
WEIGHTS = np.array([0.2, 0.5, 0.6, 1.0])
"""Weights of tokens whose two lowest bits are FAINT, USUAL, SMALL_NUMBER, RARE."""
_WEIGHTS: list[float] = WEIGHTS.tolist()
KIND_BITS, NUMBER_BIT = 3, 4
NUMBER = re.compile(r"\d+(?:p\d+)?")
"""`p` is the decimal point, see `plain_text`."""
SMALL = 12
ENDINGS = re.compile(r"(?:ational|ations?|itions?|ments?|ness(?:es)?|iti?es|ity|ings?|ed|ers?|est|ions?|ive|ly|es|s)$")
SHORTEST_STEM = 4


def stem(word: str) -> str:
    """A word without its ending, roughly: `planets`, `planet`; `sustainable`, `sustainability` stay apart."""
    if len(word) <= 3 or not word.isascii():
        return word
    short = ENDINGS.sub("", word) if not word.endswith(("ss", "us", "is")) else word
    if len(short) < SHORTEST_STEM:
        short = word[:-1] if word[-1] == "s" and word[-2] not in "su" else word
    if len(short) > SHORTEST_STEM and short[-1] == short[-2] and short[-1] not in "ls":
        short = short[:-1]
    return short.rstrip("eiy") if len(short) > SHORTEST_STEM else short


def _stems() -> dict[str, str]:
    """Maps words and stems to the stem that represents their synonyms; if several groups have a word, the first is
    used."""
    stems = dict[str, str]()
    for group in SYNONYMS:
        for word in group:
            stems.setdefault(word, stem(group[0]))
            stems.setdefault(stem(word), stem(group[0]))
    return stems


_STEMS = _stems()


def canonical(word: str) -> str:
    """The stem that represents a word and its synonyms."""
    return _STEMS.get(word) or _STEMS.get(short := stem(word), short)


_FAINT, _USUAL = frozenset(map(canonical, INSTRUCTION)), frozenset(map(canonical, COMMON))
_CONTRASTING = frozenset(canonical(word) for group in CONTRASTS for word in group)


@functools.lru_cache(1 << 19)
def token(word: str) -> int:
    """A word's token; 0 if it carries no content."""
    if word in STOP:
        return 0
    word = NUMBERS.get(word, word)
    if NUMBER.fullmatch(word):
        number = word.lstrip("0") or "0"
        is_small = number.isdecimal() and len(number) < 3 and int(number) <= SMALL
        return _token(number, NUMBER_BIT + (SMALL_NUMBER if is_small else RARE))
    short = canonical(word)
    if len(word) == 1 or (short in _FAINT and short not in _CONTRASTING):
        return _token(short, FAINT)
    return _token(short, USUAL if short in _USUAL or short in _CONTRASTING else RARE)


def _token(text: str, kind: int) -> int:
    return ((word_hash(text) >> 35) << 3) | kind


@functools.lru_cache(1 << 16)
def _letter(letter: str) -> int:
    return _token(letter, FAINT)


@functools.lru_cache(1 << 19)
def _pair(first: str, second: str) -> int:
    return _token(first + second, USUAL)


def tokens(words: Sequence[str]) -> list[int]:
    """The tokens of normalised words, in their order."""
    ids = [token(word) for word in words]
    if not all(map(str.isascii, words)):
        dense = [i for i, word in enumerate(words) if is_dense(word)]
        for i in dense:
            ids[i] = 0 if words[i] in CJK_STOP else _letter(words[i])
        ids += [_pair(words[i], words[after]) for i, after in pairwise(dense) if after == i + 1]
    return [number for number in ids if number]


def word_weight(word: str) -> float:
    """The weight of a single word; a letter of Chinese, Japanese or Korean weighs as much as a pair of them."""
    if is_dense(word):
        return _WEIGHTS[USUAL]
    return _WEIGHTS[number & KIND_BITS] if (number := token(word)) else 0.0


def weights_of(bag: np.ndarray) -> np.ndarray:
    """[n] float: the weight of each token of a bag [n] uint32."""
    return WEIGHTS[bag & KIND_BITS]


def weight(ids: Sequence[int]) -> float:
    """Total weight of the distinct tokens."""
    return float(sum(_WEIGHTS[number & KIND_BITS] for number in set(ids)))


def contrasts() -> list[np.ndarray]:
    """Groups of contrasting tokens, [n] uint32: two questions with different words of a group ask different things."""
    return [np.unique(np.array([token(word) for word in group], np.uint32)) for group in CONTRASTS]
