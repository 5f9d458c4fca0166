"""Graft: cut the unlikely nodes of a drafter, and verify nodes from a text index instead.  (arXiv 2605.20104.)

A node's score is the product of confidences along its path.  Nodes below a threshold are cut with their descendants,
and a retriever fills their place, so that the number of verified nodes stays the same.  The threshold of every depth is
measured while decoding: the largest below which nodes were accepted at most `risk` of the time.  Every 16th step cuts
nothing, to keep measuring.  A base that draws a chain token by token stops before its first cut node.

Retrieved nodes are attached under the anchor and under the tip, the last node of the path of first children, after
which the retriever looks up again.  A bandit splits the nodes between the two by their acceptance (`policies.shares`).

The output is exact because confidences are known before the tokens are drawn: whether a node stays depends on the
tokens above it and on earlier steps, never on its own token.  In a stopped chain, the confidence is the probability of
the likeliest token before the draw.  Without confidences, it is the probability of the likeliest token of the node's q,
whichever was drawn; deterministic nodes without confidences differ only by their position in the draft.  Retrieved
nodes are deterministic and come after drawn siblings, so they may depend on drafted tokens.

Differs from the paper: trees and blocks of one pass are drafted whole before they are cut; and nodes under the tip, as
the paper looks up only at the anchor.

Use it if verifying more nodes is free.  On two cores its acceptance was higher, but decoding was not faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.drafters import Choice, Load, built
from outrider.nn.drafting.ensemble import Ensemble, EnsembleMemory
from outrider.policies.merge import merged
from outrider.policies.shares import Shares
from outrider.targets.protocol import Target

BASE, RETRIEVER = 0, 1


class Config(Base):
    REMOVED: ClassVar[Mapping[str, str]] = {"under": "leave it out: nodes are attached where they were accepted most"}
    kind: Literal["graft"] = "graft"
    base: Choice = Field(default={"kind": "ngram"}, validate_default=True)
    """The drafter whose draft is cut: a kind with its settings, or the folder of a checkpoint."""
    retriever: Choice = Field(default={"kind": "recycle"}, validate_default=True)
    """The drafter that replaces cut nodes: a kind with its settings."""
    risk: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Nodes are cut if such nodes were accepted at most this often, 0 to 1; 0 cuts nothing and only fills unused
    places."""
    nodes: PositiveInt | None = None
    """Most nodes verified; by default as many as the base proposes."""


@dataclass(kw_only=True)
class Memory(EnsembleMemory):
    """The memories of base and retriever, and how often nodes of each score were accepted, over all slots."""

    worth: Worth
    shares: list[Shares]
    """One bandit per slot, between tip and anchor, for the current request."""
    marks: list[list[Mark]] = field(default_factory=list)
    """Marks of the base's nodes in the current step."""
    retrieved: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """By slot, in the current step: numbers of the nodes under the tip, and under the anchor."""


