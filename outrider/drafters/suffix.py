"""Suffix decoding: propose what followed the longest suffix of the text wherever it stood before.  (Oliaro et al. 2411.04975.)

It is looked for in the request's own text, in texts of other requests where `shared` allows it, and in `corpora` on disk.  Each
gives a tree of what followed, by frequency; the best of all are verified.  The longer the match, the more is proposed.

Differs from the paper: a trie of n-grams in place of a suffix tree, so memory is bounded and old text is forgotten; sources are
merged node by node (see `retrieval.proposal`) in place of the better of two; corpora.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import trees
from outrider.nn.serving import verifies_trees
from outrider.retrieval import corpora, proposal, trie
from outrider.retrieval.proposal import Found, Proposal, Trust
from outrider.retrieval.suffix_array import Corpus
from outrider.retrieval.tenants import ByTenant
from outrider.retrieval.trie import Cursor as PythonCursor
from outrider.retrieval.trie import NativeCursor, NativeTrie
from outrider.retrieval.trie import Trie as PythonTrie
from outrider.targets.protocol import Target

Trie = PythonTrie | NativeTrie
Cursor = PythonCursor | NativeCursor


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


@dataclass
class Text:
    """One slot's places in the memory of its own text and in the shared one, and what was found behind it in the last step."""

    cursors: dict[str, Cursor]
    read: int = 0
    found: list[Found] = field(default_factory=list)

    def append(self, tokens: list[int], trust: Trust) -> None:
        """Learn what is new of this text, which only ever grows."""
        if len(tokens) > self.read:
            trust.learn(self.found, tokens[self.read])
            self.found = []
            for cursor in self.cursors.values():
                cursor.append(tokens[self.read :])
            self.read = len(tokens)


class Suffix(Drafter):
    """Looks the end of the text up in everything that may be known."""

    def __init__(self, config: Config, sources: Sequence[Corpus] = ()):
        self.config, self.sources = config, sources
        self.limit = config.nodes
        self.shared = ByTenant(self._trie, config.tenants)
        self.trust = Trust()
        """Of sources, learnt over all requests: how often they were right, nothing of what they said."""

    def allocate(self, cache: Cache) -> list[Text | None]:
        return [None] * cache.slots

    def propose(self, memory: list[Text | None], state: DecodeState, budget: Tensor) -> Draft:
        found = [
            self._looked_up(self._read(memory, state, row), state.tokens[row], min(most, self.limit))
            for row, most in zip(state.rows, budget.tolist(), strict=True)
        ]
        return trees.of_lists([own.tokens for own in found], [own.parents for own in found], state.device)

    def observe(self, memory: list[Text | None], state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        """Others find what was committed at once, also where the text ends here."""
        if self.config.shared:
            for row in state.rows:
                self._read(memory, state, row)

    def free(self, memory: list[Text | None], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None

    def _looked_up(self, text: Text, tokens: list[int], most: int) -> Proposal:
        """The best of what all sources say, as long as the longest match makes worth it."""
        config = self.config
        if most <= 0:
            return proposal.NOTHING
        found = [
            Found(name, cursor.followed, cursor.tree("frequency", most, config.levels, config.shortest))
            for name, cursor in text.cursors.items()
        ]
        found += [corpora.looked_up(corpus, tokens, most, config.levels, config.shortest) for corpus in self.sources]
        text.found = [one for one in found if one.proposal.tokens]
        longest = max((one.length for one in text.found), default=0)
        best = proposal.merged(found, min(most, int(config.factor * longest)), self.trust)
        return best.first(sum(share >= config.least for share in best.shares))

    def _read(self, memory: list[Text | None], state: DecodeState, row: int) -> Text:
        """The slot's text, everything committed read."""
        text = memory[row]
        if text is None:
            cursors = {"own": self._trie().cursor()}
            if self.config.shared:
                tenant = state.requests[row].tenant if self.config.shared == "tenant" else ""
                cursors["shared"] = self.shared.of(tenant).cursor()
            text = memory[row] = Text(cursors)
        text.append(state.tokens[row], self.trust)
        return text

    def _trie(self) -> Trie:
        # the longest match and the token behind it
        return trie.fastest(self.config.longest + 1, self.config.capacity)


def build(config: Config, target: Target) -> Suffix:
    """Raises DataError for a corpus that is not there, is damaged, or is another tokenizer's."""
    verifies_trees(target, "suffix", "trees of which the first chain is verified")
    return Suffix(config, corpora.load(config.corpora, target.spec.tokenizer_hash))
