"""Block verification keeps the distribution and keeps more; beside it the same is asked of `accept_chain`, which judges
token-wise.

The checks see a block that is judged wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from contracts.chances import _drafts, _spread, emitted, keeps_the_distribution, outcomes, worst_error
from contracts.parties import Drawn, OnAndOff, TableTarget
from contracts.test_acceptance_rule_enumerated import random_distribution
from decoding.drafts import distribution_of, drafts, slot_of, streams_of, well_formed
from hypothesis import given
from hypothesis import strategies as st
from sampling.chains import Coins, as_chain, chain, chains, proposal_of
from torch import Tensor

from outrider.decoding.accept import accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.errors import DrafterError
from outrider.policies import block
from outrider.policies.block import accept_block
from outrider.policies.by_confidence import ByConfidence
from outrider.policies.fixed import Fixed
from outrider.sampling import fast
from outrider.sampling.fast import Chain, accept_chain

TARGET = TableTarget.random(5)
RULES = [accept_chain, accept_block]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins come from the script where the noise is one."""
    for module in (fast, block):
        monkeypatch.setattr(module, "coins", Coins.of)


# ── any chain ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(drafts(with_q=True))
def test_trees_and_deterministic_drafts_go_to_the_rule_itself(made):
    """Catches a block rule that takes every draft for its own kind."""
    draft, seed = made
    p, streams = distribution_of(draft, seed), streams_of(len(draft.sizes), seed)
    assert accept_block(draft, p, streams) == accept(draft, p, streams)
    bare = Draft.chain(draft.tokens, draft.sizes)
    assert accept_block(bare, p, streams) == accept(bare, p, streams)


def test_a_q_over_another_vocabulary_is_refused_as_by_the_rule():
    """Catches a block rule that broadcasts or cuts where the acceptance rule refuses."""
    draft = Draft.chain(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), torch.full((1, 2, 3), 1 / 3))
    with pytest.raises(DrafterError, match="vocabulary of 4 tokens, got 3"):
        accept_block(draft, torch.full((1, 3, 4), 0.25), streams_of(1, 0))


@given(chains(), st.sampled_from(RULES))
def test_what_is_kept_of_a_chain_is_well_formed(made, rule):
    """Catches a path that jumps, uses padding or holds an id that is none, whatever stands in q."""
    draft, p, seed = made
    accepted = rule(draft, p, streams_of(len(p), seed))
    well_formed(draft, accepted)
    for b, (count, following) in enumerate(zip(accepted.counts, accepted.next_tokens, strict=True)):
        assert float(p[b, count, following]) > 0


@given(chains(), st.sampled_from(RULES))
def test_a_slot_is_judged_alike_alone_and_among_others(made, rule):
    """Catches a batch that is judged as one."""
    draft, p, seed = made
    together = rule(draft, p, streams_of(len(p), seed))
    for b in range(len(p)):
        one = Draft.chain(draft.tokens[b : b + 1], draft.sizes[b : b + 1], draft.q[b : b + 1])
        assert rule(one, p[b : b + 1], streams_of(1, seed + b)) == slot_of(together, b)


@given(chains(), st.lists(st.booleans(), min_size=4, max_size=4), st.sampled_from(RULES))
def test_a_slot_with_a_seed_emits_the_targets_own_draws_and_leaves_its_neighbours_alone(made, which, rule):
    """Catches a chain drawn with the target's noise that is judged by its q."""
    draft, p, seed = made
    seeded = which[: len(p)]
    found = rule(draft, p, streams_of(len(p), seed, seeded))
    free, certain = (
        rule(draft, p, streams_of(len(p), seed)),
        accept(replace(draft, q=None), p, streams_of(len(p), seed)),
    )
    for b, is_seeded in enumerate(seeded):
        assert slot_of(found, b) == slot_of(certain if is_seeded else free, b)


@given(chains(hostile=False), st.sampled_from(RULES))
def test_a_draft_from_the_targets_own_distribution_is_kept_whole(made, rule):
    """Metamorphic: q = p loses nothing, to rounding or otherwise."""
    draft, p, seed = made
    own = p[:, :-1]
    tokens = draft.tokens.clone()
    for n in range(own.shape[1]):
        tokens[:, n] = streams_of(len(p), seed).draw(own[:, n], n, Purpose.DRAFT)
    accepted = rule(replace(draft, tokens=tokens, q=own), p, streams_of(len(p), seed))
    assert accepted.counts == draft.sizes.tolist()


