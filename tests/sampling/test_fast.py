"""The fast path for chains emits what the acceptance rule emits, token for token; and the checks see one that does not.

That for greedy slots is beside the rule itself, in test_accept.py.
"""

from __future__ import annotations

import pytest
import torch
from contracts.parties import TableTarget
from decoding.drafts import distribution_of, drafts, streams_of
from hypothesis import given
from hypothesis import strategies as st
from sampling.chains import chains

from outrider.decoding.accept import accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.errors import DrafterError
from outrider.sampling import fast
from outrider.sampling.fast import accept_chain

TARGET = TableTarget.random(5)
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


def test_a_q_over_another_vocabulary_is_refused_as_by_the_rule():
    """Catches a fast path that broadcasts or cuts where the rule refuses."""
    draft = Draft.chain(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), torch.full((1, 2, 3), 1 / 3))
    with pytest.raises(DrafterError, match="tokens, got 3"):
        accept_chain(draft, torch.full((1, 3, 4), 0.25), streams_of(1, 0))


def test_the_coins_in_one_go_are_the_coins_of_the_streams():
    """Catches a change of `Streams` that its copy here does not follow."""
    streams = Streams(torch.arange(50) - 7, torch.arange(50) * 3)
    single = torch.stack([streams.uniform(n, Purpose.ACCEPT, salt=n) for n in range(9)], 1)
    assert torch.equal(fast.coins(streams, 9), single)


@given(st.integers(0, 2**20))
def test_a_chain_with_coins_of_its_own_is_told_from_the_rule(seed):
    """Planted fault: equality is a claim about noise, too.  300 slots; all alike by chance: below 1e-6."""
    p, q = TARGET.table.softmax(-1)[0, :4].expand(300, -1, -1), TARGET.table.softmax(-1)[1, :3].expand(300, -1, -1)
    streams = streams_of(300, seed)
    tokens = torch.stack([streams.draw(q[:, n], n, Purpose.DRAFT) for n in range(3)], 1)
    draft = Draft.chain(tokens, torch.full((300,), 3), q)
    counts = accept(draft, p, streams).counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fast, "coins", lambda s, nodes: torch.stack([s.uniform(n, Purpose.ACCEPT) for n in range(nodes)], 1)
        )
        assert accept_chain(draft, p, streams).counts != counts


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
