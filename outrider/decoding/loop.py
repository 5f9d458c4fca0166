"""The loop: draft, verify, accept, commit, observe.  A single prompt, a benchmark and a server all call this `step`."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Policy, Target
from outrider.decoding.state import DecodeState, Timing


class StepRunner(Protocol):
    """A faster implementation of `step`, for requests that allow it.  It keeps a slot's state from the slot's first
    step until `free`, or until `leave`, after which `step` continues."""

    cache: Any
    """The target's cache, shared with `step`."""
    memory: Any
    """The drafter's memory, shared with `step`."""
    drafts: bool
    """Whether its steps draft.  If not, every step is plain and allowed whatever the policy's budget."""

    def prepare(self, state: DecodeState) -> bool:
        """Whether it can step these live slots.  Puts slots for which it has no draft yet into `state.undrafted`."""

    def step(
        self, policy: Policy, state: DecodeState, budget: Sequence[int]
    ) -> tuple[Accepted, Mapping[int, Exception]]:  # fmt: skip
        """As `step`."""

    def leave(self, state: DecodeState) -> None: ...
    def free(self, rows: Sequence[int]) -> None: ...
    def renew(self) -> None: ...
    def end(self) -> None: ...


def step(
    target: Target, drafter: Drafter, policy: Policy, cache: Cache, memory: Any, state: DecodeState,
    budget: Sequence[int] | None = None,
) -> tuple[Accepted, Mapping[int, Exception]]:  # fmt: skip
    """Advance every live slot by one verified step.  budget [B]: most nodes per slot; default `draft_budget`.

    Returns what was committed, in the order of `state.rows`, and an error for each slot whose tokens can't be used."""
    if budget is None:
        budget = draft_budget(target, drafter, policy, state)
    timing, rows = state.timing, state.rows
    draft = propose(target, drafter, policy, memory, state, budget)
    probe = drafter.probe(memory, state, draft) if drafter.probe_rows else None
    timing.lap("draft")
    scores = target.verify(cache, rows, state.anchor, draft, drafter.taps, probe)
    timing.lap("verify")
    accepted = state.commit(draft, state.judge(draft, scores, state))
    errors = state.judge.observe(accepted, [state.tokens[row] for row in rows], scores)
    # the last committed node becomes the anchor of a cut slot, and the anchor is never in the cache
    committed = zip(accepted.paths, accepted.next_tokens, strict=True)
    cache.keep([path if next_token >= 0 else path[:-1] for path, next_token in committed])
    timing.lap("other")
    drafter.observe(memory, state, draft, accepted, scores)
    timing.lap("draft")
    policy.observe(state, draft.sizes, accepted, timing)
    timing.lap("other")
    return accepted, errors


def draft_budget(target: Target, drafter: Drafter, policy: Policy, state: DecodeState) -> list[int]:
    """Maximum number of nodes of each live slot in the next step: limited by the policy, the slot's room and the
    drafter."""
    state.timing = Timing()
    if not drafter.limit or target.spec.mode == "off":
        return [0] * len(state.rows)
    budget = policy.budget(state).tolist()
    rooms = state.room
    budget = [max(0, min(nodes, room, drafter.limit)) for nodes, room in zip(budget, rooms, strict=True)]
    if any(room > 0 for room in rooms):  # otherwise every text is at its last token, whatever the policy's budget is
        state.is_drafting = any(budget)
    return budget


def propose(
    target: Target, drafter: Drafter, policy: Policy, memory: Any, state: DecodeState, budget: Sequence[int]
) -> Draft:  # fmt: skip
    """The draft, limited by the budget, the policy and what the target can verify.

    Pruning comes last: its result depends on the drawn tokens, and no policy may depend on them."""
    if not any(budget):
        return Draft.empty(len(state.rows), state.device)
    most = torch.tensor(budget)
    draft = Draft.checked(drafter.propose(memory, state, most), len(state.rows))
    if target.spec.mode == "chain":
        draft = draft.trunk()
    confidence = draft.confidence if drafter.confidence_before_draw else None
    draft = draft.first(policy.keep(state, draft.sizes, confidence)).first(most)
    return state.judge.prune(draft, state.seeded, target.spec.vocabulary)
