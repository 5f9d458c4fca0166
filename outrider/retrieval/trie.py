"""A trie of all n-grams of the texts so far: how often and when each occurred, and what followed it.

A text's position is its longest match, the longest suffix that is in the trie; all shorter matches are suffixes of it.
A token costs as many steps as the trie is deep, however much is stored.  The end of a text has no continuation yet, so
it never matches itself.

Modelled on the n-gram trie of SGLang (pull request 21243).  Differences: all match lengths are in one queue ordered by
probability, and a match that was missing is found as soon as the trie has grown.

This is the Python reference; `native_trie` is the same in C++ with suffix links, equal node for node.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal

from outrider.retrieval.proposal import Proposal

BREADTH = 8
"""Maximum number of continuations of an n-gram in a proposal, the most recent ones; more do not help in trees of 16
nodes."""


class Node:
    """One n-gram."""

    __slots__ = ("children", "count", "gram", "updated")

    def __init__(self, gram: tuple[int, ...]):
        self.gram = gram
        self.children: dict[int, Node] = {}
        """By token, the most recent last."""
        self.count = self.updated = 0
        """Number of occurrences, and the trie's clock at the last one."""

    def latest(self) -> list[Node]:
        """The continuations, the most recent first."""
        return list(itertools.islice(reversed(self.children.values()), BREADTH))


class Trie:
    """N-grams of at most `depth` tokens in at most `capacity` nodes; beyond that the least recently updated leaves are
    removed."""

    def __init__(self, depth: int, capacity: int):
        assert depth >= 2 and capacity >= 2 * depth, f"a trie of depth {depth} needs more than {capacity} nodes"
        self.depth, self.capacity = depth, capacity
        self.lock = threading.Lock()
        """Held by cursors while they read or learn, since texts in several threads may share a trie."""
        self.clear()

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self.nodes) - 1

    def clear(self) -> None:
        """Forget all texts.  Cursors stay valid but match nothing until more is read."""
        self.nodes: OrderedDict[tuple[int, ...], Node] = OrderedDict({(): Node(())})
        """By n-gram, the most recent last; the empty n-gram, the root, is never removed."""
        self.clock = 0

    @property
    def size_bytes(self) -> int:
        """Memory in use, estimated from the size of a node and its table of children."""
        return len(self) * (sys.getsizeof(self.nodes[()]) + sys.getsizeof({0: None}))

    def cursor(self) -> Cursor:
        """A cursor at the beginning of a new text."""
        return Cursor(self)

    def _count_up(self, gram: tuple[int, ...]) -> None:
        """Count this n-gram: add it if needed and make it the most recent."""
        node = self.nodes.setdefault(gram, Node(gram))
        self.nodes.move_to_end(gram)
        siblings = self.nodes[gram[:-1]].children
        siblings.pop(gram[-1], None)
        siblings[gram[-1]] = node
        self.clock += 1
        node.count, node.updated = node.count + 1, self.clock

    def _make_room(self) -> None:
        """Remove leaves until there is room for the n-grams that end in one more token.

        An n-gram is updated after every longer one of which it is a suffix, so it is never older than these: every
        suffix of a node stays in the trie.  Only ancestors of a leaf, or of the end of an open text, are older than the
        oldest leaf.
        """
        while len(self) + self.depth > self.capacity:
            oldest = next(gram for gram, node in self.nodes.items() if not node.children)
            del self.nodes[oldest], self.nodes[oldest[:-1]].children[oldest[-1]]


