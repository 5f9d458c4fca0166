"""Hashes of pieces of a text: all runs of 13 words, and any sequence of sentences.

GPT-3's rule (arXiv 2005.14165, appendix C): texts overlap if they share 13 consecutive words.  In scripts without
spaces between words, letters count: 24 of Chinese, Japanese or Korean equal 13 words.  Shorter shingles, such as the 8
letters of near-duplicate search, are not evidence: any two questions of an exam share some.

Hashes have 64 bits: BLAKE2b of each word, summed as a polynomial and mixed.  Imports no torch.
"""

import functools
import hashlib
import math
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

WORDS, LETTERS, THAI = 13, 24, 52
"""Length of a run: in words; in letters of Chinese, Japanese and Korean; in letters and vowel signs of Thai, Lao,
Burmese and Khmer."""
FULL = math.lcm(WORDS, LETTERS, THAI)
"""Total weight of a run's words and letters."""
_KANA_AND_HANGUL = "\u1100-\u11ff\u3040-\u30ff\u31f0-\u31ff\ua960-\ua97f\uac00-\ud7ff"
_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U000323af"
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_DENSE = re.compile(f"([{_KANA_AND_HANGUL}{_HAN}{_SPACELESS}])")
_THAI = re.compile(f"[{_SPACELESS}]")
_ONE = np.uint64(1)
_BASE = 0x9E3779B97F4A7C15 ^ 6  # odd, and 3 modulo 4: few powers of it share their low bits
_INVERSE = pow(_BASE, -1, 1 << 64)


class Pieces:
    """Hashes of all pieces of a text, from prefix sums of its words' terms."""

    def __init__(self, words: Sequence[str]):
        count = len(words)
        powers, self._inverse = _powers(1 << max(12, (count + 1).bit_length()))
        terms = np.fromiter(map(word_hash, words), np.uint64, count) * powers[:count]
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        self.places: np.ndarray | None = None
        """[n + 1] int64, cumulative weight before each word, FULL per run; None if a run is simply WORDS words."""
        if not all(map(str.isascii, words)):
            self.places = np.concatenate([[0], np.cumsum([_weight(word) for word in words])])

    def runs(self) -> np.ndarray:
        """[n] uint64, sorted, without repetitions; empty if the text is shorter than a run."""
        return once(self.placed_runs()[0])

    def placed_runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[n] uint64 and twice [n] int64: every run's hash, its first word and its end."""
        begins, ends = self._bounds()
        return mixed(self._between(begins, ends)), begins, ends

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        count = len(self._sums) - 1
        if self.places is None:
            return np.arange(max(0, count - WORDS + 1)), np.arange(WORDS, count + 1)
        ends = np.searchsorted(self.places, self.places[:-1] + FULL)
        begins = np.flatnonzero(ends <= count)
        return begins, ends[begins]

    def wholes(self, begins: Sequence[int], ends: Sequence[int]) -> np.ndarray:
        """[n] uint64: hashes of the pieces from `begins` to `ends`, equal to those of the pieces as whole texts."""
        first, last = np.array(begins, np.int64), np.array(ends, np.int64)
        return mixed(self._between(first, last) + (last - first).astype(np.uint64))

    def is_short(self, begin: int, end: int) -> bool:
        """Whether a piece is shorter than a run."""
        return end - begin < WORDS if self.places is None else self.places[end] - self.places[begin] < FULL

    def _between(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return (self._sums[ends] - self._sums[begins]) * self._inverse[begins]  # independent of the position


def normalised(text: str) -> str:
    """A text without case, punctuation, line breaks and variants of letters."""
    return " ".join(words_of(text))


def words_of(text: str) -> list[str]:
    """Normalised words; in scripts without spaces each letter is a word."""
    if text.isascii():
        return text.lower().translate(_SIGNS).split()
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).translate(_SIGNS)
    return _DENSE.sub(r" \1 ", plain).split()


def is_dense(word: str) -> bool:
    """Whether a word is a letter of a script without spaces."""
    return len(word) == 1 and not word.isascii() and _DENSE.match(word) is not None


def _weight(word: str) -> int:
    """Weight of a word; a run has FULL."""
    if not is_dense(word):
        return FULL // WORDS
    return FULL // (THAI if _THAI.match(word) else LETTERS)


class _Signs(dict[int, str | None]):
    """Maps characters: letters, marks and digits stay, apostrophes and format characters are removed, everything else
    becomes space."""

    def __missing__(self, code: int) -> str | None:
        letter = chr(code)
        kind = unicodedata.category(letter)
        mapped: str | None = letter if kind[0] in "LMN" else " "
        if letter in "'`\u2018\u2019\u02bc" or kind == "Cf":  # apostrophes; soft hyphens and joiners
            mapped = None
        self[code] = mapped
        return mapped


_SIGNS = _Signs()


@functools.lru_cache(1 << 19)
def word_hash(word: str) -> int:
    """64-bit hash of a word."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(2)
def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """[size] uint64: the powers of _BASE modulo 2**64, and those of its inverse."""
    bases = (np.full(size, base, np.uint64) for base in (_BASE, _INVERSE))
    powers, inverses = (np.concatenate([[_ONE], np.cumprod(base[1:], dtype=np.uint64)]) for base in bases)
    return powers, inverses


_SHIFTS, _FACTORS = np.array([30, 27, 31], np.uint64), np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def mixed(sums: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection that mixes every bit of a sum into every bit of its hash."""
    z = (sums ^ (sums >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


def once(hashes: np.ndarray) -> np.ndarray:
    """Sorted, without repetitions; faster than `np.unique` for the few hashes of one text."""
    hashes = np.sort(hashes)
    is_first = np.ones(len(hashes), dtype=bool)
    np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
    return hashes[is_first]
