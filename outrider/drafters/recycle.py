"""Token recycling: propose what the target nearly said the last time a token stood here.  (Luo et al. 2408.08696.)

Every verified node leaves its token with the target's likeliest successors; a tree of them hangs under the anchor.  Needs no
training and no pass of any model, and has something to propose from the second time on that a token is seen.

Differs from the paper: the table is the request's own and begins empty, so that no text shows in another's drafts; `shared`
keeps one for all requests of a tenant, as the paper does for all.  The tree is grown best first by how often each rank is
right, in place of a fixed template, so that unknown tokens cost no nodes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import trees
from outrider.nn.memory import RequestDrafter
from outrider.retrieval.recycle import Successors
from outrider.retrieval.tenants import ByTenant
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["recycle"] = "recycle"
    nodes: PositiveInt = 16
    """Most nodes of the tree."""
    depth: PositiveInt = 6
    """Levels of the tree."""
    successors: PositiveInt = 8
    """Likeliest tokens remembered after each token."""
    shared: bool = False
    """One table for all requests of a tenant, kept when they end; otherwise each request has its own, empty at first."""


TENANTS = 64
"""Tenants whose tables are kept; the one that asked least recently goes."""


class Recycle(RequestDrafter[Successors]):
    """Grows a tree of successors under the anchor."""

    watches = True

    def __init__(self, config: Config, vocabulary: int):
        self.config, self.limit, self.vocabulary = config, config.nodes, vocabulary
        self.by_tenant = ByTenant(self.fresh, TENANTS)

    def fresh(self, tenant: str = "") -> Successors:
        return Successors(self.vocabulary, self.config.successors)

    def of(self, memory: list[Successors | None], state: DecodeState, row: int) -> Successors:
        return self.by_tenant.of(state.requests[row].tenant) if self.config.shared else super().of(memory, state, row)

    def propose(self, memory: list[Successors | None], state: DecodeState, budget: Tensor) -> Draft:
        slots = zip(state.rows, budget.tolist(), strict=True)
        found = [self.of(memory, state, row).grow(state.tokens[row][-1], most, self.config.depth) for row, most in slots]
        return trees.of_lists([tokens for tokens, _ in found], [parents for _, parents in found], state.device)

    def observe(
        self, memory: list[Successors | None], state: DecodeState, draft: Draft, kept: Accepted, scores: Scores
    ) -> None:
        """Learn from every verified node, whoever proposed it."""
        best = scores.logits.topk(min(self.config.successors, scores.logits.shape[-1]), -1).indices.cpu()
        for b, row in enumerate(state.rows):
            path, last = kept.paths[b], kept.next_tokens[b]
            anchor = state.tokens[row][-1 - len(path) - (last >= 0)]
            size = draft.live[b]
            nodes = [-1, *(n for n in range(size) if n not in path), *path]
            tokens = [anchor if n < 0 else draft.ids[b][n] for n in nodes]
            # what was kept is written last: it is what the text goes on from
            self.of(memory, state, row).learn(tokens, best[b, [n + 1 for n in nodes]])


def build(config: Config, target: Target) -> Recycle:
    return Recycle(config, target.spec.vocabulary)
