"""Suffix decoding: propose what followed earlier occurrences of the text's longest suffix.  (arXiv 2411.04975.)

The suffix is looked up in the request's own text, in texts of other requests if `shared`, and in `corpora` on disk.
Each source gives a tree of continuations by frequency; the best nodes of all are verified.  A longer match proposes
more.

Differs from the paper: a trie of n-grams instead of a suffix tree, so memory is bounded and old text is forgotten;
sources are merged node by node (see `retrieval.proposal`) instead of using the better of two; corpora are supported.

Use it if similar texts are on disk or in earlier requests: with a corpus it has the highest acceptance of all methods
that need no training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from outrider.config import Config as Base
from outrider.method import Method
from outrider.nn.drafting.serving import verifies_trees
from outrider.nn.memory import Lookup
from outrider.retrieval.corpus import corpora
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.retrieval.proposal import Trust
from outrider.retrieval.texts import SourcesIndex, Tries
from outrider.targets.protocol import Target

METHOD = Method(
    cost="lookup", usual=2, is_untrained=True, tokens=16,
    engines={
        "vllm": {"name": "suffix", "notes": ("suffix needs `pip install arctic-inference==0.1.1` next to vLLM",)},
        "trtllm": {"name": "SA"},
    },
    instead={
        "sglang": "use ngram, whose trie can read corpora (--speculative-ngram-external-corpus-path)",
        "llamacpp": "use ngram (ngram-simple)",
        "transformers": "use ngram (prompt_lookup_num_tokens)",
    },
)  # fmt: skip


class Config(Base):
    kind: Literal["suffix"] = "suffix"
    nodes: PositiveInt = 16
    """Maximum number of nodes of the tree, drafted per step."""
    levels: PositiveInt = 16
    """Levels of the tree, in tokens; the length of the chain if the target can't verify trees."""
    factor: NonNegativeFloat = 16.0
    """Maximum number of nodes proposed per matching token."""
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Continuations with a lower probability, judging by the counts so far, are not proposed."""
    shortest: PositiveInt = 1
    """Minimum length of a match, in tokens."""
    longest: Annotated[int, Field(ge=2, le=64)] = 8
    """Maximum length of a match in texts of requests, in tokens; in corpora it is 64."""
    corpora: tuple[str, ...] = ()
    """Names of corpora; see `outrider corpus`."""
    shared: Literal[False, "tenant", "all"] = False
    """Also look up in the texts of other requests, earlier and current: those of the same `tenant`, or `all`."""
    capacity: Annotated[int, Field(ge=1000)] = 1_000_000
    """Maximum number of n-grams in one trie, a slot's or a shared one, 60 to 90 bytes each; the least recently used are
    removed."""
    tenants: PositiveInt = 64
    """Maximum number of tenants whose texts are stored; the least recently used is removed."""


class Suffix(Lookup):
    """Looks up the end of the text in all sources."""

    nested = False

    def __init__(self, config: Config, sources: Sequence[Corpus] = ()):
        super().__init__(config.nodes, Tries(config.longest, config.capacity, config.tenants, config.shared))
        self.config, self.sources = config, sources
        self.learns = True  # it learns which source to trust
        self.trust = Trust()
        """How often each source was right, over all requests; contains no text."""

    def new_request(self, tenant: str) -> SourcesIndex:
        config, cursors = self.config, {"own": self.tries.new().cursor()}
        if config.shared:
            cursors["shared"] = self.tries.of(tenant).cursor()
        return SourcesIndex(
            cursors, self.sources, self.trust, config.levels, config.shortest, config.factor, config.min_confidence
        )


def build(config: Config, target: Target) -> Suffix:
    """Raises DataError for a corpus that is missing, damaged or built with another tokenizer."""
    verifies_trees(target, "suffix", "trees, of which the first chain is verified")
    return Suffix(config, corpora.load(config.corpora, target.spec.tokenizer_hash))
