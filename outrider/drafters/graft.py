"""Graft: cut the unlikely nodes of a drafter, and verify nodes of a text index instead.  (arXiv 2605.20104.)

A node's score is the product of confidences along its path.  Nodes below a threshold are cut together with their
descendants; a retriever fills the room, so that as many nodes are verified as before.  The threshold of every depth is
measured while decoding: the largest below which nodes were accepted at most `risk` of the time.  Every 16th step cuts
nothing, so that this stays known.

It is exact since a confidence is known before its node's token is drawn: whether a node stays depends on the tokens
above it and on earlier steps, never on its own token.  A drawn node is never cut for its probability.  Where a draft
has no confidences, a drawn node's is the probability of its q's likeliest token, whichever was drawn; deterministic
nodes without confidences differ by their position in the draft alone.

Differs from the paper: the base drafts all its nodes before they are cut, so passes of the target are saved and passes
of the drafter are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.drafters import Choice, Load, built
from outrider.nn.ensemble import Ensemble, EnsembleMemory
from outrider.targets.protocol import Target

BASE, RETRIEVER = 0, 1


class Config(Base):
    kind: Literal["graft"] = "graft"
    base: Choice = Field(default={"kind": "ngram"}, validate_default=True)
    """The drafter whose draft is cut: a kind with its settings, or the folder of a checkpoint."""
    retriever: Choice = Field(default={"kind": "recycle"}, validate_default=True)
    """The drafter that fills the room: a kind with its settings."""
    risk: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Nodes are cut where such nodes were accepted at most this often, 0 to 1; 0 cuts nothing and only fills unused
    room."""
    nodes: PositiveInt | None = None
    """Most nodes verified; as many as the base proposes unless given."""


@dataclass(kw_only=True)
class Memory(EnsembleMemory):
    """The memories of base and retriever, and how often nodes of each score were accepted, over all slots."""

    worth: Worth
    marks: list[list[Mark]] = field(default_factory=list)
    """Of the base's nodes, in the step that is open."""


class Graft(Ensemble):
    """A base drafter, pruned, and a retriever."""

    def __init__(self, base: Drafter, retriever: Drafter, config: Config):
        super().__init__([base, retriever], config.nodes or base.limit)
        self.config = config

    def allocate(self, cache: Cache) -> Memory:
        return Memory(**vars(super().allocate(cache)), worth=Worth(self.config.risk))

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        limits = [budget.clamp(max=own) for own in self.limits]
        whole = self.ask(memory, BASE, state, limits[BASE])
        memory.marks = marks_of(whole)
        remaining = [memory.worth.staying(marks, above) for marks, above in zip(memory.marks, whole.tree, strict=True)]
        draft = self.join(
            memory, BASE, Draft.empty(len(state.rows), state.device), whole.only(remaining), budget, state.seeded
        )
        has_room = torch.tensor([size < most for size, most in zip(draft.live, budget.tolist(), strict=True)])
        found = self.ask(memory, RETRIEVER, state, limits[RETRIEVER] * has_room)
        return self.join(memory, RETRIEVER, draft, found, budget, state.seeded)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        (nodes, paths), _ = self.tell(memory, state, draft, accepted, scores)
        # a slot that ended inside its block did not show what it would have accepted
        slots = [b for b, token in enumerate(accepted.next_tokens) if token >= 0 and nodes[b]]
        memory.worth.learn([(memory.marks[b][n], n in paths[b]) for b in slots for n in nodes[b]])
        memory.marks = []


Mark = tuple[int, int]
"""A node's depth, and its score in half powers of 1/2: 0 is likely, `BINS` - 1 is hardly possible."""
BINS = 25


def marks_of(draft: Draft) -> list[list[Mark]]:
    """Marks of a draft's live nodes, known before they are drawn; where there is no score, the depth is the node's
    number."""
    known = draft.confidence
    if known is None:
        if draft.q is None:
            return [[(n, 0) for n in range(size)] for size in draft.live]
        known = draft.q.amax(-1)  # of the distribution it was drawn from, whichever token was
    logs = known.float().nan_to_num(1.0).clamp(2.0**-BINS, 1.0).log2().tolist()
    found = []
    for parents, size, row in zip(draft.tree, draft.live, logs, strict=True):
        marks: list[Mark] = []
        scores: list[float] = []
        for n in range(size):
            depth, score = (marks[parents[n]][0] + 1, scores[parents[n]]) if parents[n] >= 0 else (0, 0.0)
            scores.append(score + row[n])
            marks.append((depth, min(BINS - 1, int(-2 * scores[-1]))))
        found.append(marks)
    return found


class Worth:
    """How often nodes of each depth and score were accepted, and the scores below which they are cut."""

    EXPLORE = 16
    """Steps between two that cut nothing."""
    WINDOW = 2048.0
    """Tests of a depth and score after which counts have faded to 1/e."""

    def __init__(self, risk: float):
        self.risk = risk
        self.num_steps = 0
        self.tests, self.accepted = (defaultdict[int, list[float]](lambda: [0.0] * BINS) for _ in range(2))
        self.first_cut: dict[int, int] = {}
        """By depth: the first bin that is cut."""

    def staying(self, marks: Sequence[Mark], parents: Sequence[int]) -> list[int]:
        """The nodes that are verified, with all nodes above them."""
        if self.num_steps % self.EXPLORE == 0:
            return list(range(len(marks)))
        staying = [-1]
        for n, (depth, score) in enumerate(marks):
            if parents[n] in staying and score < self.first_cut.get(depth, BINS):
                staying.append(n)
        return staying[1:]

    def learn(self, nodes: Sequence[tuple[Mark, bool]]) -> None:
        """Marks of verified nodes, and whether each was accepted."""
        self.num_steps += 1
        fade = 1 - 1 / self.WINDOW
        for (depth, score), was_accepted in nodes:
            self.tests[depth][score] = fade * self.tests[depth][score] + 1
            self.accepted[depth][score] = fade * self.accepted[depth][score] + was_accepted
        for depth in {depth for (depth, _), _ in nodes}:
            self.first_cut[depth] = self._lowest_cut(depth)

    def _lowest_cut(self, depth: int) -> int:
        """The first bin from which on nodes are accepted at most `risk` of the time; one more accepted node is
        assumed."""
        cumulative = (accumulate(reversed(counts[depth])) for counts in (self.tests, self.accepted))
        shares = [(accepted + 1) / (tests + 1) for tests, accepted in zip(*cumulative, strict=True)]
        return min((BINS - 1 - n for n, share in enumerate(shares) if share <= self.risk), default=BINS)


def build(config: Config, target: Target, load: Load | None = None) -> Graft:
    """A graft for this target.  load: opens checkpoints, as `outrider.load_drafter` does."""
    base, retriever = (built(choice, target, load) for choice in (config.base, config.retriever))
    return Graft(base, retriever, config)
