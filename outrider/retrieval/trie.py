"""Every n-gram of the texts so far, by its tokens: how often and when it was seen, and what followed it.

The place of a text is its longest end that was seen, its longest match; all shorter matches are ends of that.  A token costs as
many steps as windows are long, whatever is stored.  A text's own end has no continuation yet, so it never finds itself.

After the n-gram trie of SGLang (pull request 21243).  What differs: all match lengths stand in one queue ordered by
probability, and a match that was missed is found as soon as the trie has grown.

This is the reference in Python; `native_trie` does the same in C++, with suffix links, and agrees with it node for node.
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
"""Continuations of one n-gram that a proposal looks at, the most recent; in trees of 16 nodes more of them keep no more."""


class Node:
    """An n-gram that was seen."""

    __slots__ = ("children", "count", "gram", "seen")

    def __init__(self, gram: tuple[int, ...]):
        self.gram = gram
        self.children: dict[int, Node] = {}
        """By token, the most recent last."""
        self.count = self.seen = 0
        """How often it was seen, and the trie's clock when it was last seen."""

    def latest(self) -> list[Node]:
        """Its continuations, the most recent first."""
        return list(itertools.islice(reversed(self.children.values()), BREADTH))


class Trie:
    """Windows of at most `depth` tokens, in at most `capacity` nodes: beyond it the leaves that were seen least recently go."""

    def __init__(self, depth: int, capacity: int):
        assert depth >= 2 and capacity >= 2 * depth, f"a trie of depth {depth} needs more than {capacity} nodes"
        self.depth, self.capacity = depth, capacity
        self.lock = threading.Lock()
        """Held by a cursor while it reads or learns: texts of several threads may grow in one trie."""
        self.clear()

    def __len__(self) -> int:
        """Nodes in use."""
        return len(self.nodes) - 1

    def clear(self) -> None:
        """Forget all texts.  Cursors stay valid, and match nothing until something is read again."""
        self.nodes: OrderedDict[tuple[int, ...], Node] = OrderedDict({(): Node(())})
        """By n-gram, the most recent last; the empty one, the root, never leaves."""
        self.clock = 0

    @property
    def size_bytes(self) -> int:
        """Memory in use, about: a node with its table of children."""
        return len(self) * (sys.getsizeof(self.nodes[()]) + sys.getsizeof({0: None}))

    def cursor(self) -> Cursor:
        """A place at the beginning of a new text."""
        return Cursor(self)

    def _see(self, gram: tuple[int, ...]) -> None:
        """Count this n-gram, made if need be, and the most recent from now on."""
        node = self.nodes.setdefault(gram, Node(gram))
        self.nodes.move_to_end(gram)
        siblings = self.nodes[gram[:-1]].children
        siblings.pop(gram[-1], None)
        siblings[gram[-1]] = node
        self.clock += 1
        node.count, node.seen = node.count + 1, self.clock

    def _make_room(self) -> None:
        """Let leaves go until the windows that one token ends have room.

        An n-gram is seen after every longer one that it ends, so its own leaf is never older than theirs: every end of
        a node is there.  What is older than the oldest leaf is above it, or above the end of a text that waits.
        """
        while len(self) + self.depth > self.capacity:
            oldest = next(gram for gram, node in self.nodes.items() if not node.children)
            del self.nodes[oldest], self.nodes[oldest[:-1]].children[oldest[-1]]


