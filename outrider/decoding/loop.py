"""The loop: draft, verify, accept, commit, observe.  One prompt, a benchmark and a hundred users use the same
`step`."""

from collections.abc import Mapping
from typing import Any

import torch

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Policy, Target
from outrider.decoding.state import DecodeState, Timing


def step(
    target: Target, drafter: Drafter, policy: Policy, cache: Cache, memory: Any, state: DecodeState
) -> tuple[Accepted, Mapping[int, Exception]]:  # fmt: skip
    """Advance every live slot by one verified step.

    Returns what was committed, slots in the order of `state.rows`, and by slot why its tokens can't be used."""
    timing, rows = Timing(), state.rows
    state.timing = timing
    draft = propose(target, drafter, policy, memory, state)
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


def propose(target: Target, drafter: Drafter, policy: Policy, memory: Any, state: DecodeState) -> Draft:
    """The draft, within the policy's budget, the remaining room and what the target can verify.

    Pruning is last: its result depends on the drawn tokens, and no policy may depend on them."""
    nothing = Draft.empty(len(state.rows), state.device)
    if not drafter.limit or target.spec.mode == "off":
        return nothing
    wanted, rooms = policy.budget(state).tolist(), state.room
    most = [max(0, min(own, room, drafter.limit)) for own, room in zip(wanted, rooms, strict=True)]
    if any(room > 0 for room in rooms):  # else texts are at their last token, whatever the policy wants
        state.is_drafting = any(most)
    if not any(most):
        return nothing
    draft = Draft.checked(drafter.propose(memory, state, budget := torch.tensor(most)), len(state.rows))
    if target.spec.mode == "chain":
        draft = draft.trunk()
    confidence = draft.confidence if drafter.confidence_before_draw else None
    draft = draft.first(policy.keep(state, draft.sizes, confidence)).first(budget)
    return state.judge.prune(draft, state.seeded, target.spec.vocabulary)
