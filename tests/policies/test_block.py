"""Block verification keeps the distribution and keeps more; that `accept_chain` does is said beside it, in
`sampling/test_fast.py`."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from contracts.chances import _drafts, difference, keeps_the_distribution, outcomes, worst_error
from contracts.parties import Cutting, Drawn, TableTarget
from contracts.test_acceptance_rule_enumerated import random_distribution
from decoding.drafts import slot_of, streams_of, well_formed
from hypothesis import given
from hypothesis import strategies as st
from sampling.chains import Coins, as_chain, chain, chains, proposal_of
from torch import Tensor

from outrider.decoding.accept import accept
from outrider.decoding.draft import Draft
from outrider.policies import block
from outrider.policies.block import accept_block
from outrider.sampling import fast
from outrider.sampling.fast import accept_chain

TARGET = TableTarget.random(5)
BLOCK = as_chain(accept_block)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins come from the script where the noise is one."""
    for module in (fast, block):
        monkeypatch.setattr(module, "coins", Coins.of)


@given(chains())
def test_what_is_kept_of_a_chain_is_well_formed(made):
    """Catches a path that jumps, uses padding or holds an id that is none, whatever stands in q; and a batch that is
    judged as one."""
    draft, p, seed = made
    accepted = accept_block(draft, p, streams_of(len(p), seed))
    well_formed(draft, accepted)
    for b, (count, following) in enumerate(zip(accepted.counts, accepted.next_tokens, strict=True)):
        assert float(p[b, count, following]) > 0
        one = Draft.chain(draft.tokens[b : b + 1], draft.sizes[b : b + 1], draft.q[b : b + 1])
        assert accept_block(one, p[b : b + 1], streams_of(1, seed + b)) == slot_of(accepted, b)


@given(chains(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_slot_with_a_seed_emits_the_targets_own_draws_and_leaves_its_neighbours_alone(made, which):
    """Catches a chain drawn with the target's noise that is judged by its q."""
    draft, p, seed = made
    seeded = which[: len(p)]
    streams = streams_of(len(p), seed)
    found = accept_block(draft, p, streams_of(len(p), seed, seeded))
    free, certain = accept_block(draft, p, streams), accept(replace(draft, q=None), p, streams)
    for b, is_seeded in enumerate(seeded):
        assert slot_of(found, b) == slot_of(certain if is_seeded else free, b)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("nodes", [1, 3])
def test_what_is_emitted_follows_the_target_exactly(nodes):
    """Catches any error in weights, chances and residuals, with no chance of a false alarm."""
    for seed in range(2):
        assert worst_error(random_distribution(seed), chain(nodes), proposal_of(seed), rule=BLOCK) < 1e-12, seed


@pytest.mark.usefixtures("scripted")
def test_zeros_in_p_and_q_keep_the_distribution():
    """Catches 0/0 and log 0: tokens that the target can't emit, tokens that the drafter can't propose, equal rows."""
    rows = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.4, 0.6], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    for shift, other in itertools.product(range(4), repeat=2):
        distribution = lambda path, by=shift: rows[(sum(path) + len(path) + by) % 4]
        proposal = lambda tokens, by=other: rows[(sum(tokens) + by) % 4]
        assert worst_error(distribution, chain(2), proposal, rule=BLOCK) < 1e-12, (shift, other)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("how", ["half", "nan", "none at its own token"])
def test_a_q_that_is_no_distribution_keeps_the_distribution(how):
    """Catches an invalid row that is taken at its word, in the middle of valid ones."""
    proposal = proposal_of(3)

    def claim(tokens: list[int]) -> Tensor:
        q = proposal(tokens).clone()
        if len(tokens) == 1:
            q = {"half": q / 2, "nan": q * torch.nan, "none at its own token": torch.zeros_like(q)}[how]
        return q

    assert worst_error(random_distribution(3), chain(3), proposal, rule=BLOCK, q_of=claim) < 1e-12


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("place", [0, 2])
def test_an_id_outside_the_vocabulary_is_a_rejection_and_keeps_the_distribution(place):
    """Catches an id that wraps around or counts as token 0, first and last."""
    p, emitted = random_distribution(4), []
    for weight, tokens, rows in _drafts(proposal_of(4), 3):
        tokens[place] = 3
        rows_of_p = torch.stack([p(tuple(tokens[:n])) for n in range(4)])[None]
        draft = Draft.chain(torch.tensor([tokens]), torch.tensor([3]), torch.stack(rows)[None])
        emitted += [(weight * chance, out) for chance, out in outcomes(draft, rows_of_p, accept_block)]
    assert difference(emitted, p) < 1e-12


def expected(rule: Callable, distribution: Callable, proposal: Callable, nodes: int) -> float:
    """Tokens emitted by one step, the mean over drafts and coins."""
    total = 0.0
    for weight, tokens, rows in _drafts(proposal, nodes):
        p = torch.stack([distribution(tuple(tokens[:n])) for n in range(nodes + 1)])[None]
        draft = Draft.chain(torch.tensor([tokens]), torch.tensor([nodes]), torch.stack(rows)[None])
        total += weight * sum(chance * len(out) for chance, out in outcomes(draft, p, rule))
    return total


@pytest.mark.usefixtures("scripted")
def test_block_verification_emits_no_fewer_tokens_and_mostly_more():
    """Catches a block rule that gives away what it is for.  By enumeration; a one-hot q leaves nothing to save."""
    gains = [
        expected(accept_block, random_distribution(seed), proposal_of(seed), 2)
        - expected(accept_chain, random_distribution(seed), proposal_of(seed), 2)
        for seed in range(8)
    ]
    assert min(gains) > -1e-12
    assert sum(gain > 1e-3 for gain in gains) >= 5
    proposal = lambda tokens: torch.nn.functional.one_hot(proposal_of(5)(tokens).argmax(), 3).double()
    one, other = (expected(rule, random_distribution(5), proposal, 3) for rule in (accept_chain, accept_block))
    assert one == pytest.approx(other, abs=1e-12)


def nearby(before: Tensor, own: Tensor) -> Tensor:
    """A q near the table's distribution."""
    return (0.5 * TARGET.table[before, own] + 0.3).softmax(-1)


def trust(before: Tensor, own: Tensor) -> Tensor:
    return torch.where(own % 2 == 0, 0.9, 0.2).float()


def test_a_rule_for_chains_keeps_the_distribution_in_the_loop():
    """Catches noise that two steps share: the block throws coins for nodes it does not reach.  False alarm 1e-6."""
    policy = Cutting(4, 0.3)
    assert keeps_the_distribution(TARGET, Drawn(nearby, 4, trust), policy, rule=accept_block, slots=2000)
