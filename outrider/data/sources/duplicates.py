"""Duplicate conversations: equal texts by a hash, nearly equal ones by MinHash.

Broder, On the resemblance of documents (1997).  Texts are sets of 5-character shingles, which work for Korean as well
as for English.  datasketch computes the signatures; its index would take 1 KB and several Python objects per text, so
here the signatures are in a file and one band is sorted at a time.  Imports no torch.
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
"""Characters per shingle."""
SIZE = 64
"""Numbers per signature: resemblance is estimated to 0.05."""
BANDS = 16
NEAR = 0.8
"""Texts are nearly equal if they share this fraction of their shingles."""
NEIGHBOURS = 64
"""Maximum number of rows of its bucket that a row is compared with."""
CHUNK = 1 << 16
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def content_key(value: Any) -> int:
    """64-bit hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def content_hash(value: Any) -> str:
    """Hash, 16 hex digits, of a JSON value, for files."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def repeated(keys: np.ndarray) -> np.ndarray:
    """[n] bool: whether an earlier key is equal."""
    is_repeated = np.ones(len(keys), dtype=bool)
    is_repeated[np.unique(keys, return_index=True)[1]] = False
    return is_repeated


@functools.lru_cache(4)
def signature(text: str) -> Any:
    """A text's MinHash of SIZE numbers."""
    minhash = _empty().copy()  # constructing one takes as long as filling it
    minhash.update_batch(_shingles(normalised(text)).tolist())
    return minhash


@functools.cache
def _empty() -> Any:
    from datasketch import MinHash  # loads scipy, and only needed here

    return MinHash(num_perm=SIZE, seed=1, hashfunc=int)


def _shingles(text: str) -> np.ndarray:
    """[n] uint64 below 2**32: the hashes of all shingles, without repetitions."""
    letters = np.frombuffer(text.ljust(SHINGLE).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    count = len(letters) - SHINGLE + 1
    sums = np.zeros(count, np.uint64)
    for i in range(SHINGLE):
        sums = (sums + letters[i : i + count] + np.uint64(1)) * _FACTOR
        sums ^= sums >> np.uint64(29)
    return np.unique(sums >> np.uint64(32))


class Signatures:
    """Signatures of many texts in a temporary file: 256 bytes of disk per text."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, closed with this object
        self.count = 0

    def add(self, text: str) -> None:
        self._file.write(signature(text).hashvalues.astype(np.uint32).tobytes())
        self.count += 1

    def duplicates(self) -> np.ndarray:
        """[n] bool: whether a text is nearly equal to an earlier one, directly or through a chain of others."""
        if not self.count:
            return np.zeros(0, dtype=bool)
        self._file.flush()
        return near_duplicates(np.memmap(self._file, np.uint32, "r", shape=(self.count, SIZE)))

    def close(self) -> None:
        self._file.close()


def near_duplicates(signatures: np.ndarray) -> np.ndarray:
    """[n] bool: whether a row of [n, SIZE] uint32 resembles an earlier one, directly or through a chain of others.

    Rows are compared if they agree in one of BANDS parts, which misses 2 in 10,000 of the pairs that are 0.8 alike.
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
    """Pairs of rows of one bucket that resemble each other; each row is compared with the next ones of its bucket."""
    order = np.argsort(buckets, kind="stable")
    ordered = buckets[order]
    for step in range(1, NEIGHBOURS + 1):
        is_pair = ordered[step:] == ordered[:-step]
        if not is_pair.any():
            return
        first, second = order[:-step][is_pair], order[step:][is_pair]
        for i in range(0, len(first), CHUNK):
            one, other = first[i : i + CHUNK], second[i : i + CHUNK]
            are_alike = (signatures[one] == signatures[other]).mean(1) >= NEAR
            yield one[are_alike], other[are_alike]
