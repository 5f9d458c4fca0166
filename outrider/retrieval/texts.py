"""What may follow a text, looked up in its own n-grams, in tries that other texts may share, and in corpora."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from outrider.retrieval import native_trie
from outrider.retrieval.corpus import corpora
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.retrieval.native_trie import NativeCursor, NativeTrie
from outrider.retrieval.proposal import NOTHING, Found, Proposal, Trust, merged
from outrider.retrieval.tenants import ByTenant
from outrider.retrieval.trie import Cursor, Trie


class Text(Protocol):
    """An index in which the end of one text is looked up."""

    def read(self, tokens: list[int]) -> None:
        """Learn the new tokens of this text, which only grows."""

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        """What may follow this text, which was read, and these tokens after it, which were not; at most `most`
        nodes."""


class History:
    """One text by its n-grams: the most recent position after each."""

    def __init__(self, shortest: int, longest: int):
        """Tokens of the shortest and the longest match."""
        self.shortest, self.longest = shortest, longest
        self.known = 0
        self.follows: dict[tuple[int, ...], int] = {}

    def read(self, tokens: list[int]) -> None:
        """Learn the n-grams that new tokens follow.  Nothing follows the text's own end yet, so it never matches
        itself."""
        for at in range(max(self.known, 1), len(tokens)):
            for n in range(self.shortest, min(self.longest, at) + 1):
                self.follows[tuple(tokens[at - n : at])] = at
        self.known = len(tokens)

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        end = [*tokens[-self.longest :], *drafted]
        for n in range(min(self.longest, len(end)), self.shortest - 1, -1):
            at = self.follows.get(tuple(end[-n:]))
            if at is not None:
                return Proposal.chain(tokens[at : at + most])
        return NOTHING


def _ahead(cursor: Cursor | NativeCursor, tokens: Sequence[int], drafted: Sequence[int]) -> Cursor | NativeCursor:
    """The cursor, which is at the end of these tokens, or one that follows drafted ones and learns nothing."""
    if not drafted:
        return cursor
    there = cursor.trie.cursor()
    there.follow([*tokens[-cursor.trie.depth :], *drafted])
    return there


class InTrie:
    """One text by its position in a trie, its own or a shared one."""

    def __init__(
        self, cursor: Cursor | NativeCursor, tree: Literal["chain", "recency", "frequency"], levels: int, shortest: int
    ):
        """tree: one continuation, or a tree of them in this order.  shortest: tokens of the shortest match that is
        used."""
        self.cursor, self.tree, self.levels, self.shortest = cursor, tree, levels, shortest
        self.known = 0

    def read(self, tokens: list[int]) -> None:
        if len(tokens) > self.known:
            self.cursor.append(tokens[self.known :])
            self.known = len(tokens)

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        cursor = _ahead(self.cursor, tokens, drafted)
        if self.tree == "chain":
            return Proposal.chain(cursor.chain(most, self.shortest))
        return cursor.tree(self.tree, most, self.levels, self.shortest)


class InSources:
    """One text by its positions in several tries, its own and a shared one, and in corpora: the best of all
    proposals."""

    def __init__(
        self, cursors: Mapping[str, Cursor | NativeCursor], sources: Sequence[Corpus], trust: Trust, levels: int,
        shortest: int,
        factor: float, min_share: float,
    ):  # fmt: skip
        """factor: nodes proposed for every token that matches.  least: continuations that are less likely are not
        proposed."""
        self.cursors, self.sources, self.trust = cursors, sources, trust
        self.levels, self.shortest, self.factor, self.min_share = levels, shortest, factor, min_share
        self.known = 0
        self.found: list[Found] = []
        """What was found for the text in the last step."""

    def read(self, tokens: list[int]) -> None:
        if len(tokens) > self.known:
            self.trust.learn(self.found, tokens[self.known])
            self.found = []
            for cursor in self.cursors.values():
                cursor.append(tokens[self.known :])
            self.known = len(tokens)

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        """The best nodes of all sources; a longer match gives more."""
        if most <= 0:
            return NOTHING
        cursors = {name: _ahead(cursor, tokens, drafted) for name, cursor in self.cursors.items()}
        found = [
            Found(name, cursor.followed, cursor.tree("frequency", most, self.levels, self.shortest))
            for name, cursor in cursors.items()
        ]
        end = [*tokens, *drafted] if drafted else tokens
        found += [corpora.looked_up(corpus, end, most, self.levels, self.shortest) for corpus in self.sources]
        found = [one for one in found if one.proposal.tokens]
        if not drafted:  # else the next token tells nothing of what was found
            self.found = found
        longest = max((one.length for one in found), default=0)
        best = merged(found, min(most, int(self.factor * longest)), self.trust)
        return best.first(sum(share >= self.min_share for share in best.shares))


class Tries:
    """Tries for texts: a new one for each text, or one for all requests or for a tenant's."""

    def __init__(self, longest: int, capacity: int, tenants: int, shared: Literal[False, "tenant", "all"]):
        """longest: tokens of the longest match.  capacity: n-grams in one trie.  tenants: most tenants with a trie."""
        self.longest, self.capacity, self.shared = longest, capacity, shared
        self.by_tenant = ByTenant(self.new, tenants)

    def new(self) -> Trie | NativeTrie:
        # the longest match and the token after it
        return native_trie.fastest(self.longest + 1, self.capacity)

    def of(self, tenant: str) -> Trie | NativeTrie:
        """The trie for a text of this tenant: the shared one, or else a new one."""
        return self.by_tenant.of(tenant if self.shared == "tenant" else "") if self.shared else self.new()
