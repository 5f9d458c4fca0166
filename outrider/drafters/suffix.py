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
from outrider.nn.memory import Lookup
from outrider.nn.serving import verifies_trees
from outrider.retrieval import corpora
from outrider.retrieval.proposal import Trust
from outrider.retrieval.suffix_array import Corpus
from outrider.retrieval.texts import InSources, Tries
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["suffix"] = "suffix"
    nodes: PositiveInt = 16
    """Most nodes of the tree."""
    levels: PositiveInt = 16
    """Levels of the tree; of a chain, where the target verifies no trees, its length."""
    factor: NonNegativeFloat = 16.0
    """Nodes proposed for every token that matches."""
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.005
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


class Suffix(Lookup):
    """Looks the end of the text up in everything that may be known."""

    def __init__(self, config: Config, sources: Sequence[Corpus] = ()):
        super().__init__(config.nodes, Tries(config.longest, config.capacity, config.tenants, config.shared))
        self.config, self.sources = config, sources
        self.trust = Trust()
        """Of sources, learnt over all requests: how often they were right, nothing of what they said."""

    def fresh(self, tenant: str) -> InSources:
        config, cursors = self.config, {"own": self.tries.new().cursor()}
        if config.shared:
            cursors["shared"] = self.tries.of(tenant).cursor()
        return InSources(
            cursors, self.sources, self.trust, config.levels, config.shortest, config.factor, config.min_confidence
        )


def build(config: Config, target: Target) -> Suffix:
    """Raises DataError for a corpus that is not there, is damaged, or is another tokenizer's."""
    verifies_trees(target, "suffix", "trees of which the first chain is verified")
    return Suffix(config, corpora.load(config.corpora, target.spec.tokenizer_hash))
