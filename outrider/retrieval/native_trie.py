"""The trie in C++: the same nodes as in `trie`, many times faster."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from typing import Literal

from outrider.retrieval import native
from outrider.retrieval.proposal import Proposal
from outrider.retrieval.trie import Trie

VERSION = 3
"""Version of trie.cpp's functions."""


def fastest(depth: int, capacity: int) -> Trie | NativeTrie:
    """The native trie if available, otherwise the Python one.  Both give the same results."""
    functions = _functions()
    return Trie(depth, capacity) if functions is None else NativeTrie(depth, capacity, functions)


@functools.cache
def _functions() -> ctypes.PyDLL | None:
    library = native.library("trie.cpp", VERSION)
    if library is None:
        return None
    # PyDLL holds the GIL during a call, so no other thread can use the trie
    functions = ctypes.PyDLL(library._name, handle=library._handle)
    address, count, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    for name, result, arguments in (
        ("trie_new", address, [number, count]),
        ("trie_free", None, [address]),
        ("trie_clear", None, [address]),
        ("trie_size", count, [address]),
        ("trie_bytes", count, [address]),
        ("cursor_new", address, [address]),
        ("cursor_free", None, [address]),
        ("cursor_append", None, [address, address, count]),
        ("cursor_follow", None, [address, address, count]),
        ("cursor_match", number, [address]),
        ("cursor_followed", number, [address]),
        ("cursor_chain", number, [address, number, number, address]),
        ("cursor_tree", number, [address, number, number, number, number, address, address, address]),
    ):
        function = getattr(functions, f"outrider_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


class NativeTrie:
    """`Trie` in C++."""

    def __init__(self, depth: int, capacity: int, functions: ctypes.PyDLL):
        assert depth >= 2 and capacity >= 2 * depth, f"a trie of depth {depth} needs more than {capacity} nodes"
        self.depth, self.capacity, self.functions = depth, capacity, functions
        self.handle = functions.outrider_trie_new(depth, capacity)
        weakref.finalize(self, functions.outrider_trie_free, self.handle)

    def __len__(self) -> int:
        return self.functions.outrider_trie_size(self.handle)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory in use."""
        return self.functions.outrider_trie_bytes(self.handle)

    def clear(self) -> None:
        self.functions.outrider_trie_clear(self.handle)

    def cursor(self) -> NativeCursor:
        return NativeCursor(self)


class NativeCursor:
    """`Cursor` in C++."""

    def __init__(self, trie: NativeTrie):
        self.trie, self.functions = trie, trie.functions  # keeps the trie alive
        self.handle = trie.functions.outrider_cursor_new(trie.handle)
        weakref.finalize(self, trie.functions.outrider_cursor_free, self.handle)

    @property
    def match(self) -> int:
        return self.functions.outrider_cursor_match(self.handle)

    @property
    def followed(self) -> int:
        return self.functions.outrider_cursor_followed(self.handle)

    def append(self, tokens: Sequence[int]) -> None:
        self.functions.outrider_cursor_append(self.handle, array("i", tokens).tobytes(), len(tokens))

    def follow(self, tokens: Sequence[int]) -> None:
        self.functions.outrider_cursor_follow(self.handle, array("i", tokens).tobytes(), len(tokens))

    def chain(self, most: int, shortest: int = 1) -> list[int]:
        tokens = (ctypes.c_int32 * most)()
        return tokens[: self.functions.outrider_cursor_chain(self.handle, most, shortest, tokens)]

    def tree(self, order: Literal["recency", "frequency"], budget: int, levels: int, shortest: int = 1) -> Proposal:
        tokens, parents = (ctypes.c_int32 * budget)(), (ctypes.c_int32 * budget)()
        shares, counts = (ctypes.c_double * budget)(), order == "frequency"
        size = self.functions.outrider_cursor_tree(
            self.handle, counts, budget, levels, shortest, tokens, parents, shares
        )
        return Proposal(tokens[:size], parents[:size], shares[:size] if counts else [])
