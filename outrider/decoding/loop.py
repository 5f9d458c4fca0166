"""The loop that all of this exists for: draft, verify, accept, commit, observe.

Decoding one prompt, scoring a benchmark and serving a hundred users are the same `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.accept import Verdict, accept, accept_greedy
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Drafter, Scores, Target
from outrider.decoding.policy import Policy
from outrider.decoding.sampling import Streams, distribution
from outrider.decoding.state import DecodeState

Rule = Callable[[Draft, Tensor, Streams], Verdict]


def step(
    target: Target, drafter: Drafter, policy: Policy, cache: Cache, memory: Any, state: DecodeState, rule: Rule = accept
) -> Verdict:
    """Advance every live slot by one verified step.  Returns what was committed, slots in the order `state.rows` had.

    `rule` is the law or a twin of it.  Where every slot is greedy the law's greedy twin reads the logits themselves.
    """
    timing, rows = state.timing, state.rows
    timing.start()
    draft = _proposal(drafter, policy, memory, state)
    timing.lap("draft")
    scores = target.verify(cache, rows, state.anchor, draft, drafter.taps)
    timing.lap("verify")
    verdict = state.commit(draft, _judge(draft, scores, state, rule))
    cache.keep(_cached(verdict))
    timing.lap("other")
    drafter.observe(memory, state, draft, verdict, scores)
    timing.lap("draft")
    policy.observe(state, draft.sizes, verdict, timing)
    timing.lap("other")
    return verdict


def _proposal(drafter: Drafter, policy: Policy, memory: Any, state: DecodeState) -> Draft:
    """What the drafter offers, within the policy's budget and the room that is left; its shape is checked, not trusted."""
    budget = torch.minimum(policy.budget(state), state.room).clamp(0, drafter.limit)
    if not budget.any():
        return Draft.empty(len(state.rows), state.device)
    draft = drafter.propose(memory, state, budget).checked(len(state.rows))
    keep = torch.minimum(policy.keep(state, draft.sizes, draft.confidence), budget)
    return draft.first(keep)


def _judge(draft: Draft, scores: Scores, state: DecodeState, rule: Rule) -> Verdict:
    if state.settings.is_greedy and rule is accept:
        return accept_greedy(draft, scores.logits.argmax(-1), scores.logits.shape[-1])
    return rule(draft, distribution(scores.logits, state.settings), state.streams)


def _cached(verdict: Verdict) -> Tensor:
    """The path without its last node where the slot was cut there: that node is the anchor again, not yet in the cache."""
    cut = (verdict.next_token < 0) & (verdict.accepted > 0)
    if not cut.any():
        return verdict.path
    path = verdict.path.clone()
    path[cut, verdict.accepted[cut] - 1] = -1
    return path
