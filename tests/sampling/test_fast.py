"""The fast path for chains and the full judge emit what the acceptance rule emits, and read no more than they must."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding.drafts import V, distribution_of, drafts, streams_of
from hypothesis import given
from hypothesis import strategies as st
from sampling.chains import chains

from outrider.decoding.accept import accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.errors import DrafterError
from outrider.policies.block import accept_block
from outrider.sampling import fast
from outrider.sampling.fast import accept_chain
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

SEEDED = st.none() | st.lists(st.booleans(), min_size=4, max_size=4)
"""Which slots have a seed."""


@given(chains(), SEEDED)
def test_a_chain_at_once_is_the_rule_token_for_token(made, seeded):
    """Catches another coin, another residual, a node read after the slot's size, an invalid one taken at its word."""
    draft, p, seed = made
    streams = streams_of(len(p), seed, seeded and seeded[: len(p)])
    assert accept_chain(draft, p, streams) == accept(draft, p, streams)


@given(drafts(with_q=True), SEEDED)
def test_trees_and_deterministic_drafts_go_to_the_rule_itself(made, seeded):
    """Catches a fast path, or block verification, that takes every draft for its own kind."""
    draft, seed = made
    slots = len(draft.sizes)
    p, streams = distribution_of(draft, seed), streams_of(slots, seed, seeded and seeded[:slots])
    for own in (draft, Draft.chain(draft.tokens, draft.sizes)):
        assert accept_chain(own, p, streams) == accept_block(own, p, streams) == accept(own, p, streams)


def test_a_q_over_another_vocabulary_is_refused_as_by_the_rule():
    """Catches one that broadcasts or is cut in silence."""
    for width, rule in itertools.product((1, 3, 5), (accept, accept_chain, accept_block)):
        q = torch.full((1, 2, width), 1 / width)
        draft = Draft.chain(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), q)
        with pytest.raises(DrafterError, match=f"tokens, got {width}"):
            rule(draft, torch.full((1, 3, 4), 0.25), streams_of(1, 0))


def test_many_chains_at_once_are_the_rule_token_for_token():
    """Catches a coin of another node: of few drawn chains hardly one shows it."""
    slots, nodes, generator = 500, 5, torch.Generator().manual_seed(1)
    p, q = (
        torch.randn(slots, nodes + extra, 4, generator=generator, dtype=torch.float64).softmax(-1) for extra in (1, 0)
    )
    tokens = torch.randint(4, (slots, nodes), generator=generator)
    draft = Draft.chain(tokens, torch.randint(nodes + 1, (slots,), generator=generator), q)
    found = accept(draft, p, streams_of(slots, 0))
    assert min(found.counts.count(n) for n in range(nodes + 1)) > 5
    assert accept_chain(draft, p, streams_of(slots, 0)) == found


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


def test_the_coins_in_one_go_are_the_coins_of_the_streams():
    """Catches a change of `Streams` that its copy here does not follow."""
    streams = Streams(torch.arange(50) - 7, torch.arange(50) * 3)
    single = torch.stack([streams.uniform(n, Purpose.ACCEPT, salt=n) for n in range(9)], 1)
    assert torch.equal(fast.coins(streams, 9), single)
