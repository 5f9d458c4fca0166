"""Mix: several drafters, one draft.  Their trees are joined; how many nodes each may offer depends on what was
accepted.

`share: bandit` splits every slot's nodes again in each step.  An arm is the n-th node of a member, its reward 1 where
the node is accepted; the arms with the highest upper confidence bounds are played, of each member the first ones.  That
is CombUCB1 with semi-bandit feedback, whose regret after T steps is O(sqrt(nodes * arms * T log T)) accepted nodes
(Kveton et al. 1410.0949) at `explore` 1, while probabilities are constant and do not depend on what others offer.

Differs from the paper: counts fade, since texts change (discounted UCB, Garivier and Moulines 0805.3415: sqrt(T log T)
becomes sqrt(T changes) log T for an arm), and `explore` is smaller by default, for which no bound is shown: requests
are short.

`share: request` gives a request's nodes to one member, from its first step to its last: the one it names, or the one
with most accepted for its tenant and its kind of text (code, math or chat), by UCB1 over steps (regret O(log T / gap),
Auer, Cesa-Bianchi and Fischer 2002).

All of this depends on earlier steps alone, each member has its own q, and members draw independently: the output is
exact.

Take it where requests are of several kinds, or where verifying more nodes costs little: more is accepted than of its
best member, and every member takes its own time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.drafters import Choice, Load, built
from outrider.nn.drafting.ensemble import Ensemble, EnsembleMemory
from outrider.policies.shares import Shares
from outrider.retrieval.tenants import ByTenant
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["mix"] = "mix"
    members: tuple[Choice, ...] = Field(
        default=({"kind": "ngram"}, {"kind": "recycle"}), min_length=1, validate_default=True
    )
    """Drafters: kinds with their settings, or folders of checkpoints.  Nodes that one leaves unused go to the next."""
    share: Literal["bandit", "request"] = "bandit"
    """Who may draft how many nodes: `bandit`, all members, by what was accepted so far; `request`, one member per
    request."""
    nodes: PositiveInt = 16
    """Most nodes per step, of all members together."""
    explore: NonNegativeFloat = 0.1
    """Weight of the confidence bound; 0 trusts what was accepted so far, 1 explores most."""


@dataclass(kw_only=True)
class Memory(EnsembleMemory):
    """The members' memories, and how much of each was accepted."""

    shares: list[Shares]
    """One bandit per slot; it ends with its request."""
    serving: dict[int, int] = field(default_factory=dict)
    """Slot to the member that its request was given to."""
    alike: dict[int, str] = field(default_factory=dict)
    """Slot to its request's group: tenant and kind of text."""
    asked: list[int] = field(default_factory=list)
    """Nodes that each live slot may have in the step that is open; none where no draft was asked for."""


