"""Token recycling: propose the target's likeliest successors of a token, as stored at its last occurrence.  (arXiv
2408.08696.)

For every verified node, the target's likeliest successors of its token are stored, and a tree of them is grown under
the anchor.  Needs no training and no pass of any model, and proposes from the second occurrence of a token on.

Differs from the paper: each request has its own table, initially empty, so that no text leaks into another request's
drafts; with `shared` there is one per tenant, whereas the paper has one for all.  The tree is grown best-first by how
often each rank is right, not from a fixed template, so unknown tokens cost no nodes.

Use it if training is not an option and text is new rather than repeated, or as the second member of a `mix` or `graft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Scores
from outrider.method import Method
from outrider.nn.drafting import trees
from outrider.nn.memory import RequestDrafter
from outrider.retrieval.recycle import Successors
from outrider.retrieval.tenants import ByTenant
from outrider.targets.protocol import Target

METHOD = Method(
    cost="lookup", is_added=True,
    instead={
        "vllm": "use ngram or suffix, which also need no training",
        "sglang": "use ngram, which also needs no training",
    },
)  # fmt: skip


class Config(Base):
    kind: Literal["recycle"] = "recycle"
    nodes: PositiveInt = 16
    """Maximum number of nodes of the tree, drafted per step."""
    depth: PositiveInt = 6
    """Levels of the tree, in tokens."""
    successors: PositiveInt = 8
    """Number of successors stored per token, the likeliest ones."""
    shared: bool = False
    """One table for all requests of a tenant, which outlives them; no: one per request, initially empty."""


TENANTS = 64
"""Maximum number of tenants with a table; the least recently used is removed."""


class Recycle(RequestDrafter[Successors]):
    """Grows a tree of successors under the anchor."""

    nested, watches = False, True

    def __init__(self, config: Config, vocabulary: int):
        self.config, self.limit, self.vocabulary = config, config.nodes, vocabulary
        self.learns = config.shared
        self.by_tenant = ByTenant(self.new_request, TENANTS)

    def new_request(self, tenant: str = "") -> Successors:
        return Successors(self.vocabulary, self.config.successors)

    def of(self, memory: list[Successors | None], state: DecodeState, row: int) -> Successors:
        return self.by_tenant.of(state.requests[row].tenant) if self.config.shared else super().of(memory, state, row)

    def propose(self, memory: list[Successors | None], state: DecodeState, budget: Tensor) -> Draft:
        return self.look_up(memory, state, [()] * len(state.rows), budget)

    def look_up(
        self, memory: list[Successors | None], state: DecodeState, drafted: Sequence[Sequence[int]], budget: Tensor
    ) -> Draft:
        slots = zip(state.rows, drafted, budget.tolist(), strict=True)
        grown = [
            self.of(memory, state, row).grow([*state.tokens[row][-1:], *path][-1], most, self.config.depth)
            for row, path, most in slots
        ]
        return trees.of_lists([tokens for tokens, _ in grown], [parents for _, parents in grown], state.device)

    def observe(
        self, memory: list[Successors | None], state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> None:
        """Learn from every verified node, including those of other drafters."""
        best = scores.logits.topk(min(self.config.successors, scores.logits.shape[-1]), -1).indices.cpu()
        for b, row in enumerate(state.rows):
            path, last = accepted.paths[b], accepted.next_tokens[b]
            anchor = state.tokens[row][-1 - len(path) - (last >= 0)]
            size = draft.live[b]
            nodes = [-1, *(n for n in range(size) if n not in path), *path]
            tokens = [anchor if n < 0 else draft.ids[b][n] for n in nodes]
            # accepted nodes come last, since the text continues from them
            self.of(memory, state, row).learn(tokens, best[b, [n + 1 for n in nodes]])


def build(config: Config, target: Target) -> Recycle:
    return Recycle(config, target.spec.vocabulary)
