"""The fast path for chains emits what the acceptance rule emits, token for token.

That for greedy slots is beside the rule itself, in test_accept.py.
"""

import pytest
import torch
from decoding.drafts import distribution_of, drafts, streams_of
from hypothesis import given
from hypothesis import strategies as st
from sampling.chains import chains

from outrider.decoding.accept import accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.errors import DrafterError
from outrider.policies.block import accept_block
from outrider.sampling import fast
from outrider.sampling.fast import accept_chain

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
    """Catches a fast path that takes every draft for its own kind."""
    draft, seed = made
    slots = len(draft.sizes)
    p, streams = distribution_of(draft, seed), streams_of(slots, seed, seeded and seeded[:slots])
    assert accept_chain(draft, p, streams) == accept(draft, p, streams)
    bare = Draft.chain(draft.tokens, draft.sizes)
    assert accept_chain(bare, p, streams) == accept(bare, p, streams)


@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("rule", [accept, accept_chain, accept_block])
def test_a_q_over_another_vocabulary_is_refused_as_by_the_rule(rule, width):
    """Catches one that broadcasts or is cut in silence."""
    q = torch.full((1, 2, width), 1 / width)
    draft = Draft.chain(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), q)
    with pytest.raises(DrafterError, match=f"tokens, got {width}"):
        rule(draft, torch.full((1, 3, 4), 0.25), streams_of(1, 0))


def test_the_coins_in_one_go_are_the_coins_of_the_streams():
    """Catches a change of `Streams` that its copy here does not follow."""
    streams = Streams(torch.arange(50) - 7, torch.arange(50) * 3)
    single = torch.stack([streams.uniform(n, Purpose.ACCEPT, salt=n) for n in range(9)], 1)
    assert torch.equal(fast.coins(streams, 9), single)


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
