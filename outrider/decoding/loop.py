"""The loop: draft, verify, accept, commit, observe.  One prompt, a benchmark and a hundred users use the same
`step`."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Policy, Target
from outrider.decoding.state import DecodeState, Timing


class StepRunner(Protocol):
    """Takes steps in a faster way than `step`, where requests allow it.  It holds what it knows of a slot from the
    slot's first step in it until `free`, or until `leave`, after which `step` goes on."""

    cache: Any
    """The target's cache, and the drafter's memory, which both ways share."""
    memory: Any
    drafts: bool
    """Whether its steps draft; else every step is plain, and may be taken whatever a policy wants."""

    def prepare(self, state: DecodeState) -> bool:
        """Whether it can take a step of these live slots.  Slots for which it has no draft are in `state.undrafted`
        afterwards."""

    def step(
        self, policy: Policy, state: DecodeState, wanted: Sequence[int]
    ) -> tuple[Accepted, Mapping[int, Exception]]:  # fmt: skip
        """As `step`."""

    def leave(self, state: DecodeState) -> None: ...
    def free(self, rows: Sequence[int]) -> None: ...
    def renew(self) -> None: ...
    def end(self) -> None: ...


def step(
    target: Target, drafter: Drafter, policy: Policy, cache: Cache, memory: Any, state: DecodeState,
    wanted: Sequence[int] | None = None,
) -> tuple[Accepted, Mapping[int, Exception]]:  # fmt: skip
    """Advance every live slot by one verified step.  wanted [B]: most nodes of each, as `nodes_wanted` says unless
    given.

    Returns what was committed, slots in the order of `state.rows`, and by slot why its tokens can't be used."""
    if wanted is None:
        wanted = nodes_wanted(target, drafter, policy, state)
    timing, rows = state.timing, state.rows
    draft = propose(target, drafter, policy, memory, state, wanted)
    probe = drafter.probe(memory, state, draft) if drafter.probe_rows else None
    timing.lap("draft")
    scores = target.verify(cache, rows, state.anchor, draft, drafter.taps, probe)
    timing.lap("verify")
    accepted = state.commit(draft, state.judge(draft, scores, state))
    errors = state.judge.observe(accepted, [state.tokens[row] for row in rows], scores)
    # where a slot was cut, its last node is the anchor again, which is not in the cache
    ended = zip(accepted.paths, accepted.next_tokens, strict=True)
    cache.keep([path if following >= 0 else path[:-1] for path, following in ended])
    timing.lap("other")
    drafter.observe(memory, state, draft, accepted, scores)
    timing.lap("draft")
    policy.observe(state, draft.sizes, accepted, timing)
    timing.lap("other")
    return accepted, errors


def nodes_wanted(target: Target, drafter: Drafter, policy: Policy, state: DecodeState) -> list[int]:
    """Most nodes of each live slot in the step that begins: by the policy, the remaining room and the drafter."""
    state.timing = Timing()
    if not drafter.limit or target.spec.mode == "off":
        return [0] * len(state.rows)
    budget, rooms = policy.budget(state).tolist(), state.room
    most = [max(0, min(own, room, drafter.limit)) for own, room in zip(budget, rooms, strict=True)]
    if any(room > 0 for room in rooms):  # else texts are at their last token, whatever the policy wants
        state.is_drafting = any(most)
    return most


def propose(
    target: Target, drafter: Drafter, policy: Policy, memory: Any, state: DecodeState, wanted: Sequence[int]
) -> Draft:  # fmt: skip
    """The draft, of at most so many nodes, those that the policy keeps and the target can verify.

    Pruning is last: its result depends on the drawn tokens, and no policy may depend on them."""
    if not any(wanted):
        return Draft.empty(len(state.rows), state.device)
    draft = Draft.checked(drafter.propose(memory, state, budget := torch.tensor(wanted)), len(state.rows))
    if target.spec.mode == "chain":
        draft = draft.trunk()
    confidence = draft.confidence if drafter.confidence_before_draw else None
    draft = draft.first(policy.keep(state, draft.sizes, confidence)).first(budget)
    return state.judge.prune(draft, state.seeded, target.spec.vocabulary)
