"""The full judge keeps what the acceptance rule keeps, whichever way it takes, and reads no more than it must."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from decoding.drafts import V, drafts, streams_of
from hypothesis import given
from hypothesis import strategies as st
from sampling.chains import chains

from outrider.decoding.accept import accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 2},
    {"temperature": 1, "top_p": 0.8},
]
CHOICES = st.lists(st.integers(0, len(KINDS) - 1), min_size=4, max_size=4)


def judge_of(choices: Sequence[int]) -> SamplingJudge:
    """The judge of as many slots."""
    state = DecodeState(len(choices), 1000, judge=SamplingJudge())
    for row, choice in enumerate(choices):
        state.admit(row, Request([0], 100, Sampling(**KINDS[choice])))
    return state.judge


def drawing(streams: Streams) -> Any:
    """What a judge reads of a state."""
    return SimpleNamespace(streams=streams)


def scores_of(draft: Draft, seed: int) -> Scores:
    slots, nodes = draft.tokens.shape
    logits = 3 * torch.randn(slots, nodes + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Scores(logits, logits, None)


@given(drafts(with_q=True) | chains().map(lambda made: (made[0], made[2])), CHOICES, st.none() | CHOICES)
def test_every_way_it_takes_is_the_rule_token_for_token(made, choices, seeds):
    """Catches temperature left out, slots of other settings judged alike, cuts forgotten, a q or a seed not looked at.

    Greedy, deterministic, chain or tree: each has a way of its own.
    """
    draft, seed = made
    slots = len(draft.sizes)
    for own in (choices[:slots], [0] * slots):
        judge, scores = judge_of(own), scores_of(draft, seed)
        streams = streams_of(slots, seed, seeds and [choice % 2 == 1 for choice in seeds[:slots]])
        wanted = accept(draft, judge.distribution(scores.logits), streams)
        found = judge(draft, scores, drawing(streams))
        if judge.temperature is None:
            # which counts ids outside the vocabulary alone: a q is not looked at
            wanted = wanted._replace(invalid=found.invalid)
        assert found == wanted
        if judge.temperature is None:
            likeliest = scores._replace(choice=scores.logits.argmax(-1), logits=torch.zeros_like(scores.logits))
            assert judge(draft, likeliest, drawing(streams)) == found


@given(drafts(), CHOICES)
def test_no_row_is_read_that_nobody_walks_through(made, choices):
    """Catches work over [B, N+1, V] for a deterministic draft: rows off the path may hold anything."""
    draft, seed = made
    slots = len(draft.sizes)
    judge, scores, streams = judge_of([1, *choices][:slots]), scores_of(draft, seed), streams_of(slots, seed)
    accepted = judge(draft, scores, drawing(streams))
    spoilt = torch.full_like(scores.logits, torch.nan)
    for b in range(slots):
        spoilt[b, accepted.rows(b)] = scores.logits[b, accepted.rows(b)]
    assert judge(draft, scores._replace(logits=spoilt), drawing(streams)) == accepted
