"""What may follow a text, by what stood before: its own n-grams, tries that other texts may share, corpora."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from outrider.retrieval import corpora, native_trie
from outrider.retrieval.native_trie import NativeCursor, NativeTrie
from outrider.retrieval.proposal import NOTHING, Found, Proposal, Trust, merged
from outrider.retrieval.suffix_array import Corpus
from outrider.retrieval.tenants import ByTenant
from outrider.retrieval.trie import Cursor, Trie


class Text(Protocol):
    """What the end of one text is looked up in."""

    def read(self, tokens: list[int]) -> None:
        """Learn what is new of this text, which only ever grows."""

    def propose(self, tokens: list[int], most: int) -> Proposal:
        """What may follow it, at most `most` nodes."""


class History:
    """One text by its n-grams: where the token after each stood most recently."""

    def __init__(self, shortest: int, longest: int):
        """Tokens of the shortest and the longest match that is looked for."""
        self.shortest, self.longest = shortest, longest
        self.known = 0
        self.follows: dict[tuple[int, ...], int] = {}

    def read(self, tokens: list[int]) -> None:
        """Learn the n-grams that new tokens follow.  The text's own end follows nothing yet, so it never finds itself."""
        for at in range(max(self.known, 1), len(tokens)):
            for n in range(self.shortest, min(self.longest, at) + 1):
                self.follows[tuple(tokens[at - n : at])] = at
        self.known = len(tokens)

    def propose(self, tokens: list[int], most: int) -> Proposal:
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            at = self.follows.get(tuple(tokens[-n:]))
            if at is not None:
                return Proposal.chain(tokens[at : at + most])
        return NOTHING


class InTrie:
    """One text by its place in a trie, its own or one that is shared."""

    def __init__(
        self, cursor: Cursor | NativeCursor, tree: Literal["chain", "recency", "frequency"], levels: int, shortest: int
    ):
        """tree: one continuation, or a tree of them in this order.  shortest: tokens of the shortest match that is believed."""
        self.cursor, self.tree, self.levels, self.shortest = cursor, tree, levels, shortest
        self.known = 0

    def read(self, tokens: list[int]) -> None:
        if len(tokens) > self.known:
            self.cursor.append(tokens[self.known :])
            self.known = len(tokens)

    def propose(self, tokens: list[int], most: int) -> Proposal:
        if self.tree == "chain":
            return Proposal.chain(self.cursor.chain(most, self.shortest))
        return self.cursor.tree(self.tree, most, self.levels, self.shortest)


class InSources:
    """One text by its places in several tries, its own and one that is shared, and in corpora: the best of what all say."""

    def __init__(
        self, cursors: Mapping[str, Cursor | NativeCursor], sources: Sequence[Corpus], trust: Trust, levels: int, shortest: int,
        factor: float, least: float,
    ):  # fmt: skip
        """factor: nodes proposed for every token that matches.  least: continuations that are less likely are not proposed."""
        self.cursors, self.sources, self.trust = cursors, sources, trust
        self.levels, self.shortest, self.factor, self.least = levels, shortest, factor, least
        self.known = 0
        self.found: list[Found] = []
        """What was found behind the text in the last step."""

    def read(self, tokens: list[int]) -> None:
        if len(tokens) > self.known:
            self.trust.learn(self.found, tokens[self.known])
            self.found = []
            for cursor in self.cursors.values():
                cursor.append(tokens[self.known :])
            self.known = len(tokens)

    def propose(self, tokens: list[int], most: int) -> Proposal:
        """The best of what all sources say, as long as the longest match makes worth it."""
        if most <= 0:
            return NOTHING
        found = [
            Found(name, cursor.followed, cursor.tree("frequency", most, self.levels, self.shortest))
            for name, cursor in self.cursors.items()
        ]
        found += [corpora.looked_up(corpus, tokens, most, self.levels, self.shortest) for corpus in self.sources]
        self.found = [one for one in found if one.proposal.tokens]
        longest = max((one.length for one in self.found), default=0)
        best = merged(found, min(most, int(self.factor * longest)), self.trust)
        return best.first(sum(share >= self.least for share in best.shares))


class Tries:
    """Tries to look texts up in: a new one for a text alone, or one for the texts of all requests or of a tenant's."""

    def __init__(self, longest: int, capacity: int, tenants: int, shared: Literal[False, "tenant", "all"]):
        """longest: tokens of the longest match.  capacity: n-grams in one trie.  tenants: how many keep theirs."""
        self.longest, self.capacity, self.shared = longest, capacity, shared
        self.by_tenant = ByTenant(self.new, tenants)

    def new(self) -> Trie | NativeTrie:
        # the longest match and the token behind it
        return native_trie.fastest(self.longest + 1, self.capacity)

    def of(self, tenant: str) -> Trie | NativeTrie:
        """The trie for a text of this tenant: the one that is shared, or else a new one."""
        return self.by_tenant.of(tenant if self.shared == "tenant" else "") if self.shared else self.new()
