"""Does one text hold a piece of another?  A text is the hashes of all its runs of 13 words; those of millions are one file.

GPT-3's rule (arXiv 2005.14165, appendix C): texts overlap that share 13 words in a row; a run that more than 10 documents of a
source hold is a phrase of everybody's and does not count.  Where words are not set apart, or are long, letters count:
24 of Chinese, Japanese or Korean stand for 13 words.  Shorter shingles, such as the 8 letters of searches for near duplicates,
are no sign by themselves: any two questions of an exam share them.  A text that is shorter than a run is compared as a whole.

Only hashes are kept: 64 bits, of BLAKE2b of each word, summed as a polynomial and mixed.  Knows no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from outrider.errors import DataError

FORMAT = 1
"""Of the file, and of the rule: hashes of another format are others."""
WORDS, LETTERS, THAI = 13, 24, 52
"""What is one run: words, or letters of Chinese, Japanese and Korean, or letters and vowel signs of Thai and its neighbours."""
COMMON = 10
"""A run that more documents of a source hold does not count."""
LIMIT = 1 << 23
"""Most hashes of one kind that are kept; of more, one in two, in four, and so on."""
RULE = (
    f"{WORDS} words, or {LETTERS} letters of Chinese, Japanese or Korean, in a row in common, in lower case without "
    f"punctuation; shorter texts whole; what more than {COMMON} documents hold does not count"
)

FULL = math.lcm(WORDS, LETTERS, THAI)
"""What the words and letters of a run weigh together."""
_KANA_AND_HANGUL = "\u1100-\u11ff\u3040-\u30ff\u31f0-\u31ff\ua960-\ua97f\uac00-\ud7ff"
_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U000323af"
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_DENSE = re.compile(f"([{_KANA_AND_HANGUL}{_HAN}{_SPACELESS}])")
_THAI = re.compile(f"[{_SPACELESS}]")

_ONE = np.uint64(1)
_BASE = 0x9E3779B97F4A7C15 ^ 6  # odd, and 3 modulo 4: few powers of it are alike in their low bits
_INVERSE = pow(_BASE, -1, 1 << 64)


class Hashes(NamedTuple):
    """One text."""

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
    powers, inverse = _powers(count + 1)
    terms = np.fromiter(map(_HASHES.__getitem__, words), np.uint64, count) * powers[:count]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    if text.isascii():
        begins, ends = np.arange(max(0, count - WORDS + 1)), np.arange(WORDS, count + 1)
    else:
        weights = np.concatenate([[0], np.cumsum([_weight(word) for word in words])])
        ends = np.searchsorted(weights, weights[:-1] + FULL)
        begins = np.flatnonzero(ends <= count)
        ends = ends[begins]
    runs = (sums[ends] - sums[begins]) * inverse[begins]  # a run is the same wherever it stands
    whole = _mixed(sums[-1:] + np.uint64(count))
    return Hashes(_once(_mixed(runs)), int(whole[0]))


def _words(text: str) -> list[str]:
    """In normal form; a letter of a script whose words are not set apart is a word."""
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
    """What becomes of a character: letters, marks and digits stay, what stands within words goes, all else sets them apart."""

    def __missing__(self, code: int) -> str | None:
        letter = chr(code)
        kind = unicodedata.category(letter)
        # ' and its kin, soft hyphens, joiners
        found = None if letter in "'`\u2018\u2019\u02bc" or kind == "Cf" else letter if kind[0] in "LMN" else " "
        self[code] = found
        return found


class _HashOf(dict[str, int]):
    """Hashes of words, remembered."""

    def __missing__(self, word: str) -> int:
        if len(self) > 1 << 20:
            self.clear()
        found = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        self[word] = found
        return found


_SIGNS, _HASHES = _Signs(), _HashOf()
_TABLES: dict[str, tuple[np.ndarray, np.ndarray]] = {}


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """[≥ count] uint64: the powers of _BASE modulo 2**64, and those of its inverse."""
    if "powers" not in _TABLES or len(_TABLES["powers"][0]) < count:
        size = max(1 << 12, 1 << count.bit_length())
        bases = (np.full(size, base, np.uint64) for base in (_BASE, _INVERSE))
        one, other = (np.concatenate([[_ONE], np.cumprod(base[1:], dtype=np.uint64)]) for base in bases)
        _TABLES["powers"] = one, other
    return _TABLES["powers"]


_SHIFTS, _FACTORS = np.array([30, 27, 31], np.uint64), np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def _mixed(sums: np.ndarray) -> np.ndarray:
    """Every bit of a sum into every bit of its hash, one to one (the finaliser of SplitMix64)."""
    z = (sums ^ (sums >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


def _once(found: np.ndarray) -> np.ndarray:
    """Sorted, each once; faster than numpy's own for the few hashes of one text."""
    found = np.sort(found)
    first = np.ones(len(found), dtype=bool)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return found[first]


