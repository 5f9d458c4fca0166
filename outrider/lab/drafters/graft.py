"""Graft: cut the unlikely nodes of a drafter, and verify nodes of a text index instead.  (arXiv 2605.20104.)

A node's score is the product of confidences along its path.  Nodes below a threshold are cut together with their
descendants; a retriever fills the room, so that as many nodes are verified as before.  The threshold of every depth is
measured while decoding: the largest below which nodes were accepted at most `risk` of the time.  Every 16th step cuts
nothing, so that this stays known.  A base that draws a chain token by token is stopped at its first cut node, and makes
no pass for what would be cut.

Retrieved nodes hang in two places: under the anchor, and under the tip, the last node of the draft's eldest path, after
whose token the retriever looks up again.  A bandit splits the room between them by what was accepted
(`policies.shares`).

It is exact since a confidence is known before its node's token is drawn: whether a node stays depends on the tokens
above it and on earlier steps, never on its own token.  A drawn node is never cut for its probability.  The confidence
of a stopped chain's node is the probability of its likeliest token, known before the draw.  Where another draft has no
confidences, a drawn node's is the probability of its q's likeliest token, whichever was drawn; deterministic nodes
without confidences differ by their position in the draft alone.  Retrieved nodes are deterministic and younger than
drawn siblings, so they may depend on drafted tokens.

Differs from the paper: trees, and blocks that one pass gives, are drafted whole before they are cut; the tip, where the
paper looks up at the anchor alone.

Use it where verifying more nodes costs nothing; on two cores more was accepted, and no text was written sooner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal

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
    under: Literal["both", "anchor"] = "both"
    """Where retrieved nodes hang: under the anchor and the end of the draft's eldest path, or under the `anchor` alone,
    where those of a retriever that is no index of text hang in any case."""


@dataclass(kw_only=True)
class Memory(EnsembleMemory):
    """The memories of base and retriever, and how often nodes of each score were accepted, over all slots."""

    worth: Worth
    shares: list[Shares]
    """One bandit per slot, between tip and anchor; it ends with its request."""
    marks: list[list[Mark]] = field(default_factory=list)
    """Of the base's nodes, in the step that is open."""
    retrieved: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Of the step that is open, by slot: numbers of the nodes that hang under the tip, and under the anchor."""


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
        found = self.ask(memory, RETRIEVER, state, budget.clamp(max=self.limits[RETRIEVER]) * has_room)
        draft = self.join(memory, RETRIEVER, draft, found, budget, state.seeded)
        memory.retrieved = [
            (list(range(begin, middle)), list(range(middle, end)))
            for begin, middle, end in zip(cut, tips, draft.live, strict=True)
        ]
        return draft

    def _cut(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        """The base's nodes that stay."""
        limit = budget.clamp(max=self.limits[BASE])
        ending = Ending(memory.worth, limit.tolist())
        whole = self.ask(memory, BASE, state, limit, ending)
        marks = ending.marks if ending.was_asked else marks_of(whole)
        memory.marks = [own[:size] for own, size in zip(marks, whole.live, strict=True)]
        remaining = [memory.worth.staying(own, above) for own, above in zip(memory.marks, whole.tree, strict=True)]
        nothing = Draft.empty(len(state.rows), state.device)
        return self.join(memory, BASE, nothing, whole.only(remaining), budget, state.seeded)

    def _under_tip(self, memory: Memory, state: DecodeState, draft: Draft, budget: Tensor) -> Draft:
        """The draft, and what the retriever finds after its eldest path; no part has these nodes for its own."""
        tips = [draft.first_children(b) for b in range(len(state.rows))]
        most = [
            memory.shares[row].split(room)[TIP] if tip else 0
            for row, tip, room in zip(state.rows, tips, (budget - draft.sizes).tolist(), strict=True)
        ]
        if self.config.under == "anchor" or not any(most):
            return draft
        paths = [[draft.ids[b][n] for n in tip] for b, tip in enumerate(tips)]
        found = self.drafters[RETRIEVER].look_up(memory.parts[RETRIEVER], state, paths, torch.tensor(most))
        if found is None or not any(found.live):
            return draft
        ids = [[*path, *found.ids[b][: found.live[b]]] for b, path in enumerate(paths)]
        above = [
            [*range(-1, len(path) - 1), *(len(path) + n if n >= 0 else len(path) - 1 for n in found.tree[b][:size])]
            for b, (path, size) in enumerate(zip(paths, found.live, strict=True))
        ]
        sizes, device = torch.tensor([len(own) for own in ids]), state.device
        hung = Draft(padded(ids, 0, device), padded(above, -1, device), sizes)
        return merged(draft, hung, draft.sizes + torch.tensor(most))[0]

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        (nodes, paths), _ = self.tell(memory, state, draft, accepted, scores)
        # a slot that ended inside its block did not show what it would have accepted
        slots = [b for b, token in enumerate(accepted.next_tokens) if token >= 0]
        memory.worth.learn([(memory.marks[b][n], n in paths[b]) for b in slots for n in nodes[b]])
        for b in slots if memory.retrieved else []:
            numbers = range(draft.live[b]) if draft.origin is None else draft.origin[b, : draft.live[b]].tolist()
            at = {number: n for n, number in enumerate(numbers)}
            known = [[number for number in own if number in at] for own in memory.retrieved[b]]
            memory.shares[state.rows[b]].learn(
                [list(range(len(own))) for own in known],
                [[n for n, number in enumerate(own) if at[number] in accepted.paths[b]] for own in known],
            )
        memory.marks, memory.retrieved = [], []

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        for row in rows:
            memory.shares[row] = self._new_shares()

    def _new_shares(self) -> Shares:
        return Shares([self.limit, self.limit], EXPLORE)


