"""Mix: several drafters, one draft.  Their trees are merged; each member's number of nodes depends on its acceptance.

`share: bandit` splits every slot's nodes anew in each step.  An arm is the n-th node of a member, with reward 1 if the
node is accepted; the arms with the highest upper confidence bounds are played, always the first ones of each member.
This is CombUCB1 with semi-bandit feedback.  Its regret after T steps is O(sqrt(nodes * arms * T log T)) accepted nodes
(arXiv 1410.0949) at a weight of 1 of the bound, if probabilities are constant and do not depend on the other members.

Differs from the paper: counts are discounted, since texts change (discounted UCB, arXiv 0805.3415: sqrt(T log T)
becomes sqrt(T changes) log T for an arm), and the weight is 0.1, without a proven bound, since requests
are short.

`share: request` gives all nodes of a request to one member: the one that the request names, or the best one for its
tenant and kind of text (code, math or chat), by UCB1 over steps (regret O(log T / gap), Auer, Cesa-Bianchi and Fischer
2002).

The shares depend only on earlier steps, each member has its own q, and members draw independently, so the output is
exact.

Use it for several kinds of requests, or if verifying more nodes costs little: its acceptance is higher than that of its
best member, but every member costs its own time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.drafters import Choice, Load, built
from outrider.nn.drafting.ensemble import Ensemble, EnsembleMemory
from outrider.policies.shares import EXPLORE, Shares
from outrider.retrieval.tenants import ByTenant
from outrider.targets.protocol import Target


class Config(Base):
    REMOVED: ClassVar[Mapping[str, str]] = {"explore": "leave it out: every member is tried about as often as with 0.1"}
    kind: Literal["mix"] = "mix"
    members: tuple[Choice, ...] = Field(
        default=({"kind": "ngram"}, {"kind": "recycle"}), min_length=1, validate_default=True
    )
    """Drafters: kinds with their settings, or folders of checkpoints.  Nodes that one member does not use go to the
    next."""
    share: Literal["bandit", "request"] = "bandit"
    """How nodes are split: `bandit`, over all members by their acceptance so far; `request`, one member per request."""
    nodes: PositiveInt = 16
    """Maximum number of nodes per step, over all members."""


@dataclass(kw_only=True)
class Memory(EnsembleMemory):
    """The members' memories and their acceptance."""

    shares: list[Shares]
    """One bandit per slot, for the current request."""
    serving: dict[int, int] = field(default_factory=dict)
    """Slot → the member that drafts for its request."""
    groups: dict[int, str] = field(default_factory=dict)
    """Slot → its request's group: tenant and kind of text."""
    budgets: list[int] = field(default_factory=list)
    """Maximum number of nodes per live slot in the current step; empty if there is no draft."""