# ── many texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Tally:
    """How many documents hold each hash, counted to COMMON + 1; of more than `limit` hashes a sample, the same in any order."""

    def __init__(self, limit: int = LIMIT):
        self.limit, self._halvings = limit, 0
        self._known, self._counts = np.empty(0, np.uint64), np.empty(0, np.uint8)
        self._new: list[np.ndarray] = []
        self._waiting = 0

    def add(self, document: np.ndarray) -> None:
        """[n] uint64, the hashes of one document, each once."""
        kept = document[self._sampled(document)]
        self._new.append(kept)
        self._waiting += len(kept)
        if self._waiting > 1 << 20:
            self._merge()

    def result(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Hashes [n] uint64, sorted; counts [n] uint8; and of how many hashes one was kept."""
        self._merge()
        return self._known, self._counts, 1 << self._halvings

    def _sampled(self, found: np.ndarray) -> np.ndarray:
        return (found & np.uint64((1 << self._halvings) - 1)) == 0

    def _merge(self) -> None:
        if not self._waiting:
            return
        new, counts = np.unique(np.concatenate(self._new), return_counts=True)
        self._new, self._waiting = [], 0
        at = np.searchsorted(self._known, new)
        old = np.zeros(len(new), dtype=bool)
        inside = at < len(self._known)
        old[inside] = self._known[at[inside]] == new[inside]
        self._counts[at[old]] = np.minimum(self._counts[at[old]] + counts[old], COMMON + 1)
        fresh = np.minimum(counts[~old], COMMON + 1).astype(np.uint8)
        self._known = np.insert(self._known, at[~old], new[~old])
        self._counts = np.insert(self._counts, at[~old], fresh)
        while len(self._known) > self.limit:
            self._halvings += 1
            kept = self._sampled(self._known)
            self._known, self._counts = self._known[kept], self._counts[kept]


class Collector:
    """The hashes of many documents, by part (such as prompts and answers), in bounded memory: at most 0.4 GB a part."""

    def __init__(self, *parts: str, limit: int = LIMIT):
        self._runs = {part: Tally(limit) for part in parts}
        self._wholes = {part: Tally(limit) for part in parts}
        self.documents = dict.fromkeys(parts, 0)

    def add(self, part: str, texts: Iterable[str]) -> None:
        """One document: the turns of a conversation, or a text."""
        found = [hashes(text) for text in texts]
        self.documents[part] += 1
        if not found:
            return
        runs = found[0].runs if len(found) == 1 else _once(np.concatenate([one.runs for one in found]))
        self._runs[part].add(runs)
        self._wholes[part].add(_once(np.array([one.whole for one in found if one.whole is not None], np.uint64)))

    def save(self, path: Path) -> dict[str, Any]:
        """Write the file, whole or not at all; returns what a manifest must say of it.  Raises DataError where it can't."""
        tensors: dict[str, np.ndarray] = {}
        parts: dict[str, dict[str, int]] = {}
        for part, documents in self.documents.items():
            parts[part] = {"documents": documents}
            for kind, tally in (("runs", self._runs[part]), ("wholes", self._wholes[part])):
                known, counts, one_in = tally.result()
                # int64: torch, which reads the file too, does little with unsigned ones
                tensors |= {f"{part}.{kind}": known.view(np.int64), f"{part}.{kind}.documents": counts}
                parts[part] |= {kind: len(known), f"{kind}_one_in": one_in}
        beside = path.with_name(path.name + ".part")
        try:
            # one key: the order of several changes from file to file
            save_file(tensors, beside, metadata={"outrider": json.dumps({"format": FORMAT, "rule": RULE}, sort_keys=True)})
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            facts = {"file": path.name, "hash": hash_of(beside), "format": FORMAT, "rule": RULE, "parts": parts}
            os.replace(beside, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise DataError(f"can't write {path}: {error}; make room and run again") from error
        return facts


def hash_of(path: Path) -> str:
    """32 hex digits of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# ── asked ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Named(NamedTuple):
    """A file of hashes, and what its manifest says of it."""

    path: Path
    facts: Mapping[str, Any]


def named(folder: Path, manifest: str = "answers.json") -> Named | None:
    """The hashes that a folder's manifest names; None where it names none, or where its texts have changed since."""
    try:
        facts = json.loads((folder / manifest).read_text(encoding="utf-8"))["grams"]
        made_of = facts.get("of")
        if made_of is not None and (folder / made_of["file"]).stat().st_size != made_of["size_bytes"]:
            return None
        return Named(folder / facts["file"], facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_whole(one: Named) -> bool:
    """Whether the file is there and is the one its manifest names."""
    return one.path.exists() and hash_of(one.path) == one.facts["hash"]


class Grams:
    """Hashes of a source, read to be asked."""

    def __init__(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]):
        """Use `read`."""
        self.parts = tuple(facts["parts"])
        self.sampled: int = max((part["runs_one_in"] for part in facts["parts"].values()), default=1)
        """One run in so many was kept."""
        self._runs, self._wholes = (
            {
                part: (tensors[f"{part}.{kind}"].view(np.uint64), tensors[f"{part}.{kind}.documents"] <= COMMON)
                for part in self.parts
            }
            for kind in ("runs", "wholes")
        )

    def holding(self, text: str) -> tuple[str, ...]:
        """The parts that hold a piece of a text."""
        asked = hashes(text)
        return tuple(part for part in self.parts if self._holds(part, asked))

    def _holds(self, part: str, asked: Hashes) -> bool:
        if asked.whole is None:
            return False
        known, rare = self._runs[part]
        if bool(rare[_places(known, asked.runs)].any()):
            return True
        known, rare = self._wholes[part]
        at = _places(known, np.array([asked.whole], np.uint64))
        # a long text as a whole is nobody's phrase, however often it is there; `go on` is
        return bool(len(at)) and (len(asked.runs) > 0 or bool(rare[at].all()))


def _places(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where those wanted that are known stand."""
    at = np.searchsorted(known, wanted)
    inside = at < len(known)
    at, wanted = at[inside], wanted[inside]
    return at[known[at] == wanted]


def read(one: Named) -> Grams:
    """Open hashes.  Raises DataError for a file that is not the one its manifest names, or that has another rule."""
    path, facts = one
    if facts.get("format") != FORMAT:
        raise DataError(f"{path} has format {facts.get('format')!r}, this Outrider reads {FORMAT}; prepare or build it again")
    try:
        if hash_of(path) != facts["hash"]:
            raise DataError(f"{path} is not the file that its manifest names; copy it again, or prepare or build it again")
        return Grams(load_file(path), facts)
    except FileNotFoundError:
        raise DataError(f"{path} is missing, though its manifest names it; copy it there") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}); prepare or build it again") from None
