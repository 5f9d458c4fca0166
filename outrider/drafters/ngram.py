"""Prompt lookup: propose what followed the last time these tokens stood here.  (Saxena 2023; Yang et al. 2304.04487.)

The longest match wins, among equals the most recent.  Needs no training and no pass of any model; strong where text repeats
itself, such as code and summaries.  `tree` proposes several continuations at once, `shared` looks them up in the texts of
other requests too; both from a trie of n-grams (see `retrieval.trie`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import trees
from outrider.nn.serving import verifies_trees, warn_idle
from outrider.retrieval import trie
from outrider.retrieval.proposal import NOTHING, Proposal
from outrider.retrieval.tenants import ByTenant
from outrider.retrieval.trie import NativeTrie, Trie
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["ngram"] = "ngram"
    length: PositiveInt = 7
    """Most tokens proposed per step; levels of a tree."""
    longest: PositiveInt = 4
    """Tokens of the longest match looked for."""
    shortest: PositiveInt = 2
    """Tokens of the shortest match that is believed."""
    tree: Literal["chain", "recency", "frequency"] = "chain"
    """One continuation, or a tree of them: the most recent first, or the most frequent."""
    nodes: PositiveInt = 16
    """Nodes of a tree; a chain has `length`."""
    shared: Literal[False, "tenant", "all"] = False
    """Look up in the texts of other requests too, those before and those beside: of the same tenant's, or of all."""
    capacity: int = Field(default=1_000_000, ge=1000, le=1_000_000_000)
    """N-grams that a trie remembers (60 to 75 bytes each), a slot's or a tenant's; the least recently seen go."""
    tenants: PositiveInt = 64
    """Tenants whose texts are remembered; the one that asked least recently goes."""

    @model_validator(mode="after")
    def _in_order(self) -> Config:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is more than longest {self.longest}")
        if self.capacity < 2 * (self.longest + 1):
            raise ValueError(f"capacity {self.capacity} holds no matches of {self.longest} tokens; raise it, or lower longest")
        return self


class Text(Protocol):
    """What one slot looks its text up in."""

    def read(self, tokens: list[int]) -> None:
        """Learn what is new of this text, which only ever grows."""

    def propose(self, tokens: list[int], most: int) -> Proposal:
        """What may follow it."""


class History:
    """One slot's text by its n-grams: where the token after each stood most recently."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.known = 0
        self.follows: dict[tuple[int, ...], int] = {}

    def read(self, tokens: list[int]) -> None:
        """Learn the n-grams that new tokens follow.  The text's own end follows nothing yet, so it never finds itself."""
        for at in range(max(self.known, 1), len(tokens)):
            for n in range(self.config.shortest, min(self.config.longest, at) + 1):
                self.follows[tuple(tokens[at - n : at])] = at
        self.known = len(tokens)

    def propose(self, tokens: list[int], most: int) -> Proposal:
        for n in range(min(self.config.longest, len(tokens)), self.config.shortest - 1, -1):
            at = self.follows.get(tuple(tokens[-n:]))
            if at is not None:
                return Proposal.chain(tokens[at : at + most])
        return NOTHING


class InTrie:
    """One slot's text by its place in a trie, its own or one that is shared."""

    def __init__(self, config: Config, grown: Trie | NativeTrie) -> None:
        self.config = config
        self.cursor = grown.cursor()
        self.known = 0

    def read(self, tokens: list[int]) -> None:
        if len(tokens) > self.known:
            self.cursor.append(tokens[self.known :])
            self.known = len(tokens)

    def propose(self, tokens: list[int], most: int) -> Proposal:
        config = self.config
        if config.tree != "chain":
            return self.cursor.tree(config.tree, most, config.length, config.shortest)
        return Proposal.chain(self.cursor.chain(most, config.shortest))


class NGram(Drafter):
    """Looks the end of the text up in what was read before."""

    def __init__(self, config: Config):
        self.config = config
        self.limit = config.length if config.tree == "chain" else config.nodes
        self.shared = ByTenant(self._trie, config.tenants)
        """Used only where `shared` asks for it."""

    def allocate(self, cache: Cache) -> list[Text | None]:
        return [None] * cache.slots

    def propose(self, memory: list[Text | None], state: DecodeState, budget: Tensor) -> Draft:
        found = [self._read(memory, state, row).propose(state.tokens[row], most) for row, most in self._wanted(state, budget)]
        return trees.of_lists([own.tokens for own in found], [own.parents for own in found], state.device)

    def observe(self, memory: list[Text | None], state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        """Others find what was committed at once, also where the text ends here."""
        if self.config.shared:
            for row in state.rows:
                self._read(memory, state, row)

    def free(self, memory: list[Text | None], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None

    def _wanted(self, state: DecodeState, budget: Tensor) -> list[tuple[int, int]]:
        return [(row, min(most, self.limit)) for row, most in zip(state.rows, budget.tolist(), strict=True)]

    def _read(self, memory: list[Text | None], state: DecodeState, row: int) -> Text:
        """The slot's text, everything committed read."""
        text = memory[row]
        if text is None:
            text = memory[row] = self._text(state.requests[row].tenant)
        text.read(state.tokens[row])
        return text

    def _text(self, tenant: str) -> Text:
        config = self.config
        if not config.shared:
            return History(config) if config.tree == "chain" else InTrie(config, self._trie())
        return InTrie(config, self.shared.of(tenant if config.shared == "tenant" else ""))

    def _trie(self) -> Trie | NativeTrie:
        # the longest match and the token behind it
        return trie.fastest(self.config.longest + 1, self.config.capacity)


def build(config: Config, target: Target) -> NGram:
    return NGram(_allowed(config, target))


def _allowed(config: Config, target: Target) -> Config:
    """The config that the target can follow; says which settings have no effect."""
    if config.tree != "chain" and not verifies_trees(target, "ngram", f"a chain of {config.length}, as with tree chain"):
        config = config.model_copy(update={"tree": "chain"})
    needs = {
        "nodes": config.tree != "chain",
        "capacity": bool(config.shared) or config.tree != "chain",
        "tenants": config.shared,
    }
    warn_idle("ngram", config, needs, "without a tree or a shared memory")
    return config