class Cursor:
    """One text's position in a trie."""

    def __init__(self, trie: Trie):
        self.trie = trie
        self.recent: deque[int] = deque(maxlen=trie.depth)

    @property
    def match(self) -> int:
        """Length of the longest match, at most `depth`."""
        with self.trie.lock:
            return len(self._longest())

    @property
    def followed(self) -> int:
        """Length of the longest match with a continuation; 0 for no match."""
        with self.trie.lock:
            node = self._followed(self._longest(), 1)
        return 0 if node is None else len(node.gram)

    def append(self, tokens: Sequence[int]) -> None:
        """Read these tokens, and learn every n-gram that ends in them."""
        with self.trie.lock:
            for token in tokens:
                self.trie._make_room()
                window = (*self._longest(), token)[-self.trie.depth :]
                for begin in range(len(window)):
                    self.trie._count_up(window[begin:])
                self.recent.append(token)

    def follow(self, tokens: Sequence[int]) -> None:
        """Read these tokens without learning."""
        self.recent.extend(tokens)

    def chain(self, most: int, shortest: int = 1) -> list[int]:
        """What followed the longest match most recently, token by token.  Matches below `shortest` tokens are
        ignored."""
        tokens: list[int] = []
        with self.trie.lock:
            node = self._followed(self._longest(), shortest)
            while node is not None and len(tokens) < most:
                tokens.append(next(reversed(node.children)))
                node = self._followed((*node.gram, tokens[-1]), shortest)
        return tokens

    def tree(self, order: Literal["recency", "frequency"], budget: int, levels: int, shortest: int = 1) -> Proposal:
        """A tree of at most `budget` nodes and `levels` levels from all matches of at least `shortest` tokens.

        frequency: the most likely paths.  A token's share is its count / (the match's count + 1); the rest goes to the
        next shorter match, and so on (the escape of PPM, method A, Cleary and Witten 1984).
        recency: the most recent continuations, the longest match first, and each match level by level.  The longest
        match offers one token per node, the shortest `BREADTH`, and every level one fewer than the level above.
        """
        nodes: dict[tuple[int, int], int] = {}
        grow = self._by_frequency if order == "frequency" else self._by_recency
        with self.trie.lock:
            shares = grow(nodes, budget, levels, shortest)
        return Proposal([token for _, token in nodes], [parent for parent, _ in nodes], shares)

    def _by_frequency(self, nodes: dict[tuple[int, int], int], budget: int, levels: int, shortest: int) -> list[float]:
        """Fill `nodes`, which maps (parent, token) to a node's number; returns the nodes' shares."""
        candidates: list[tuple[float, float, int, Node, int, int]] = []
        numbers, shares = itertools.count(), list[float]()

        def push(node: Node | None, weight: float, updated: float, at: int, level: int) -> None:
            """The most likely is popped first; ties go to the most recent, then to the first pushed."""
            if node is not None:
                heapq.heappush(candidates, (-weight, -updated, next(numbers), node, at, level))

        # a match is popped before all nodes of equal weight and then pushes its continuations, which are no more likely
        push(self._followed(self._longest(), shortest), 1.0, math.inf, -1, 0)
        while candidates and len(nodes) < budget:
            weight, updated, _, node, at, level = heapq.heappop(candidates)
            if updated == -math.inf:
                total = left = node.count + 1
                for child in node.latest():
                    left -= child.count
                    push(child, -weight * (child.count / total), child.updated, at, level)
                push(self._followed(node.gram[1:], shortest), -weight * (left / total), math.inf, at, level)
            elif (at, node.gram[-1]) not in nodes:
                shares.append(-weight)
                n = nodes[at, node.gram[-1]] = len(nodes)
                if level + 1 < levels:
                    push(self._followed(node.gram, shortest), -weight, math.inf, n, level + 1)
        return shares

    def _by_recency(self, nodes: dict[tuple[int, int], int], budget: int, levels: int, shortest: int) -> list[float]:
        """Like `_by_frequency`, but without shares."""
        longest, match = self.trie.depth - 1, self._followed(self._longest(), shortest)
        while match is not None:
            breadth = 1 + (BREADTH - 1) * (longest - len(match.gram)) // max(longest - 1, 1)
            level = [(match, -1)]
            for number in range(levels):
                below: list[tuple[Node, int]] = []
                for node, at in level:
                    for child in node.latest()[: max(breadth - number, 1)]:
                        if len(nodes) >= budget:
                            return []
                        n = nodes.setdefault((at, child.gram[-1]), len(nodes))
                        if following := self._followed(child.gram, shortest):
                            below.append((following, n))
                level = below
            match = self._followed(match.gram[1:], shortest)
        return []

    def _followed(self, gram: tuple[int, ...], shortest: int) -> Node | None:
        """The longest suffix of this n-gram, itself included, that has a continuation."""
        ends = (self.trie.nodes[gram[begin:]] for begin in range(len(gram) - shortest + 1))
        return next((node for node in ends if node.children), None)

    def _longest(self) -> tuple[int, ...]:
        """The longest match."""
        recent = tuple(self.recent)
        return next(recent[begin:] for begin in range(len(recent) + 1) if recent[begin:] in self.trie.nodes)