class Mix(Ensemble):
    """Merges the drafts of its members, one after another."""

    def __init__(self, drafters: Sequence[Drafter], names: Sequence[str], config: Config):
        super().__init__(drafters, min(config.nodes, sum(drafter.limit for drafter in drafters)))
        self.learns = self.learns or config.share == "request"
        self.names, self.config = list(names), config
        self.tallies = ByTenant(lambda: Tally(len(self.names)), TENANTS)
        """By tenant and kind of text: each member's acceptance."""

    def allocate(self, cache: Cache) -> Memory:
        return Memory(**vars(super().allocate(cache)), shares=[self._new_shares() for _ in range(cache.slots)])

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        memory.budgets = budget.tolist()
        shares = [self._split(memory, state, row, most) for row, most in zip(state.rows, memory.budgets, strict=True)]
        draft, most = Draft.empty(len(state.rows), state.device), [0] * len(shares)
        for part, limit in enumerate(self.limits):
            most = [sofar + share[part] for sofar, share in zip(most, shares, strict=True)]
            part_budget = [max(0, min(all - size, limit)) for all, size in zip(most, draft.live, strict=True)]
            if self.config.share == "request":
                part_budget = [size if share[part] else 0 for size, share in zip(part_budget, shares, strict=True)]
            part_draft = self.ask(memory, part, state, torch.tensor(part_budget))
            draft = self.join(memory, part, draft, part_draft, torch.tensor(most), state.seeded)
        return draft

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        outcomes = self.tell(memory, state, draft, accepted, scores)
        for b, (row, budget) in enumerate(zip(state.rows, memory.budgets, strict=False)):
            # for a slot that ended within its draft, the acceptance of later nodes is unknown
            if not budget or accepted.next_tokens[b] < 0:
                continue
            if self.config.share == "request":
                self.tallies.of(memory.groups[row]).learn(memory.serving[row], len(accepted.paths[b]) / self.limit)
            else:
                memory.shares[row].learn(
                    [list(positions[b]) for positions, _ in outcomes], [paths[b] for _, paths in outcomes]
                )
        memory.budgets = []

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        for row in rows:
            memory.shares[row] = self._new_shares()
            memory.serving.pop(row, None)
            memory.groups.pop(row, None)

    def _new_shares(self) -> Shares:
        return Shares(self.limits)

    def _split(self, memory: Memory, state: DecodeState, row: int, most: int) -> list[int]:
        """Maximum number of nodes of each member."""
        if self.config.share == "bandit":
            return memory.shares[row].split(most)
        if row not in memory.serving:
            request = state.requests[row]
            memory.groups[row] = f"{request.tenant}\0{_kind(request)}"
            memory.serving[row] = self._chosen(memory, state, row)
        return [most if part == memory.serving[row] else 0 for part in range(len(self.names))]

    def _chosen(self, memory: Memory, state: DecodeState, row: int) -> int:
        """The member that a request names, otherwise the most promising one for its group."""
        name = state.requests[row].drafter
        if name in self.names:
            return self.names.index(name)
        if name:
            names = ", ".join(self.names)
            logging.getLogger(__name__).warning(
                "a request names drafter %r, which is not a member of mix; members are %s", name, names
            )
        same = [part for other, part in memory.serving.items() if memory.groups[other] == memory.groups[row]]
        return self.tallies.of(memory.groups[row]).best([same.count(part) for part in range(len(self.names))])


TENANTS = 1024
"""Maximum number of tallies; the least recently used are removed."""


class Tally:
    """Each member's acceptance, as a share of the nodes of a step."""

    def __init__(self, count: int):
        self.accepted, self.steps = [0.0] * count, [0] * count

    def learn(self, part: int, accepted: float) -> None:
        self.accepted[part] += accepted
        self.steps[part] += 1

    def best(self, serving: Sequence[int]) -> int:
        """The member with the highest bound.  serving: each member's current requests, which count as one step each
        with the mean acceptance."""
        total = sum(self.steps) + sum(serving)

        def bound(part: int) -> float:
            tries = self.steps[part] + serving[part]
            if not tries:
                return math.inf
            mean = self.accepted[part] / max(self.steps[part], 1)
            return mean + EXPLORE * math.sqrt(2 * math.log(1 + total) / tries)

        return max(range(len(self.steps)), key=bound)


def _kind(request: Request) -> Literal["code", "math", "chat"]:
    tail = request.prompt[-512:]
    return kind_of("" if request.detokenizer is None else request.detokenizer.decode(tail))


def kind_of(text: str) -> Literal["code", "math", "chat"]:
    """The kind of a prompt, guessed from its characters: crude, but good enough to group similar requests."""
    signs = sum(text.count(sign) for sign in "{}[]()=;_")
    digits = sum(character.isdigit() for character in text) + 4 * (text.count("\\") + text.count("$"))
    if signs > max(len(text) / 16, digits):
        return "code"
    return "math" if digits > len(text) / 16 else "chat"


def build(config: Config, target: Target, load: Load | None = None) -> Mix:
    """load: loads members that are checkpoints."""
    names = [choice if isinstance(choice, str) else choice["kind"] for choice in config.members]
    return Mix([built(choice, target, load) for choice in config.members], names, config)
