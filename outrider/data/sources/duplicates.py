"""Conversations that ask what an earlier one asks: equal texts by a hash, nearly equal ones by MinHash.

Broder, On the resemblance of documents (1997).  Texts are sets of runs of 5 characters, which serve Korean as they
serve English.  datasketch makes the signatures; its index would hold 1 KB and several Python objects for each text, so
the signatures lie in a file here, and a band of them at a time is sorted.  Knows no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from outrider.data.overlap.ngram_hashes import normalised

SHINGLE = 5
"""Characters of a run."""
SIZE = 64
"""Numbers of a signature: resemblance is known to 0.05."""
BANDS = 16
NEAR = 0.8
"""Texts are nearly equal where they share so much of their runs."""
NEIGHBOURS = 64
"""Rows of its bucket that a row is compared with: all of them, where the bucket is no larger."""
CHUNK = 1 << 16
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def content_key(value: Any) -> int:
    """A hash of 64 bits that tells two values of JSON from each other."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def content_hash(value: Any) -> str:
    """16 hex digits that tell two values of JSON apart, for files."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def repeated(keys: np.ndarray) -> np.ndarray:
    """[n] bool: whether a key was there before."""
    found = np.ones(len(keys), dtype=bool)
    found[np.unique(keys, return_index=True)[1]] = False
    return found


@functools.lru_cache(4)
def signature(text: str) -> Any:
    """A text's MinHash, of SIZE numbers."""
    made = _empty().copy()  # to make one anew takes as long as to fill it
    made.update_batch(_shingles(normalised(text)).tolist())
    return made


@functools.cache
def _empty() -> Any:
    from datasketch import MinHash  # loads scipy, and only needed here

    return MinHash(num_perm=SIZE, seed=1, hashfunc=int)


def _shingles(text: str) -> np.ndarray:
    """[n] uint64 below 2**32, a hash of each run of characters, each once."""
    letters = np.frombuffer(text.ljust(SHINGLE).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    count = len(letters) - SHINGLE + 1
    sums = np.zeros(count, np.uint64)
    for i in range(SHINGLE):
        sums = (sums + letters[i : i + count] + np.uint64(1)) * _FACTOR
        sums ^= sums >> np.uint64(29)
    return np.unique(sums >> np.uint64(32))


class Signatures:
    """Signatures of many texts, in a file that goes when it is closed: 256 bytes of disk a text."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, closed with this object
        self.count = 0

    def add(self, text: str) -> None:
        self._file.write(signature(text).hashvalues.astype(np.uint32).tobytes())
        self.count += 1

    def duplicates(self) -> np.ndarray:
        """[n] bool: whether a text is nearly equal to an earlier one, directly or through others between them."""
        if not self.count:
            return np.zeros(0, dtype=bool)
        self._file.flush()
        return near_duplicates(np.memmap(self._file, np.uint32, "r", shape=(self.count, SIZE)))

    def close(self) -> None:
        self._file.close()


def near_duplicates(signatures: np.ndarray) -> np.ndarray:
    """[n] bool: whether a row of [n, SIZE] uint32 resembles an earlier one, directly or through others.

    Rows are compared that agree in one of BANDS parts: of two that are 0.8 alike all but 2 in 10,000.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(signatures)
    firsts, seconds = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for band in np.split(np.arange(SIZE), BANDS):
        buckets = _buckets(signatures[:, band[0] : band[-1] + 1])
        for first, second in _alike(signatures, buckets):
            firsts.append(first)
            seconds.append(second)
    first, second = np.concatenate(firsts), np.concatenate(seconds)
    edges = coo_array((np.ones(len(first), np.int8), (first, second)), shape=(count, count))
    return repeated(connected_components(edges, directed=False)[1])


def _buckets(part: np.ndarray) -> np.ndarray:
    """[n] uint64: equal for rows that agree."""
    sums = np.zeros(len(part), np.uint64)
    for column in range(part.shape[1]):
        sums = (sums + part[:, column].astype(np.uint64) + np.uint64(1)) * _FACTOR
        sums ^= sums >> np.uint64(31)
    return sums


def _alike(signatures: np.ndarray, buckets: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of rows of one bucket that resemble each other: each row with the next ones of its bucket."""
    order = np.argsort(buckets, kind="stable")
    own = buckets[order]
    for step in range(1, NEIGHBOURS + 1):
        is_pair = own[step:] == own[:-step]
        if not is_pair.any():
            return
        first, second = order[:-step][is_pair], order[step:][is_pair]
        for i in range(0, len(first), CHUNK):
            one, other = first[i : i + CHUNK], second[i : i + CHUNK]
            are_alike = (signatures[one] == signatures[other]).mean(1) >= NEAR
            yield one[are_alike], other[are_alike]
