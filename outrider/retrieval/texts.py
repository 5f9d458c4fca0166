"""Continuations of a text, looked up in its own n-grams, in shared tries, and in corpora."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from outrider.retrieval import native_trie
from outrider.retrieval.corpus import corpora
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.retrieval.native_trie import NativeCursor, NativeTrie
from outrider.retrieval.proposal import NOTHING, Proposal, SourceProposal, Trust, merge_proposals
from outrider.retrieval.tenants import ByTenant
from outrider.retrieval.trie import Cursor, Trie


class TextIndex(Protocol):
    """An index in which the end of one text is looked up."""

    def read(self, tokens: list[int]) -> None:
        """Learn the new tokens of the text, which only grows."""

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        """Continuations of the text, which has been read, followed by `drafted`, which has not; at most `most`
        nodes."""


class History:
    """One text, by its n-grams, each with the most recent position after it."""

    def __init__(self, shortest: int, longest: int):
        """shortest, longest: minimum and maximum length of a match in tokens."""
        self.shortest, self.longest = shortest, longest
        self.num_read = 0
        self.follows: dict[tuple[int, ...], int] = {}

    def read(self, tokens: list[int]) -> None:
        """Learn the n-grams that new tokens follow.  The text's end has no continuation yet, so it never matches
        itself."""
        for at in range(max(self.num_read, 1), len(tokens)):
            for n in range(self.shortest, min(self.longest, at) + 1):
                self.follows[tuple(tokens[at - n : at])] = at
        self.num_read = len(tokens)

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        end = [*tokens[-self.longest :], *drafted]
        for n in range(min(self.longest, len(end)), self.shortest - 1, -1):
            at = self.follows.get(tuple(end[-n:]))
            if at is not None:
                return Proposal.chain(tokens[at : at + most])
        return NOTHING


def _cursor_after(
    cursor: Cursor | NativeCursor, tokens: Sequence[int], drafted: Sequence[int]
) -> Cursor | NativeCursor:
    """The cursor at the end of these tokens; with drafted tokens, a new cursor after them that learns nothing."""
    if not drafted:
        return cursor
    follower = cursor.trie.cursor()
    follower.follow([*tokens[-cursor.trie.depth :], *drafted])
    return follower


class TrieIndex:
    """One text, by its position in its own trie or a shared one."""

    def __init__(
        self, cursor: Cursor | NativeCursor, tree: Literal["chain", "recency", "frequency"], levels: int, shortest: int
    ):
        """tree: one continuation, or a tree in this order.  shortest: minimum length of a match in tokens."""
        self.cursor, self.tree, self.levels, self.shortest = cursor, tree, levels, shortest
        self.num_read = 0

    def read(self, tokens: list[int]) -> None:
        if len(tokens) > self.num_read:
            self.cursor.append(tokens[self.num_read :])
            self.num_read = len(tokens)

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        cursor = _cursor_after(self.cursor, tokens, drafted)
        if self.tree == "chain":
            return Proposal.chain(cursor.chain(most, self.shortest))
        return cursor.tree(self.tree, most, self.levels, self.shortest)


class SourcesIndex:
    """One text, by its positions in several tries and in corpora; proposes the best nodes of all."""

    def __init__(
        self, cursors: Mapping[str, Cursor | NativeCursor], sources: Sequence[Corpus], trust: Trust, levels: int,
        shortest: int, factor: float, min_share: float,
    ):  # fmt: skip
        """factor: nodes proposed per matching token.  min_share: less likely continuations are not proposed."""
        self.cursors, self.sources, self.trust = cursors, sources, trust
        self.levels, self.shortest, self.factor, self.min_share = levels, shortest, factor, min_share
        self.num_read = 0
        self.last_proposals: list[SourceProposal] = []
        """The sources' proposals of the last step."""

    def read(self, tokens: list[int]) -> None:
        if len(tokens) > self.num_read:
            self.trust.learn(self.last_proposals, tokens[self.num_read])
            self.last_proposals = []
            for cursor in self.cursors.values():
                cursor.append(tokens[self.num_read :])
            self.num_read = len(tokens)

    def propose(self, tokens: list[int], most: int, drafted: Sequence[int] = ()) -> Proposal:
        """The best nodes of all sources; more for a longer match."""
        if most <= 0:
            return NOTHING
        cursors = {name: _cursor_after(cursor, tokens, drafted) for name, cursor in self.cursors.items()}
        proposals = [
            SourceProposal(name, cursor.followed, cursor.tree("frequency", most, self.levels, self.shortest))
            for name, cursor in cursors.items()
        ]
        text = [*tokens, *drafted] if drafted else tokens
        proposals += [corpora.look_up(corpus, text, most, self.levels, self.shortest) for corpus in self.sources]
        proposals = [source for source in proposals if source.proposal.tokens]
        if not drafted:  # otherwise the next token says nothing about these proposals
            self.last_proposals = proposals
        longest = max((source.length for source in proposals), default=0)
        best = merge_proposals(proposals, min(most, int(self.factor * longest)), self.trust)
        return best.first(sum(share >= self.min_share for share in best.shares))


class Tries:
    """Tries for texts: a new one per text, or a shared one per tenant or for all requests."""

    def __init__(self, longest: int, capacity: int, tenants: int, shared: Literal[False, "tenant", "all"]):
        """longest: maximum length of a match in tokens.  capacity: n-grams per trie.  tenants: maximum number of
        tenants with a trie."""
        self.longest, self.capacity, self.shared = longest, capacity, shared
        self.by_tenant = ByTenant(self.new, tenants)

    def new(self) -> Trie | NativeTrie:
        # the longest match and the token after it
        return native_trie.fastest(self.longest + 1, self.capacity)

    def of(self, tenant: str) -> Trie | NativeTrie:
        """The trie for a text of this tenant: the shared one, or a new one."""
        return self.by_tenant.of(tenant if self.shared == "tenant" else "") if self.shared else self.new()
