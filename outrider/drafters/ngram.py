"""Prompt lookup: propose what followed an earlier occurrence of the last tokens.  (Saxena 2023; arXiv 2304.04487.)

The longest match wins; on a tie, the most recent.  Needs no training and no pass of any model.  Strong on text that
repeats itself, such as code and summaries.  `tree` proposes several continuations at once, and `shared` also looks them
up in the texts of other requests; both use a trie of n-grams (see `retrieval.trie`).

Differs from the papers: among equally long matches the most recent is used, not the first; trees and the texts of other
requests are supported.

Use it as the baseline that every other drafter must beat, and when answers repeat the prompt: edits, summaries, code.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from outrider.config import Config as Base
from outrider.method import Method
from outrider.nn.drafting.serving import verifies_trees, warn_idle
from outrider.nn.memory import Lookup
from outrider.retrieval.texts import History, TextIndex, TrieIndex, Tries
from outrider.targets.protocol import Target

METHOD = Method(
    cost="lookup", usual=1, is_untrained=True, tokens=5,
    engines={
        "vllm": {
            "name": "ngram", "varies": True,
            "takes": {"prompt_lookup_max": ("longest", 5), "prompt_lookup_min": ("shortest", 2)},
        },
        "sglang": {"name": "NGRAM", "flag": "speculative-num-draft-tokens"},
        "trtllm": {"name": "NGram", "takes": {"max_matching_ngram_size": ("longest", None)}, "varies": True},
        "llamacpp": {
            "name": "ngram-simple",
            "takes": {"spec-ngram-simple-size-n": ("longest", 4), "spec-ngram-simple-size-m": ("tokens", None)},
        },
        "transformers": {
            "name": "prompt_lookup_num_tokens",
            "takes": {"prompt_lookup_num_tokens": ("tokens", None), "max_matching_ngram_size": ("longest", 2)},
        },
    },
)  # fmt: skip


class Config(Base):
    kind: Literal["ngram"] = "ngram"
    length: PositiveInt = 7
    """Maximum number of tokens proposed per step; levels of a tree."""
    longest: PositiveInt = 4
    """Maximum length of a match, in tokens."""
    shortest: PositiveInt = 2
    """Minimum length of a match, in tokens."""
    tree: Literal["chain", "recency", "frequency"] = "chain"
    """One continuation, or a tree of them: the most recent first, or the most frequent."""
    nodes: PositiveInt = 16
    """Number of nodes of a tree; a chain has `length`."""
    shared: Literal[False, "tenant", "all"] = False
    """Also look up in the texts of other requests, earlier and current: those of the same `tenant`, or `all`."""
    capacity: int = Field(default=1_000_000, ge=1000, le=1_000_000_000)
    """Maximum number of n-grams in one trie, a slot's or a tenant's, 60 to 75 bytes each; the least recently used are
    removed."""
    tenants: PositiveInt = 64
    """Maximum number of tenants whose texts are stored; the least recently used is removed."""

    @model_validator(mode="after")
    def _in_order(self) -> Config:
        if self.shortest > self.longest:
            raise ValueError(
                f"shortest must be at most longest, got {self.shortest} and {self.longest}; lower shortest"
            )
        if self.capacity < 2 * (self.longest + 1):
            raise ValueError(
                f"capacity {self.capacity} is too small for matches of {self.longest} tokens; raise it, or lower "
                "longest"
            )
        return self


class NGram(Lookup):
    """Looks up the end of the text in earlier text."""

    def __init__(self, config: Config):
        tries = Tries(config.longest, config.capacity, config.tenants, config.shared)
        super().__init__(config.length if config.tree == "chain" else config.nodes, tries)
        self.config, self.learns = config, bool(config.shared)

    def new_request(self, tenant: str) -> TextIndex:
        config = self.config
        if config.tree == "chain" and not config.shared:
            return History(config.shortest, config.longest)
        return TrieIndex(self.tries.of(tenant).cursor(), config.tree, config.length, config.shortest)


def build(config: Config, target: Target) -> NGram:
    """Warns about settings that the target does not support and about settings without effect."""
    if config.tree != "chain" and not verifies_trees(
        target, "ngram", f"a chain of {config.length}, as with tree chain"
    ):
        config = config.model_copy(update={"tree": "chain"})
    has_trie = config.tree != "chain" or bool(config.shared)
    needs = {"nodes": config.tree != "chain", "capacity": has_trie, "tenants": config.shared}
    warn_idle("ngram", config, needs, "without a tree or a shared memory")
    return NGram(config)