class Cursor:
    """Where one text stands in a trie."""

    def __init__(self, trie: Trie):
        self.trie = trie
        self.recent: deque[int] = deque(maxlen=trie.depth)

    @property
    def match(self) -> int:
        """Tokens of the text's end that the trie holds, at most `depth`."""
        with self.trie.lock:
            return len(self._longest())

    @property
    def followed(self) -> int:
        """Tokens of the longest match that something follows; 0 where there is none."""
        with self.trie.lock:
            node = self._followed(self._longest(), 1)
        return 0 if node is None else len(node.gram)

    def append(self, tokens: Sequence[int]) -> None:
        """Read these tokens and learn every window that ends in them."""
        with self.trie.lock:
            for token in tokens:
                self.trie._make_room()
                window = (*self._longest(), token)[-self.trie.depth :]
                for begin in range(len(window)):
                    self.trie._see(window[begin:])
                self.recent.append(token)

    def follow(self, tokens: Sequence[int]) -> None:
        """Read these tokens and learn nothing."""
        self.recent.extend(tokens)

    def chain(self, most: int, shortest: int = 1) -> list[int]:
        """What followed the longest match most recently, and so on.  No match below `shortest` tokens is believed."""
        tokens: list[int] = []
        with self.trie.lock:
            node = self._followed(self._longest(), shortest)
            while node is not None and len(tokens) < most:
                tokens.append(next(reversed(node.children)))
                node = self._followed((*node.gram, tokens[-1]), shortest)
        return tokens

    def tree(self, order: Literal["recency", "frequency"], budget: int, levels: int, shortest: int = 1) -> Proposal:
        """A tree of at most `budget` nodes and `levels` levels from all matches of at least `shortest` tokens.

        frequency: the likeliest paths.  A token's share is its count over one more than the match's; what is left goes to the
        next shorter match, and so on down (the escape of PPM, method A, Cleary and Witten 1984).
        recency: what followed most recently, the longest match first and each match level by level.  The longest offers one
        token a node, the shortest `BREADTH`, and every level one fewer than the one above.
        """
        places: dict[tuple[int, int], int] = {}
        grow = self._by_frequency if order == "frequency" else self._by_recency
        with self.trie.lock:
            shares = grow(places, budget, levels, shortest)
        return Proposal([token for _, token in places], [parent for parent, _ in places], shares)

    def _by_frequency(self, places: dict[tuple[int, int], int], budget: int, levels: int, shortest: int) -> list[float]:
        """Fill `places`, parent and token to a node's number; returns the nodes' shares."""
        waiting: list[tuple[float, float, int, Node, int, int]] = []
        numbers, shares = itertools.count(), list[float]()

        def wait(node: Node | None, weight: float, seen: float, at: int, level: int) -> None:
            """The likeliest is taken first, of equals the most recent, then the one that waits longest."""
            if node is not None:
                heapq.heappush(waiting, (-weight, -seen, next(numbers), node, at, level))

        # a match waits before all of its weight: what it offers is no likelier, and pushed only where its turn comes
        wait(self._followed(self._longest(), shortest), 1.0, math.inf, -1, 0)
        while waiting and len(places) < budget:
            weight, seen, _, node, at, level = heapq.heappop(waiting)
            if seen == -math.inf:
                total = left = node.count + 1
                for child in node.latest():
                    left -= child.count
                    wait(child, -weight * (child.count / total), child.seen, at, level)
                wait(self._followed(node.gram[1:], shortest), -weight * (left / total), math.inf, at, level)
            elif (at, node.gram[-1]) not in places:
                shares.append(-weight)
                n = places[at, node.gram[-1]] = len(places)
                if level + 1 < levels:
                    wait(self._followed(node.gram, shortest), -weight, math.inf, n, level + 1)
        return shares

    def _by_recency(self, places: dict[tuple[int, int], int], budget: int, levels: int, shortest: int) -> list[float]:
        """As `_by_frequency`; without shares."""
        longest, match = self.trie.depth - 1, self._followed(self._longest(), shortest)
        while match is not None:
            breadth = 1 + (BREADTH - 1) * (longest - len(match.gram)) // max(longest - 1, 1)
            level = [(match, -1)]
            for number in range(levels):
                below: list[tuple[Node, int]] = []
                for node, at in level:
                    for child in node.latest()[: max(breadth - number, 1)]:
                        if len(places) >= budget:
                            return []
                        n = places.setdefault((at, child.gram[-1]), len(places))
                        if following := self._followed(child.gram, shortest):
                            below.append((following, n))
                level = below
            match = self._followed(match.gram[1:], shortest)
        return []

    def _followed(self, gram: tuple[int, ...], shortest: int) -> Node | None:
        """The longest end of this n-gram, itself included, that something follows."""
        ends = (self.trie.nodes[gram[begin:]] for begin in range(len(gram) - shortest + 1))
        return next((node for node in ends if node.children), None)

    def _longest(self) -> tuple[int, ...]:
        """The longest match."""
        recent = tuple(self.recent)
        return next(recent[begin:] for begin in range(len(recent) + 1) if recent[begin:] in self.trie.nodes)
