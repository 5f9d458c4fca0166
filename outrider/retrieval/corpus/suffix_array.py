"""A corpus searched for the longest suffix of a context: a memory-mapped suffix array over reversed prefixes.

All positions of the text with a token after them are sorted by the tokens before them, read backwards.  One binary
search finds where a context would be in that order; its neighbours share its longest suffix, and their continuations
are proposed.  REST (He et al. 2311.08252) sorts forwards and searches once per length; SAM-Decoding (Hu et al.
2411.10666) follows a suffix automaton, which needs several times the memory and can't be mapped.  Processes that map
the same corpus share its pages.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import heapq
import mmap
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import and_, eq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.errors import DataError
from outrider.retrieval.corpus.files import checked_header
from outrider.retrieval.proposal import Proposal

LONGEST = 64
"""Maximum number of tokens of a context to compare."""
SAMPLE = 32
"""Maximum number of positions whose continuations are read."""
VERSION = 1
"""Version of search.c's functions."""


class Match(NamedTuple):
    """Occurrences of the longest suffix of a context in a corpus."""

    length: int
    """Length of the match in tokens; 0 for no match."""
    occurrences: int
    """How often it occurs with a token after it."""
    ends: tuple[int, ...]
    """Positions of continuations in the corpus: at most SAMPLE, evenly spaced in the sorted order."""


NOTHING = Match(0, 0, ())


class Corpus:
    """A corpus opened for search.  It is stateless: any thread can search it."""

    def __init__(self, folder: Path, header: dict[str, Any]):
        """Use `open`."""
        self.folder, self.header = folder, header
        self.name: str = header["name"]
        self.tokenizer_hash: str | None = header["tokenizer_hash"]
        self.separator: int = header["vocabulary"]
        self.tokens = _mapped(folder / "tokens.bin", header["token_bytes"], "u")
        self.order = _mapped(folder / "suffixes.bin", header["order_bytes"], "i")
        self._view = _View(
            self.tokens.ctypes.data, self.order.ctypes.data, len(self.tokens), len(self.order),
            header["token_bytes"], header["order_bytes"], self.separator,
        )  # fmt: skip

    @classmethod
    def open(cls, folder: str | Path, tokenizer_hash: str | None = None) -> Corpus:
        """Map a corpus without reading it; only checks that sizes and times are those of its build.

        Raises DataError if it is missing, damaged, or built with a tokenizer other than `tokenizer_hash`.
        """
        folder = Path(folder)
        header = checked_header(folder)
        if tokenizer_hash is not None and header["tokenizer_hash"] not in (None, tokenizer_hash):
            raise DataError(
                f"corpus {header['name']!r} must have the target's tokenizer {tokenizer_hash}, got "
                f"{header['tokenizer_hash']}; add it again for this target: "
                f"outrider corpus add {header['name']} FILES --target TARGET"
            )
        return cls(folder, header)

    def longest(self, context: Sequence[int], min_match: int = 1) -> Match:
        """The longest suffix of `context` in the corpus with a token after it; NOTHING below `min_match` tokens.

        A token outside the vocabulary matches nothing, so only the context after the last such token is searched.
        """
        window = array("q", context[-LONGEST:])
        if not window:
            return NOTHING
        library = _library()
        if library is None:
            return self._longest_in_python(window, min_match)
        output = (ctypes.c_int64 * (2 + SAMPLE))()
        address, length = window.buffer_info()
        length = library.outrider_search_longest(self._view, address, length, min_match, SAMPLE, output)
        if not length:
            return NOTHING
        _, count, *ends = output
        return Match(length, count, tuple(ends[:count]))

    def _longest_in_python(self, window: Sequence[int], min_match: int) -> Match:
        in_vocabulary = next(
            (n for n, token in enumerate(reversed(window)) if not 0 <= token < self.separator), len(window)
        )
        backwards = list(reversed(window))[:in_vocabulary]
        at = bisect.bisect_left(self.order, backwards, key=self._before)
        neighbours = [self._before(end) for end in self.order[max(0, at - 1) : at + 1]]
        length = max((sum(accumulate(map(eq, backwards, tokens), and_)) for tokens in neighbours), default=0)
        if length < max(min_match, 1):
            return NOTHING
        # the range of positions preceded by the match
        begin, end = (
            side(self.order, backwards[:length], key=lambda end: self._before(end)[:length])
            for side in (bisect.bisect_left, bisect.bisect_right)
        )
        count = min(end - begin, SAMPLE)
        ends = tuple(int(self.order[begin + i * (end - begin) // count]) for i in range(count))
        return Match(length, end - begin, ends)

    def _before(self, end: Any) -> list[int]:
        """The tokens before a position, the nearest first; none for a position outside."""
        if not 0 <= end <= len(self.tokens):
            return []
        return self.tokens[max(0, int(end) - LONGEST) : int(end)][::-1].tolist()

    def continuations(self, match: Match, nodes: int, depth: int) -> Proposal:
        """The most frequent continuations of a match: a tree of at most `nodes` tokens and `depth` levels.

        A share is count / (positions read + 1), since a single position is wrong more often than several that agree.
        Ties go to the shallower node, then to the child of the earlier parent, then to the smaller token.
        """
        tree = Proposal([], [], [])
        rows = [self.tokens[end : end + depth].tolist() for end in match.ends if end >= 0]
        offered: list[tuple[int, int, int, int, list[list[int]]]] = []

        def offer(rows: list[list[int]], level: int, parent: int) -> None:
            by_token: dict[int, list[list[int]]] = {}
            for row in rows:
                if level < len(row) and row[level] < self.separator:
                    by_token.setdefault(row[level], []).append(row)
            for token, members in by_token.items():
                heapq.heappush(offered, (-len(members), level, parent, token, members))

        offer(rows, 0, -1)
        while offered and len(tree.tokens) < nodes:
            count, level, parent, token, members = heapq.heappop(offered)
            offer(members, level + 1, len(tree.tokens))
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.shares.append(-count / (len(rows) + 1))
        return tree


class _View(ctypes.Structure):
    """The struct Corpus of search.c."""

    _fields_ = [
        ("tokens", ctypes.c_void_p), ("order", ctypes.c_void_p), ("size", ctypes.c_int64), ("positions",
        ctypes.c_int64),
        ("token_bytes", ctypes.c_int64), ("order_bytes", ctypes.c_int64), ("separator", ctypes.c_int64),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL | None:
    """search.c, compiled; None if Python searches instead."""
    from outrider.retrieval import native  # imports torch, which listing and verifying do not need

    library = native.library("search.c", VERSION)
    if library is None:
        return None
    search = library.outrider_search_longest
    search.restype = ctypes.c_int64
    search.argtypes = [
        ctypes.POINTER(_View), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int64),
    ]  # fmt: skip
    return library


def _mapped(path: Path, size_bytes: int, kind: str) -> np.ndarray:
    mapped = np.memmap(path, dtype=f"<{kind}{size_bytes}", mode="r")
    # a search jumps around, so read-ahead is useless
    mapped._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return mapped.view(np.ndarray)
