"""Every n-gram of the texts so far in one trie, grown token by token; its end is looked up without a walk from the root.

Each node is an n-gram with its count, when it was last seen, and a link to its longest suffix.  So the place of a text is one
node, its longest match, and all shorter matches hang on that node's links: a token costs as many steps as windows are long,
whatever is stored.  A text's own end has no continuation yet, so it never finds itself.

After the n-gram trie of SGLang (pull request 21243).  What differs: suffix links in place of one anchor a match length, all
lengths in one queue ordered by probability, and a match that was missed is looked for again as soon as the trie has grown.

This is the reference in Python; `native_trie` does the same in C++ and agrees with it node for node.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar

from outrider.retrieval.proposal import Proposal

R = TypeVar("R")
BREADTH = 8
"""Continuations of one n-gram that a proposal looks at, the most recent; in trees of 16 nodes more of them keep no more."""


class Node:
    """An n-gram that was seen."""

    __slots__ = ("children", "count", "is_gone", "is_listed", "length", "parent", "seen", "suffix", "token")

    def __init__(self, token: int, parent: Node | None):
        self.token, self.parent = token, parent
        self.length: int = 0 if parent is None else parent.length + 1
        self.suffix: Node = self
        self.children: dict[int, Node] = {}
        """By token, the most recent last."""
        self.count = 0
        self.seen = 0
        """The trie's clock when it was last seen."""
        self.is_gone = self.is_listed = False

    def latest(self) -> list[Node]:
        """Its continuations, the most recent first."""
        return list(islice(reversed(self.children.values()), BREADTH))


class Trie:
    """Windows of at most `depth` tokens, in at most `capacity` nodes: beyond it the leaves that were seen least recently go."""

    def __init__(self, depth: int, capacity: int):
        assert depth >= 2 and capacity >= 2 * depth, f"a trie of depth {depth} needs more than {capacity} nodes"
        self.depth, self.capacity = depth, capacity
        self.epoch = -1
        self.lock = threading.RLock()
        """Held by a cursor while it reads or learns: texts of several threads may grow in one trie."""
        self.clear()

    def __len__(self) -> int:
        """Nodes in use."""
        return self._nodes

    def clear(self) -> None:
        """Forget all texts.  Cursors stay valid, and match nothing until something is read again."""
        self.root = Node(-1, None)
        self.epoch += 1
        self.clock = self.grown = self._nodes = 0
        self._leaves: list[tuple[int, Node]] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory in use, about: a node with its table of children."""
        return len(self) * (sys.getsizeof(self.root) + sys.getsizeof({0: None}))

    def cursor(self) -> Cursor:
        """A place at the beginning of a new text."""
        return Cursor(self)

    def _see(self, node: Node, token: int) -> Node:
        """The child of `node` by this token, made if need be, counted, and the most recent from now on."""
        known = node.children.pop(token, None)
        child = known or Node(token, node)
        node.children[token] = child
        self.clock += 1
        child.count += 1
        child.seen = self.clock
        if known is None:
            self._nodes += 1
            self.grown += 1
            self._list(child)
        return child

    def _list(self, leaf: Node) -> None:
        if self._leaves is not None and not leaf.is_listed:
            leaf.is_listed = True
            heapq.heappush(self._leaves, (leaf.seen, leaf))

    def _make_room(self) -> None:
        """Let leaves go until the windows that one token ends have room.

        An n-gram is seen after every longer one that it ends, so its own leaf is never older than theirs: suffix links hold.
        """
        while self._nodes + self.depth > self.capacity:
            if self._leaves is None:
                self._leaves = []
                for leaf in self._all_leaves():
                    self._list(leaf)
            self._drop(self._oldest())

    def _oldest(self) -> Node:
        """The leaf seen least recently, off the list.  What was seen again since it was listed is listed anew."""
        assert self._leaves is not None
        while True:
            listed, leaf = heapq.heappop(self._leaves)
            leaf.is_listed = False
            if leaf.children:
                continue
            if leaf.seen == listed:
                return leaf
            self._list(leaf)

    def _drop(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.token]
        leaf.is_gone = True
        self._nodes -= 1
        if not parent.children and parent is not self.root:
            self._list(parent)

    def _all_leaves(self) -> Iterator[Node]:
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if not node.children:
                yield node

    def _step(self, node: Node, token: int) -> Node:
        """The longest match after one token more, for a text whose longest match is `node`."""
        while token not in node.children:
            if node is self.root:
                return node
            node = node.suffix
        return node.children[token]


def _locked(method: Callable[..., R]) -> Callable[..., R]:
    """A cursor's method, no other thread in its trie meanwhile."""

    @functools.wraps(method)
    def alone(self: Cursor, *args: Any, **kwargs: Any) -> R:
        with self.trie.lock:
            return method(self, *args, **kwargs)

    return alone