TIP = 0
"""The part of `Shares` that hangs under the tip; the other one hangs under the anchor."""
EXPLORE = 0.1
"""Weight of the bandit's confidence bound, as `mix` has it."""
Mark = tuple[int, int]
"""A node's depth, and its score in half powers of 1/2: 0 is likely, `BINS` - 1 is hardly possible."""
BINS = 25


class Ending:
    """Ends a chain before the first node that would be cut; see `Stop`."""

    def __init__(self, worth: Worth, most: Sequence[int]):
        """most: nodes of each slot."""
        self.worth, self.most = worth, most
        self.marks: list[list[Mark]] = [[] for _ in most]
        """Of every node that was drafted."""
        self.scores = [0.0] * len(most)
        self.live = [size > 0 for size in most]
        self.was_asked = False

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([len(own) for own in self.marks])

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
        """Whether a node after the last one would stay, were its confidence 1."""
        return self.live[b] and len(self.marks[b]) < self.most[b] and self.worth.stays(self._next(b))

    def _next(self, b: int) -> Mark:
        return len(self.marks[b]), _bin(self.scores[b])


def _logs(confidence: Tensor) -> list[Any]:
    """Logarithms to base 2; a missing confidence is 1."""
    return confidence.float().nan_to_num(1.0).clamp(2.0**-BINS, 1.0).log2().tolist()


def _bin(score: float) -> int:
    return min(BINS - 1, int(-2 * score))


def marks_of(draft: Draft) -> list[list[Mark]]:
    """Marks of a draft's live nodes, known before they are drawn; where there is no score, the depth is the node's
    number."""
    known = draft.confidence
    if known is None:
        if draft.q is None:
            return [[(n, 0) for n in range(size)] for size in draft.live]
        known = draft.q.amax(-1)  # of the distribution it was drawn from, whichever token was
    found = []
    for parents, size, row in zip(draft.tree, draft.live, _logs(known), strict=True):
        marks: list[Mark] = []
        scores: list[float] = []
        for n in range(size):
            depth, score = (marks[parents[n]][0] + 1, scores[parents[n]]) if parents[n] >= 0 else (0, 0.0)
            scores.append(score + row[n])
            marks.append((depth, _bin(scores[-1])))
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
        staying = [-1]
        for n, mark in enumerate(marks):
            if parents[n] in staying and self.stays(mark):
                staying.append(n)
        return staying[1:]

    def stays(self, mark: Mark) -> bool:
        """Whether a node of this depth and score is verified, if those above it are."""
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
        """The first bin from which on nodes are accepted at most `risk` of the time; one more accepted node is
        assumed."""
        cumulative = (accumulate(reversed(counts[depth])) for counts in (self.tests, self.accepted))
        shares = [(accepted + 1) / (tests + 1) for tests, accepted in zip(*cumulative, strict=True)]
        return min((BINS - 1 - n for n, share in enumerate(shares) if share <= self.risk), default=BINS)


def build(config: Config, target: Target, load: Load | None = None) -> Graft:
    """A graft for this target.  load: opens checkpoints, as `outrider.load_drafter` does."""
    base, retriever = (built(choice, target, load) for choice in (config.base, config.retriever))
    return Graft(base, retriever, config)