@given(chains(hostile=False))
def test_with_one_node_block_verification_is_the_rule_token_for_token(made):
    """Catches a block rule that asks more or less of the last node than the ratio test."""
    draft, p, seed = made
    one = replace(draft.first(torch.ones_like(draft.sizes)), sizes=draft.sizes.clamp(max=1))
    p = p[:, : one.tokens.shape[1] + 1]
    assert accept_block(one, p, streams_of(len(p), seed)) == accept(one, p, streams_of(len(p), seed))


# ── chains, by enumeration ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_emitted_follows_the_target_exactly(rule, nodes):
    """Catches any error in weights, chances and residuals, with no chance of a false alarm."""
    for seed in range(4):
        assert worst_error(random_distribution(seed), chain(nodes), proposal_of(seed), rule=as_chain(rule)) < 1e-12, (
            seed
        )


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", RULES)
def test_zeros_in_p_and_q_keep_the_distribution(rule):
    """Catches 0/0 and log 0: tokens that the target can't emit, tokens that the drafter can't propose, equal rows."""
    rows = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.4, 0.6], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    for shift in range(4):
        for other in range(4):
            distribution = lambda path, by=shift: rows[(sum(path) + len(path) + by) % 4]
            proposal = lambda tokens, by=other: rows[(sum(tokens) + by) % 4]
            assert worst_error(distribution, chain(2), proposal, rule=as_chain(rule)) < 1e-12, (shift, other)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", RULES)
def test_a_length_that_depends_on_earlier_tokens_keeps_the_distribution(rule):
    """Catches a rule that needs the length fixed beforehand: a policy is a stopping rule, here of the first token's
    making."""
    for stop in (lambda tokens: 3 if tokens[0] == 0 else 1, lambda tokens: 2 + (tokens[1] == 1), lambda tokens: 0):
        error = worst_error(random_distribution(2), chain(3), proposal_of(2), rule=as_chain(rule), keep=stop)
        assert error < 1e-12


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["half", "nan", "none at its own token"])
def test_a_q_that_is_no_distribution_keeps_the_distribution(rule, how):
    """Catches an invalid row that is taken at its word, in the middle of valid ones."""
    proposal = proposal_of(3)

    def claim(tokens: list[int]) -> Tensor:
        q = proposal(tokens).clone()
        if len(tokens) == 1:
            q = {"half": q / 2, "nan": q * torch.nan, "none at its own token": torch.zeros_like(q)}[how]
        return q

    assert worst_error(random_distribution(3), chain(3), proposal, rule=as_chain(rule), q_of=claim) < 1e-12


def error_of(distribution: Callable, drafted: Iterable[tuple[float, Draft]], rule: Callable, depth: int = 3) -> float:
    """As `worst_error`, for drafts made by hand; ids outside the vocabulary end a path."""
    found, exact = torch.zeros(2, *[len(distribution(()))] * depth, dtype=torch.float64)
    for weight, draft in drafted:
        tokens = draft.tokens[0].tolist()
        p = torch.stack([distribution(tuple(tokens[:n])) for n in range(len(tokens) + 1)])[None]
        for chance, out in outcomes(draft, p, rule):
            _spread(found, distribution, tuple(out[:depth]), weight * chance)
    _spread(exact, distribution, (), 1.0)
    return float((found - exact).abs().max())


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_id_outside_the_vocabulary_is_a_rejection_and_keeps_the_distribution(rule, place):
    """Catches an id that wraps around or counts as token 0, first, between and last."""

    def drafted() -> Iterator[tuple[float, Draft]]:
        for weight, tokens, rows in _drafts(proposal_of(4), 3):
            tokens[place] = 3
            yield weight, Draft.chain(torch.tensor([tokens]), torch.tensor([3]), torch.stack(rows)[None])

    assert error_of(random_distribution(4), drafted(), rule) < 1e-12


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
    """Catches a block rule that gives away what it is for.  By enumeration, 8 pairs of distributions."""
    gains = [
        expected(accept_block, random_distribution(seed), proposal_of(seed), 3)
        - expected(accept_chain, random_distribution(seed), proposal_of(seed), 3)
        for seed in range(8)
    ]
    assert min(gains) > -1e-12
    assert sum(gain > 1e-3 for gain in gains) >= 5