class Graft(Ensemble):
    """A base drafter, pruned, and a retriever."""

    def __init__(self, base: Drafter, retriever: Drafter, config: Config):
        super().__init__([base, retriever], config.nodes or base.limit)
        self.config = config

    def allocate(self, cache: Cache) -> Memory:
        shares = [self._new_shares() for _ in range(cache.slots)]
        return Memory(**vars(super().allocate(cache)), worth=Worth(self.config.risk), shares=shares)

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        draft = self._cut(memory, state, budget)
        cut = draft.live
        draft = self._under_tip(memory, state, draft, budget)
        tips = draft.live
        has_room = torch.tensor([size < most for size, most in zip(tips, budget.tolist(), strict=True)])
        retrieved = self.ask(memory, RETRIEVER, state, budget.clamp(max=self.limits[RETRIEVER]) * has_room)
        draft = self.join(memory, RETRIEVER, draft, retrieved, budget, state.seeded)
        memory.retrieved = [
            (list(range(begin, middle)), list(range(middle, end)))
            for begin, middle, end in zip(cut, tips, draft.live, strict=True)
        ]
        return draft

    def _cut(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        """The base's draft without the cut nodes."""
        limit = budget.clamp(max=self.limits[BASE])
        ending = Ending(memory.worth, limit.tolist())
        whole = self.ask(memory, BASE, state, limit, ending)
        marks = ending.marks if ending.was_asked else marks_of(whole)
        memory.marks = [node_marks[:size] for node_marks, size in zip(marks, whole.live, strict=True)]
        remaining = [
            memory.worth.staying(node_marks, parents)
            for node_marks, parents in zip(memory.marks, whole.tree, strict=True)
        ]
        nothing = Draft.empty(len(state.rows), state.device)
        return self.join(memory, BASE, nothing, whole.only(remaining), budget, state.seeded)

    def _under_tip(self, memory: Memory, state: DecodeState, draft: Draft, budget: Tensor) -> Draft:
        """The draft with nodes retrieved after its path of first children; they belong to no part."""
        tips = [draft.first_children(b) for b in range(len(state.rows))]
        most = [
            memory.shares[row].split(room)[TIP] if tip else 0
            for row, tip, room in zip(state.rows, tips, (budget - draft.sizes).tolist(), strict=True)
        ]
        if not any(most):
            return draft
        paths = [[draft.ids[b][n] for n in tip] for b, tip in enumerate(tips)]
        retrieved = self.drafters[RETRIEVER].look_up(memory.parts[RETRIEVER], state, paths, torch.tensor(most))
        if retrieved is None or not any(retrieved.live):
            return draft
        ids = [[*path, *retrieved.ids[b][: retrieved.live[b]]] for b, path in enumerate(paths)]
        parents = [
            [*range(-1, len(path) - 1), *(len(path) + n if n >= 0 else len(path) - 1 for n in retrieved.tree[b][:size])]
            for b, (path, size) in enumerate(zip(paths, retrieved.live, strict=True))
        ]
        sizes, device = torch.tensor([len(tokens) for tokens in ids]), state.device
        hung = Draft(padded(ids, 0, device), padded(parents, -1, device), sizes)
        return merged(draft, hung, draft.sizes + torch.tensor(most))[0]

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        (nodes, paths), _ = self.tell(memory, state, draft, accepted, scores)
        # for a slot that ended within its draft, the acceptance of later nodes is unknown
        slots = [b for b, token in enumerate(accepted.next_tokens) if token >= 0]
        memory.worth.learn([(memory.marks[b][n], n in paths[b]) for b in slots for n in nodes[b]])
        for b in slots if memory.retrieved else []:
            numbers = range(draft.live[b]) if draft.origin is None else draft.origin[b, : draft.live[b]].tolist()
            at = {number: n for n, number in enumerate(numbers)}
            verified = [[number for number in part if number in at] for part in memory.retrieved[b]]
            memory.shares[state.rows[b]].learn(
                [list(range(len(part))) for part in verified],
                [[n for n, number in enumerate(part) if at[number] in accepted.paths[b]] for part in verified],
            )
        memory.marks, memory.retrieved = [], []

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        for row in rows:
            memory.shares[row] = self._new_shares()

    def _new_shares(self) -> Shares:
        return Shares([self.limit, self.limit])


TIP = 0
"""The part of `Shares` for nodes under the tip; the other is for those under the anchor."""
Mark = tuple[int, int]
"""A node's depth and its score as a bin: from 0, likely, in half powers of 1/2 to `BINS` - 1, very unlikely."""
BINS = 25


class Ending:
    """Ends a chain before the first node that would be cut; see `Stop`."""

    def __init__(self, worth: Worth, most: Sequence[int]):
        """most: most nodes of each slot."""
        self.worth, self.most = worth, most
        self.marks: list[list[Mark]] = [[] for _ in most]
        """Marks of all drafted nodes, by slot."""
        self.scores = [0.0] * len(most)
        self.live = [size > 0 for size in most]
        self.was_asked = False

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([len(marks) for marks in self.marks])

    def draws(self, sure: Tensor) -> bool:
        self.was_asked = True
        for b, log in enumerate(_logs(sure)):
            if self._goes_on(b):
                self.scores[b] += log
            if self._goes_on(b):
                self.marks[b].append(self._next(b))
            else:
                self.live[b] = False
        return any(self.live)

    def reads(self) -> bool:
        return any(map(self._goes_on, range(len(self.most))))

    def _goes_on(self, b: int) -> bool:
        """Whether a node after the last one would stay if its confidence were 1."""
        return self.live[b] and len(self.marks[b]) < self.most[b] and self.worth.stays(self._next(b))

    def _next(self, b: int) -> Mark:
        return len(self.marks[b]), _bin(self.scores[b])


def _logs(confidence: Tensor) -> list[Any]:
    """Logarithms to base 2; a missing confidence is 1."""
    return confidence.float().nan_to_num(1.0).clamp(2.0**-BINS, 1.0).log2().tolist()


def _bin(score: float) -> int:
    return min(BINS - 1, int(-2 * score))


def marks_of(draft: Draft) -> list[list[Mark]]:
    """Marks of a draft's live nodes, independent of their tokens.  Without scores, the depth is the node's number."""
    confidence = draft.confidence
    if confidence is None:
        if draft.q is None:
            return [[(n, 0) for n in range(size)] for size in draft.live]
        confidence = draft.q.amax(-1)  # of q, whichever token was drawn
    all_marks = []
    for parents, size, row in zip(draft.tree, draft.live, _logs(confidence), strict=True):
        marks: list[Mark] = []
        scores: list[float] = []
        for n in range(size):
            depth, score = (marks[parents[n]][0] + 1, scores[parents[n]]) if parents[n] >= 0 else (0, 0.0)
            scores.append(score + row[n])
            marks.append((depth, _bin(scores[-1])))
        all_marks.append(marks)
    return all_marks


class Worth:
    """How often nodes of each depth and score were accepted, and the scores below which they are cut."""

    EXPLORE = 16
    """Steps between two that cut nothing."""
    WINDOW = 2048.0
    """Tests of a depth and score after which counts have decayed to 1/e."""

    def __init__(self, risk: float):
        self.risk = risk
        self.num_steps = 0
        self.tests, self.accepted = (defaultdict[int, list[float]](lambda: [0.0] * BINS) for _ in range(2))
        self.first_cut: dict[int, int] = {}
        """By depth: the first bin that is cut."""

    def staying(self, marks: Sequence[Mark], parents: Sequence[int]) -> list[int]:
        """The nodes that stay: those whose ancestors all stay."""
        staying = [-1]
        for n, mark in enumerate(marks):
            if parents[n] in staying and self.stays(mark):
                staying.append(n)
        return staying[1:]

    def stays(self, mark: Mark) -> bool:
        """Whether a node of this depth and score stays if its ancestors do."""
        depth, score = mark
        return self.num_steps % self.EXPLORE == 0 or score < self.first_cut.get(depth, BINS)

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
        """The first bin from which on nodes are accepted at most `risk` of the time, with one accepted node added to
        the counts."""
        cumulative = (accumulate(reversed(counts[depth])) for counts in (self.tests, self.accepted))
        shares = [(accepted + 1) / (tests + 1) for tests, accepted in zip(*cumulative, strict=True)]
        return min((BINS - 1 - n for n, share in enumerate(shares) if share <= self.risk), default=BINS)


def build(config: Config, target: Target, load: Load | None = None) -> Graft:
    """A graft for this target.  load: opens checkpoints, as `outrider.load_drafter` does."""
    base, retriever = (built(choice, target, load) for choice in (config.base, config.retriever))
    return Graft(base, retriever, config)
