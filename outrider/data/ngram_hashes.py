"""Does one text hold a piece of another?  A text is the hashes of all its runs of 13 words.

GPT-3's rule (arXiv 2005.14165, appendix C): texts overlap that share 13 words in a row.  Where words are long, or
without spaces between them, letters count: 24 of Chinese, Japanese or Korean stand for 13 words.  Shorter shingles,
such as the 8 letters of searches for near duplicates, prove nothing: any two questions of an exam share them.  A text
that is shorter than a run is compared as a whole.

Hashes have 64 bits: of BLAKE2b of each word, summed as a polynomial and mixed.  Knows no torch.
"""

import functools
import hashlib
import math
import re
import unicodedata
from typing import NamedTuple

import numpy as np

WORDS, LETTERS, THAI = 13, 24, 52
"""Length of a run: in words; in letters of Chinese, Japanese and Korean; in letters and vowel signs of Thai and the
like."""
FULL = math.lcm(WORDS, LETTERS, THAI)
"""The weights of a run's words and letters add up to this."""
_KANA_AND_HANGUL = "\u1100-\u11ff\u3040-\u30ff\u31f0-\u31ff\ua960-\ua97f\uac00-\ud7ff"
_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U000323af"
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_DENSE = re.compile(f"([{_KANA_AND_HANGUL}{_HAN}{_SPACELESS}])")
_THAI = re.compile(f"[{_SPACELESS}]")
_ONE = np.uint64(1)
_BASE = 0x9E3779B97F4A7C15 ^ 6  # odd, and 3 modulo 4: few powers of it share their low bits
_INVERSE = pow(_BASE, -1, 1 << 64)


class Hashes(NamedTuple):
    """The n-gram hashes of one text."""

    runs: np.ndarray
    """[n] uint64, sorted, each once; none where the text is shorter than a run."""
    whole: int | None
    """Of all its words; None where it has none."""


def hashes(text: str) -> Hashes:
    """A text as hashes that case, punctuation, line breaks and forms of letters do not change."""
    words = _words(text)
    if not words:
        return Hashes(np.empty(0, np.uint64), None)
    count = len(words)
    powers, inverse = _powers(1 << max(12, (count + 1).bit_length()))
    terms = np.fromiter(map(_word_hash, words), np.uint64, count) * powers[:count]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    if text.isascii():
        begins, ends = np.arange(max(0, count - WORDS + 1)), np.arange(WORDS, count + 1)
    else:
        weights = np.concatenate([[0], np.cumsum([_weight(word) for word in words])])
        ends = np.searchsorted(weights, weights[:-1] + FULL)
        begins = np.flatnonzero(ends <= count)
        ends = ends[begins]
    runs = (sums[ends] - sums[begins]) * inverse[begins]  # the hash of a run does not depend on its position
    whole = _mixed(sums[-1:] + np.uint64(count))
    return Hashes(once(_mixed(runs)), int(whole[0]))


def normalised(text: str) -> str:
    """A text without what does not count: case, punctuation, line breaks, forms of letters."""
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    """Words in normal form; in scripts without spaces a letter is a word."""
    if text.isascii():
        return text.lower().translate(_SIGNS).split()
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).translate(_SIGNS)
    return _DENSE.sub(r" \1 ", plain).split()


def _weight(word: str) -> int:
    """Of a run's FULL."""
    if len(word) > 1 or word.isascii() or not _DENSE.match(word):
        return FULL // WORDS
    return FULL // (THAI if _THAI.match(word) else LETTERS)


class _Signs(dict[int, str | None]):
    """Maps a character: letters, marks and digits stay, apostrophes and the like vanish, all others become spaces."""

    def __missing__(self, code: int) -> str | None:
        letter = chr(code)
        kind = unicodedata.category(letter)
        # ' and its kin, soft hyphens, joiners
        found = None if letter in "'`\u2018\u2019\u02bc" or kind == "Cf" else letter if kind[0] in "LMN" else " "
        self[code] = found
        return found


_SIGNS = _Signs()


@functools.lru_cache(1 << 19)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(2)
def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """[size] uint64: the powers of _BASE modulo 2**64, and those of its inverse."""
    bases = (np.full(size, base, np.uint64) for base in (_BASE, _INVERSE))
    one, other = (np.concatenate([[_ONE], np.cumprod(base[1:], dtype=np.uint64)]) for base in bases)
    return one, other


_SHIFTS, _FACTORS = np.array([30, 27, 31], np.uint64), np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def _mixed(sums: np.ndarray) -> np.ndarray:
    """Every bit of a sum into every bit of its hash, one to one (the finaliser of SplitMix64)."""
    z = (sums ^ (sums >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


def once(found: np.ndarray) -> np.ndarray:
    """Sorted, each once; faster than numpy's own for the few hashes of one text."""
    found = np.sort(found)
    first = np.ones(len(found), dtype=bool)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return found[first]