class Cursor:
    """Where one text stands in a trie."""

    def __init__(self, trie: Trie):
        self.trie = trie
        self.recent: deque[int] = deque(maxlen=trie.depth)
        self._place(trie.root)

    @property
    @_locked
    def match(self) -> int:
        """Tokens of the text's end that the trie holds, at most `depth`."""
        return self._node().length

    @property
    @_locked
    def followed(self) -> int:
        """Tokens of the longest match that something follows; 0 where there is none."""
        node = self._followed(self._node(), 1)
        return 0 if node is None else node.length

    @_locked
    def append(self, tokens: Sequence[int]) -> None:
        """Read these tokens and learn every window that ends in them."""
        trie = self.trie
        for token in tokens:
            trie._make_room()
            node = self._node()
            if node.length == trie.depth:
                node = node.suffix
            longest = child = trie._see(node, token)
            while node is not trie.root:
                node = node.suffix
                child.suffix = trie._see(node, token)
                child = child.suffix
            child.suffix = trie.root
            self.recent.append(token)
            self._place(longest)

    @_locked
    def follow(self, tokens: Sequence[int]) -> None:
        """Read these tokens and learn nothing."""
        for token in tokens:
            node = self.trie._step(self._node(), token)
            self.recent.append(token)
            self._place(node)

    @_locked
    def chain(self, most: int, shortest: int = 1) -> list[int]:
        """What followed the longest match most recently, and so on.  No match below `shortest` tokens is believed."""
        tokens: list[int] = []
        node = self._followed(self._node(), shortest)
        while node is not None and len(tokens) < most:
            node = next(reversed(node.children.values()))
            tokens.append(node.token)
            node = self._followed(node, shortest)
        return tokens

    @_locked
    def tree(self, order: Literal["recency", "frequency"], budget: int, levels: int, shortest: int = 1) -> Proposal:
        """A tree of at most `budget` nodes and `levels` levels from all matches of at least `shortest` tokens.

        frequency: the likeliest paths.  A token's share is its count over one more than the match's; what is left goes to the
        next shorter match, and so on down (the escape of PPM, method A, Cleary and Witten 1984).
        recency: what followed most recently, the longest match first and each match level by level.  The longest offers one
        token a node, the shortest `BREADTH`, and every level one fewer than the one above.
        """
        grow = self._by_frequency if order == "frequency" else self._by_recency
        return grow(_Tree(budget, levels), shortest)

    def _by_frequency(self, tree: _Tree, shortest: int) -> Proposal:
        waiting: list[tuple[float, float, int, Node, int, int]] = []
        numbers = itertools.count()

        def wait(node: Node | None, weight: float, seen: float, at: int, level: int) -> None:
            """The likeliest is taken first, of equals the most recent, then the one that waits longest."""
            if node is not None:
                heapq.heappush(waiting, (-weight, -seen, next(numbers), node, at, level))

        # a match waits before all of its weight: what it offers is no likelier, and pushed only where its turn comes
        wait(self._followed(self._node(), shortest), 1.0, math.inf, -1, 0)
        while waiting and tree.has_room:
            weight, seen, _, node, at, level = heapq.heappop(waiting)
            if seen == -math.inf:
                total = left = node.count + 1
                for child in node.latest():
                    left -= child.count
                    wait(child, -weight * (child.count / total), child.seen, at, level)
                wait(self._followed(node.suffix, shortest), -weight * (left / total), math.inf, at, level)
            elif (at, node.token) not in tree.places:
                n = tree.place(node.token, at)
                tree.proposal.shares.append(-weight)
                if level + 1 < tree.levels:
                    wait(self._followed(node, shortest), -weight, math.inf, n, level + 1)
        return tree.proposal

    def _by_recency(self, tree: _Tree, shortest: int) -> Proposal:
        longest = self.trie.depth - 1
        for match in self._matches(shortest):
            breadth = 1 + (BREADTH - 1) * (longest - match.length) // max(longest - 1, 1)
            level: list[tuple[Node, int]] = [(match, -1)]
            for number in range(tree.levels):
                below: list[tuple[Node, int]] = []
                for node, at in level:
                    for child in node.latest()[: max(breadth - number, 1)]:
                        if not tree.has_room:
                            return tree.proposal
                        n = tree.place(child.token, at)
                        following = self._followed(child, shortest)
                        if following is not None:
                            below.append((following, n))
                level = below
        return tree.proposal

    def _matches(self, shortest: int) -> Iterator[Node]:
        """The matches that have a continuation, the longest first."""
        node = self._followed(self._node(), shortest)
        while node is not None:
            yield node
            node = self._followed(node.suffix, shortest)

    def _followed(self, node: Node, shortest: int) -> Node | None:
        """The longest suffix of this n-gram, itself included, that something follows."""
        while node.length >= shortest:
            if node.children:
                return node
            node = node.suffix
        return None

    def _place(self, node: Node) -> None:
        self._at, self._grown, self._epoch = node, self.trie.grown, self.trie.epoch

    def _node(self) -> Node:
        """The longest match.  It is looked for again where it is gone, or where the trie grew and may now hold a longer one."""
        trie = self.trie
        is_lost = self._at.is_gone or self._epoch != trie.epoch
        if is_lost or (self._grown != trie.grown and self._at.length < len(self.recent)):
            node = trie.root
            for token in self.recent:
                node = trie._step(node, token)
            self._place(node)
        return self._at


class _Tree:
    """A proposal that is being made; the same token under the same parent is one node."""

    def __init__(self, budget: int, levels: int):
        self.budget, self.levels = budget, levels
        self.proposal = Proposal([], [], [])
        self.places: dict[tuple[int, int], int] = {}

    @property
    def has_room(self) -> bool:
        return len(self.proposal.tokens) < self.budget

    def place(self, token: int, at: int) -> int:
        """The number of this token under node `at`."""
        n = self.places.setdefault((at, token), len(self.places))
        if n == len(self.proposal.tokens):
            self.proposal.tokens.append(token)
            self.proposal.parents.append(at)
        return n
