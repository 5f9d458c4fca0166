"""The loop that all of this exists for: draft, verify, accept, commit, observe.

Decoding one prompt, scoring a benchmark and serving a hundred users are the same `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decoding import logprobs
from outrider.decoding.accept import Kept, Verdict, accept, accept_greedy, refuse_other_vocabulary
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Drafter, Scores, Target
from outrider.decoding.penalties import emitting_rows, processed, refuse_dead_ends
from outrider.decoding.policy import Policy
from outrider.decoding.prune import pruned
from outrider.decoding.sampling import Streams, distribution
from outrider.decoding.state import DecodeState
from outrider.decoding.twins import accept_chain
from outrider.errors import ConfigError, TargetError

Rule = Callable[[Draft, Tensor, Streams], Verdict]


def step(
    target: Target, drafter: Drafter, policy: Policy, cache: Cache, memory: Any, state: DecodeState, rule: Rule = accept,
    shared_noise: bool = True,
) -> Kept:  # fmt: skip
    """Advance every live slot by one verified step.  Returns what was committed, slots in the order of `state.rows`.

    `rule` is the law or a twin of it.  Where every slot is greedy the law's greedy twin reads the logits themselves.
    shared_noise: a slot with a seed drafts with the target's noise and emits the target's own draws, whatever was drafted;
    without, its seed fixes the noise and no more, and its drafts are judged by their q as those of slots without a seed are.
    """
    state.shares_noise = shared_noise
    timing, rows = state.timing, state.rows
    timing.start()
    draft = _proposal(target, drafter, policy, memory, state)
    timing.lap("draft")
    scores = target.verify(cache, rows, state.anchor, draft, drafter.taps)
    timing.lap("verify")
    law = _law(draft, scores, state, rule)
    kept = state.commit(draft, _judge(draft, law, state, rule))
    _refuse_no_numbers(scores, law, kept, state)
    _report(law, kept, state)
    # where a slot was cut its last node is the anchor again, not yet in the cache
    cache.keep([path if following >= 0 else path[:-1] for path, following in zip(kept.paths, kept.next_tokens, strict=True)])
    timing.lap("other")
    drafter.observe(memory, state, draft, kept, scores)
    timing.lap("draft")
    policy.observe(state, draft.sizes, kept, timing)
    timing.lap("other")
    return kept


def _proposal(target: Target, drafter: Drafter, policy: Policy, memory: Any, state: DecodeState) -> Draft:
    """What the drafter offers, within the policy's budget, the room that is left and what the target can verify.

    Its shape is checked, not trusted.  What can't be kept by the tokens before it is pruned last.
    """
    if not drafter.limit or target.spec.mode == "off":
        return Draft.empty(len(state.rows), state.device)
    wanted = zip(policy.budget(state).tolist(), state.left, strict=True)
    budget = torch.tensor([max(0, min(own, left - 1, drafter.limit)) for own, left in wanted])
    if not max(budget.tolist()):
        return Draft.empty(len(state.rows), state.device)
    draft = drafter.propose(memory, state, budget).checked(len(state.rows))
    if target.spec.mode == "chain":
        draft = draft.trunk()
    draft = draft.first(policy.keep(state, draft.sizes, draft.confidence)).first(budget)
    return pruned(draft, state.prefixes, state.seeded, target.spec.vocabulary)


class _Law(NamedTuple):
    """What the target says of every row, each on its own prefix."""

    logits: Tensor
    """[B, N+1, V], after penalties, bans and processors."""
    p: Tensor | None
    """[B, N+1, V]; None where every slot is greedy and the logits are enough."""
    choice: Tensor | None
    """[B, N+1], the likeliest ids, where every slot is greedy."""


def _law(draft: Draft, scores: Scores, state: DecodeState, rule: Rule) -> _Law:
    logits = processed(scores.logits, draft, state.prefixes)
    if not (state.settings.is_greedy and rule is accept):
        return _Law(logits, distribution(logits, state.settings), None)
    is_known = scores.choice is not None and logits is scores.logits
    return _Law(logits, None, scores.choice if is_known else logits.argmax(-1))


def _refuse_no_numbers(scores: Scores, law: _Law, kept: Kept, state: DecodeState) -> None:
    """Raise TargetError where a token was committed by logits that are no numbers, ConfigError where a setting made them so.

    Looks at the largest logit of every row, which is NaN where any is.
    """
    best = law.logits.amax(-1) if law.choice is None else law.logits.gather(-1, law.choice.unsqueeze(-1))[..., 0]
    if bool(best.isfinite().all()):
        return
    forbids = {b for b, prefix in state.prefixes if prefix.sampling.forbids}
    for b, row in enumerate(state.rows):
        for at in emitting_rows(kept, b):  # what stands behind a rejected token may be anything
            value = float(best[b, at])
            if math.isfinite(value) or (value == -math.inf and b in forbids):
                continue
            where = f"behind {len(state.tokens[row]) - len(emitting_rows(kept, b))} or more tokens"
            if math.isfinite(float(scores.logits[b, at].amax())):
                raise ConfigError(f"a penalty, logit_bias or a processor makes a logit {value} {where}; choose a smaller one")
            raise TargetError(
                f"the target's logits are {value} {where}, so no token follows; load it in float32 or bfloat16, since float16 "
                "overflows, and look for weights that are not finite"
            )


def _judge(draft: Draft, law: _Law, state: DecodeState, rule: Rule) -> Kept:
    if law.p is None:
        assert law.choice is not None
        return accept_greedy(draft, law.choice, law.logits.shape[-1])
    streams, seeded = state.streams, state.seeded
    if rule is accept and not draft.branches:
        rule = accept_chain  # the law token for token, without a loop over nodes
    if seeded is None or draft.q is None:
        return rule(draft, law.p, streams).kept()
    refuse_other_vocabulary(draft, law.p.shape[-1])
    matched = rule(replace(draft, q=None), law.p, streams)
    return (matched if bool(seeded.all()) else _merged(seeded, matched, rule(draft, law.p, streams))).kept()


def _merged(which: Tensor, one: Verdict, other: Verdict) -> Verdict:
    """The first verdict for the slots of `which` [B], the second for the rest."""
    width = max(one.path.shape[1], other.path.shape[1])
    wide, wider = (F.pad(verdict.path, (0, width - verdict.path.shape[1]), value=-1) for verdict in (one, other))
    rest = (torch.where(which, a, b) for a, b in zip(one[1:], other[1:], strict=True))
    return Verdict(torch.where(which[:, None], wide, wider), *rest)


def _report(law: _Law, kept: Kept, state: DecodeState) -> None:
    """Log probabilities of what was committed, for the slots that ask; and an error where a slot had nothing left to say."""
    if state.prefixes:
        refuse_dead_ends(law.logits, kept, state.prefixes)
    if not state.wants_logprobs:
        return
    for b, row in enumerate(state.rows):
        sampling = state.requests[row].sampling
        if sampling.logprobs is None:
            continue
        rows = emitting_rows(kept, b)
        if law.p is None or sampling.temperature == 0:
            logits = law.logits[b, rows]
            found = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        else:
            found = law.p[b, rows].log()
        state.logprobs[row] += logprobs.read(found, state.tokens[row][-len(rows) :], sampling.logprobs)
