"""Suffix decoding: propose what followed the longest suffix of the text wherever it stood before.  (Oliaro et al. 2411.04975.)

It is looked for in the request's own text, in texts of other requests where `shared` allows it, and in `corpora` on disk.  Each
gives a tree of what followed, by frequency; the best of all are verified.  The longer the match, the more is proposed.

Differs from the paper: a trie of n-grams in place of a suffix tree, so memory is bounded and old text is forgotten; sources are
merged node by node (see `retrieval.proposal`) in place of the better of two; corpora.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from outrider.config import Config as Base
from outrider.nn.lookup import Lookup
from outrider.nn.serving import verifies_trees
from outrider.retrieval import corpora, proposal
from outrider.retrieval.proposal import Found, Proposal, Trust
from outrider.retrieval.suffix_array import Corpus
from outrider.retrieval.texts import Tries
from outrider.retrieval.trie import Cursor, NativeCursor
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["suffix"] = "suffix"
    nodes: PositiveInt = 16
    """Most nodes of the tree."""
    levels: PositiveInt = 16
    """Levels of the tree; of a chain, where the target verifies no trees, its length."""
    factor: NonNegativeFloat = 16.0
    """Nodes proposed for every token that matches."""
    least: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Continuations that are less likely, by what was counted, are not proposed."""
    shortest: PositiveInt = 1
    """Tokens of the shortest match that is believed."""
    longest: Annotated[int, Field(ge=2, le=64)] = 8
    """Tokens of the longest match looked for in texts of requests; corpora look for more."""
    corpora: tuple[str, ...] = ()
    """Names of corpora; see `outrider corpus`."""
    shared: Literal[False, "tenant", "all"] = False
    """Look up in the texts of other requests too, those before and those beside: of the same tenant's, or of all."""
    capacity: Annotated[int, Field(ge=1000)] = 1_000_000
    """N-grams that a memory holds (60 to 90 bytes each), a slot's or a shared one; the least recently seen go."""
    tenants: PositiveInt = 64
    """Tenants whose texts are remembered; the one that asked least recently goes."""


class Text:
    """One slot's places in the memory of its own text and in the shared one, and what was found behind it in the last step."""

    def __init__(self, config: Config, cursors: dict[str, Cursor | NativeCursor], sources: Sequence[Corpus], trust: Trust):
        self.config, self.cursors, self.sources, self.trust = config, cursors, sources, trust
        self.known = 0
        self.found: list[Found] = []

    def read(self, tokens: list[int]) -> None:
        """Learn what is new of this text, which only ever grows."""
        if len(tokens) > self.known:
            self.trust.learn(self.found, tokens[self.known])
            self.found = []
            for cursor in self.cursors.values():
                cursor.append(tokens[self.known :])
            self.known = len(tokens)

    def propose(self, tokens: list[int], most: int) -> Proposal:
        """The best of what all sources say, as long as the longest match makes worth it."""
        config = self.config
        if most <= 0:
            return proposal.NOTHING
        found = [
            Found(name, cursor.followed, cursor.tree("frequency", most, config.levels, config.shortest))
            for name, cursor in self.cursors.items()
        ]
        found += [corpora.looked_up(corpus, tokens, most, config.levels, config.shortest) for corpus in self.sources]
        self.found = [one for one in found if one.proposal.tokens]
        longest = max((one.length for one in self.found), default=0)
        best = proposal.merged(found, min(most, int(config.factor * longest)), self.trust)
        return best.first(sum(share >= config.least for share in best.shares))


class Suffix(Lookup):
    """Looks the end of the text up in everything that may be known."""

    def __init__(self, config: Config, sources: Sequence[Corpus] = ()):
        super().__init__(config.nodes, Tries(config.longest, config.capacity, config.tenants, config.shared))
        self.config, self.sources = config, sources
        self.trust = Trust()
        """Of sources, learnt over all requests: how often they were right, nothing of what they said."""

    def text(self, tenant: str) -> Text:
        cursors = {"own": self.tries.new().cursor()}
        if self.config.shared:
            cursors["shared"] = self.tries.of(tenant).cursor()
        return Text(self.config, cursors, self.sources, self.trust)


def build(config: Config, target: Target) -> Suffix:
    """Raises DataError for a corpus that is not there, is damaged, or is another tokenizer's."""
    verifies_trees(target, "suffix", "trees of which the first chain is verified")
    return Suffix(config, corpora.load(config.corpora, target.spec.tokenizer_hash))