@pytest.mark.usefixtures("scripted")
def test_block_verification_of_certain_nodes_emits_as_many_tokens_as_the_distribution():
    """One-hot q leaves nothing to save: p(first), p(first) p(second), as in the distribution."""
    proposal = lambda tokens: torch.nn.functional.one_hot(proposal_of(5)(tokens).argmax(), 3).double()
    one, other = (expected(rule, random_distribution(5), proposal, 3) for rule in RULES)
    assert one == pytest.approx(other, abs=1e-12)


# ── chains, planted faults ────────────────────────────────────────────────────────────────────────────────────────────

longest = block._longest


def first_failure(chain: Chain, streams: Streams) -> tuple[Tensor, Tensor]:
    """As `_longest`, of whose coins each is asked alone, but for what is made of them: the first that failed ends the
    draft."""
    place = torch.arange(chain.live.shape[1])
    passed = torch.stack([longest(replace(chain, live=chain.live & (place == n)), streams)[0] > 0 for n in place], 1)
    return passed.long().cumprod(-1).sum(-1), longest(chain, streams)[1]


@pytest.mark.usefixtures("scripted")
def test_a_block_that_stops_at_the_first_failure_is_caught(monkeypatch):
    """Planted fault: the coins are read as the token-wise rule reads its own."""
    monkeypatch.setattr(block, "_longest", first_failure)
    assert worst_error(random_distribution(0), chain(2), proposal_of(0), rule=as_chain(accept_block)) > 1e-3


@pytest.mark.usefixtures("scripted")
def test_a_block_that_corrects_from_the_token_wise_residual_is_caught(monkeypatch):
    """Planted fault: max(p - q, 0) where the block's weight belongs to p."""
    honest = Chain.accepted
    monkeypatch.setattr(Chain, "accepted", lambda self, counts, weight, streams: honest(self, counts, None, streams))
    assert worst_error(random_distribution(0), chain(3), proposal_of(0), rule=as_chain(accept_block)) > 1e-5
    assert worst_error(random_distribution(0), chain(3), proposal_of(0), rule=as_chain(accept_chain)) < 1e-12


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", RULES)
def test_a_chain_that_forgets_the_residual_is_caught(monkeypatch, rule):
    """Planted fault: the correction is drawn from p."""
    monkeypatch.setattr(fast, "residual", lambda left, q: left)
    assert worst_error(random_distribution(0), chain(2), proposal_of(0), rule=as_chain(rule)) > 0.01


# ── chains, through the loop ──────────────────────────────────────────────────────────────────────────────────────────


def nearby(before: Tensor, own: Tensor) -> Tensor:
    """A q near the table's distribution."""
    return (0.5 * TARGET.table[before, own] + 0.3).softmax(-1)


def trust(before: Tensor, own: Tensor) -> Tensor:
    return torch.where(own % 2 == 0, 0.9, 0.2).float()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "policy", [Fixed(4), ByConfidence(4, 0.3), OnAndOff(4)], ids=["fixed", "confidence", "on and off"]
)
def test_a_rule_for_chains_keeps_the_distribution_in_the_loop(rule, policy):
    """Catches noise that two steps share: the block throws coins for nodes it does not reach.  False alarm 1e-6."""
    assert keeps_the_distribution(TARGET, Drawn(nearby, 4, trust), policy, rule=rule, slots=4000)


def test_block_verification_keeps_more_in_the_loop():
    """Catches a loop that loses what the rule wins.  One-sided; means 0.12 a slot apart, 8 standard errors: below
    1e-6."""
    kept = [emitted(TARGET, Drawn(nearby, 4), rule=rule, slots=4000)[2] for rule in RULES]
    assert kept[1] > kept[0]


def test_a_fault_in_the_block_is_caught_in_the_loop(monkeypatch):
    """Planted fault: the check of the loop has teeth for this rule, too."""
    monkeypatch.setattr(block, "_longest", first_failure)
    assert not keeps_the_distribution(TARGET, Drawn(nearby, 4), rule=accept_block, slots=4000)