class Mix(Ensemble):
    """Asks its members one after another and joins what they propose."""

    def __init__(self, drafters: Sequence[Drafter], names: Sequence[str], config: Config):
        super().__init__(drafters, min(config.nodes, sum(drafter.limit for drafter in drafters)))
        self.learns = self.learns or config.share == "request"
        self.names, self.config = list(names), config
        self.tallies = ByTenant(lambda: Tally(len(self.names), config.explore), TENANTS)
        """By tenant and kind of text: how much of each member was accepted."""

    def allocate(self, cache: Cache) -> Memory:
        return Memory(**vars(super().allocate(cache)), shares=[self._new_shares() for _ in range(cache.slots)])

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        memory.asked = budget.tolist()
        shares = [self._split(memory, state, row, most) for row, most in zip(state.rows, memory.asked, strict=True)]
        draft, most = Draft.empty(len(state.rows), state.device), [0] * len(shares)
        for part, limit in enumerate(self.limits):
            most = [sofar + share[part] for sofar, share in zip(most, shares, strict=True)]
            asked = [max(0, min(all - size, limit)) for all, size in zip(most, draft.live, strict=True)]
            if self.config.share == "request":
                asked = [own if share[part] else 0 for own, share in zip(asked, shares, strict=True)]
            found = self.ask(memory, part, state, torch.tensor(asked))
            draft = self.join(memory, part, draft, found, torch.tensor(most), state.seeded)
        return draft

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        found = self.tell(memory, state, draft, accepted, scores)
        for b, (row, asked) in enumerate(zip(state.rows, memory.asked, strict=False)):
            # a slot that ended inside its block did not show what it would have accepted
            if not asked or accepted.next_tokens[b] < 0:
                continue
            if self.config.share == "request":
                self.tallies.of(memory.alike[row]).learn(memory.serving[row], len(accepted.paths[b]) / self.limit)
            else:
                memory.shares[row].learn(
                    [list(positions[b]) for positions, _ in found], [paths[b] for _, paths in found]
                )
        memory.asked = []

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        for row in rows:
            memory.shares[row] = self._new_shares()
            memory.serving.pop(row, None)
            memory.alike.pop(row, None)

    def _new_shares(self) -> Shares:
        return Shares(self.limits, self.config.explore)

    def _split(self, memory: Memory, state: DecodeState, row: int, most: int) -> list[int]:
        """How many nodes each member may offer."""
        if self.config.share == "bandit":
            return memory.shares[row].split(most)
        if row not in memory.serving:
            request = state.requests[row]
            memory.alike[row] = f"{request.tenant}\0{_kind(request)}"
            memory.serving[row] = self._chosen(memory, state, row)
        return [most if part == memory.serving[row] else 0 for part in range(len(self.names))]

    def _chosen(self, memory: Memory, state: DecodeState, row: int) -> int:
        """The member that a request names, or else the most promising for its group."""
        name = state.requests[row].drafter
        if name in self.names:
            return self.names.index(name)
        if name:
            known = ", ".join(self.names)
            logging.getLogger(__name__).warning(
                "a request asks for drafter %r, which mix does not have; it has %s", name, known
            )
        same = [part for other, part in memory.serving.items() if memory.alike[other] == memory.alike[row]]
        return self.tallies.of(memory.alike[row]).best([same.count(part) for part in range(len(self.names))])


TENANTS = 1024
"""Most tallies; the least recently used is removed first."""


class Tally:
    """How much of each member was accepted, as a share of the nodes that a step may have."""

    def __init__(self, count: int, explore: float):
        self.explore = explore
        self.accepted, self.steps = [0.0] * count, [0] * count

    def learn(self, part: int, accepted: float) -> None:
        self.accepted[part] += accepted
        self.steps[part] += 1

    def best(self, serving: Sequence[int]) -> int:
        """The member with the highest bound.  serving: requests each has now; one counts as a step with the mean
        acceptance."""
        total = sum(self.steps) + sum(serving)

        def bound(part: int) -> float:
            tries = self.steps[part] + serving[part]
            if not tries:
                return math.inf
            mean = self.accepted[part] / max(self.steps[part], 1)
            return mean + self.explore * math.sqrt(2 * math.log(1 + total) / tries)

        return max(range(len(self.steps)), key=bound)


def _kind(request: Request) -> Literal["code", "math", "chat"]:
    tail = request.prompt[-512:]
    return kind_of("" if request.detokenizer is None else request.detokenizer.decode(tail))


def kind_of(text: str) -> Literal["code", "math", "chat"]:
    """What a prompt looks like, by its characters: crude, and good enough to group requests that are likely to be
    similar."""
    signs = sum(text.count(sign) for sign in "{}[]()=;_")
    digits = sum(character.isdigit() for character in text) + 4 * (text.count("\\") + text.count("$"))
    if signs > max(len(text) / 16, digits):
        return "code"
    return "math" if digits > len(text) / 16 else "chat"


def build(config: Config, target: Target, load: Load | None = None) -> Mix:
    """load: what opens checkpoints among the members."""
    names = [choice if isinstance(choice, str) else choice["kind"] for choice in config.members]
    return Mix([built(choice, target, load) for choice in config.members], names, config)
