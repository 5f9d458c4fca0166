"""Every twin emits what the law emits, token for token or in distribution; and the checks see a twin that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from contracts.chances import Chance, Coin, _drafts, _spread, emitted, keeps_the_law, outcomes, worst_error
from contracts.parties import Drawn, OnAndOff, Proposer, TableTarget, Tree, last_two
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from test_accept import V, drafts, law_of, streams_of, well_formed
from torch import Tensor

from outrider.decoding import twins
from outrider.decoding.accept import accept, accept_greedy
from outrider.decoding.draft import Draft
from outrider.decoding.policy import ByConfidence, Fixed
from outrider.decoding.sampling import Purpose, Sampling, Settings, Streams, distribution
from outrider.decoding.twins import accept_block, accept_chain, accept_coupled, accept_top1
from outrider.errors import DrafterError

TARGET = TableTarget.random(5)
CHAINS = [accept_chain, accept_block]


def random_law(seed: int, vocabulary: int = 3, spread: float = 1.5) -> Callable[[tuple[int, ...]], Tensor]:
    """A law over paths: equal paths, equal p."""

    def law(path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + hash(path) % 1_000_003)
        return torch.randn(vocabulary, dtype=torch.float64, generator=generator).mul(spread).softmax(-1)

    return law


def proposal_of(seed: int, **options) -> Callable[[list[int]], Tensor]:
    law = random_law(seed + 77, **options)
    return lambda tokens: law(tuple(tokens))


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def as_chain(rule: Callable) -> Callable:
    """The checks build their drafts as trees; a chain's twin wants to be told that this is none."""
    return lambda draft, p, streams: rule(replace(draft, branches=False), p, streams)


class Coins:
    """A row of scripted coins [1, N], as `Coin` is one."""

    def __init__(self, chance: Chance, scale: Sequence[float]):
        self.chance, self.scale = chance, scale

    def __mul__(self, by: Tensor) -> Coins:
        return Coins(self.chance, [scale * float(own) for scale, own in zip(self.scale, by[0], strict=True)])

    def __lt__(self, threshold: Tensor) -> Tensor:
        return torch.tensor(
            [[bool(Coin(self.chance, scale) < own) for scale, own in zip(self.scale, threshold[0], strict=True)]]
        )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins come from the script where the noise is one."""
    monkeypatch.setattr(twins, "_coins", lambda chance, nodes: Coins(chance, [1.0] * nodes))


# ── chains, token for token ───────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def chains(draw, hostile: bool = True):
    """A sampled chain: some ids outside, some rows of q no distribution, some zeros in p and q."""
    slots, nodes, seed = draw(st.integers(1, 4)), draw(st.integers(0, 6)), draw(st.integers(0, 2**20))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(slots, nodes + extra, V, generator=generator, dtype=dtype).mul(1.5) for extra in (1, 0))
    p[torch.rand(p.shape, generator=generator) < 0.2] = -1e9
    p, q = p.softmax(-1), q.softmax(-1)
    tokens = torch.randint(V, (slots, nodes), generator=generator)
    if hostile:
        hit = torch.rand(slots, nodes, 1, generator=generator)
        own = torch.nn.functional.one_hot(tokens, V).bool()
        q = torch.where(hit < 0.1, torch.nan, torch.where(hit < 0.2, q.masked_fill(own, 0.0), torch.where(hit < 0.3, 2 * q, q)))
        odd = torch.rand(slots, nodes, generator=generator)
        tokens = torch.where(odd < 0.1, -1, torch.where(odd < 0.2, 2**40, tokens))
    sizes = torch.tensor([draw(st.integers(0, nodes)) for _ in range(slots)])
    return Draft.chain(tokens, sizes, q), p, seed


def same(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b), (one, other)


@given(chains())
def test_the_fused_chain_is_the_law_token_for_token(made):
    """Catches another coin, another residual, a node read behind the slot's size, an unlawful one taken at its word."""
    draft, p, seed = made
    streams = streams_of(len(p), seed)
    same(accept_chain(draft, p, streams), accept(draft, p, streams))


@given(drafts(with_q=True), st.sampled_from(CHAINS))
def test_trees_and_deterministic_drafts_go_to_the_law_itself(made, rule):
    """Catches a twin that takes every draft for its own kind."""
    draft, seed = made
    p, streams = law_of(draft, seed), streams_of(len(draft.sizes), seed)
    same(rule(draft, p, streams), accept(draft, p, streams))
    bare = Draft.chain(draft.tokens, draft.sizes)
    same(rule(bare, p, streams), accept(bare, p, streams))


@pytest.mark.parametrize("rule", CHAINS)
def test_a_q_over_another_vocabulary_is_refused_as_by_the_law(rule):
    """Catches a fused twin that broadcasts or cuts where the law refuses."""
    draft = Draft.chain(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), torch.full((1, 2, 3), 1 / 3))
    with pytest.raises(DrafterError, match="over 3 tokens"):
        rule(draft, torch.full((1, 3, 4), 0.25), streams_of(1, 0))


@given(chains(), st.sampled_from([*CHAINS, accept_coupled]))
def test_every_verdict_on_a_chain_is_well_formed(made, rule):
    """Catches a path that jumps, uses padding or holds an id that is none, whatever stands in q."""
    draft, p, seed = made
    verdict = rule(draft, p, streams_of(len(p), seed))
    well_formed(draft, verdict)
    assert bool((p[torch.arange(len(p)), verdict.accepted].gather(-1, verdict.next_token[:, None]) > 0).all())


@given(chains(), st.sampled_from([*CHAINS, accept_coupled]))
def test_a_slot_is_judged_alike_alone_and_among_others(made, rule):
    """Catches a batch that is judged as one."""
    draft, p, seed = made
    together = rule(draft, p, streams_of(len(p), seed))
    for b in range(len(p)):
        one = Draft.chain(draft.tokens[b : b + 1], draft.sizes[b : b + 1], draft.q[b : b + 1])
        alone = rule(one, p[b : b + 1], streams_of(1, seed + b))
        assert int(alone.accepted) == int(together.accepted[b])
        assert int(alone.next_token) == int(together.next_token[b])
        assert int(alone.unlawful) == int(together.unlawful[b])


@given(chains(hostile=False), st.sampled_from(CHAINS))
def test_a_draft_from_the_targets_own_law_is_kept_whole(made, rule):
    """Metamorphic: q = p loses nothing, to rounding or otherwise."""
    draft, p, seed = made
    own = p[:, :-1]
    tokens = draft.tokens.clone()
    for n in range(own.shape[1]):
        tokens[:, n] = streams_of(len(p), seed).draw(own[:, n], n, Purpose.DRAFT)
    verdict = rule(replace(draft, tokens=tokens, q=own), p, streams_of(len(p), seed))
    assert torch.equal(verdict.accepted, draft.sizes)


@given(chains(hostile=False))
def test_with_one_node_block_verification_is_the_law_token_for_token(made):
    """Catches a block rule that asks more or less of the last node than the ratio test."""
    draft, p, seed = made
    one = replace(draft.first(torch.ones_like(draft.sizes)), sizes=draft.sizes.clamp(max=1))
    p = p[:, : one.tokens.shape[1] + 1]
    same(accept_block(one, p, streams_of(len(p), seed)), accept(one, p, streams_of(len(p), seed)))


def test_the_noise_in_one_go_is_the_noise_of_the_streams():
    """Catches a change of `Streams` that its copies here do not follow."""
    streams = Streams(torch.arange(50) - 7, torch.arange(50) * 3)
    single = torch.stack([streams.uniform(n, Purpose.ACCEPT, salt=n) for n in range(9)], 1)
    assert torch.equal(twins._coins(streams, 9), single)
    weights = torch.rand(50, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for depth in range(4):
        race = (weights.log() + twins._gumbel(streams, depth, 11)).argmax(-1)
        assert torch.equal(race, streams.draw(weights, depth, Purpose.TARGET))


# ── chains, by enumeration ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("rule", CHAINS)
def test_a_chains_twin_follows_the_target_exactly(rule, nodes):
    """Catches any error in weights, chances and residuals, with no chance of a false alarm."""
    for seed in range(4):
        assert worst_error(random_law(seed), chain(nodes), proposal_of(seed), rule=as_chain(rule)) < 1e-12, seed


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", CHAINS)
def test_zeros_in_p_and_q_keep_the_law(rule):
    """Catches 0/0 and log 0: tokens that the target can't emit, tokens that the drafter can't propose, equal rows."""
    rows = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.4, 0.6], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    for shift in range(4):
        for other in range(4):
            law = lambda path, by=shift: rows[(sum(path) + len(path) + by) % 4]
            proposal = lambda tokens, by=other: rows[(sum(tokens) + by) % 4]
            assert worst_error(law, chain(2), proposal, rule=as_chain(rule)) < 1e-12, (shift, other)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", CHAINS)
def test_a_length_that_hangs_on_earlier_tokens_keeps_the_law(rule):
    """Catches a twin that needs the length fixed beforehand: a policy is a stopping rule, here of the first token's making."""
    for stop in (lambda tokens: 3 if tokens[0] == 0 else 1, lambda tokens: 2 + (tokens[1] == 1), lambda tokens: 0):
        error = worst_error(random_law(2), chain(3), proposal_of(2), rule=as_chain(rule), keep=stop)
        assert error < 1e-12


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", CHAINS)
@pytest.mark.parametrize("how", ["half", "nan", "none at its own token"])
def test_a_q_that_is_no_distribution_keeps_the_law(rule, how):
    """Catches an unlawful row that is taken at its word, in the middle of lawful ones."""
    proposal = proposal_of(3)

    def claim(tokens: list[int]) -> Tensor:
        q = proposal(tokens).clone()
        if len(tokens) == 1:
            q = {"half": q / 2, "nan": q * torch.nan, "none at its own token": torch.zeros_like(q)}[how]
        return q

    assert worst_error(random_law(3), chain(3), proposal, rule=as_chain(rule), q_of=claim) < 1e-12


def error_of(law: Callable, drafted: Iterable[tuple[float, Draft]], rule: Callable, depth: int = 3) -> float:
    """As `worst_error`, for drafts made by hand; ids outside the vocabulary end a path."""
    found, exact = torch.zeros(2, *[len(law(()))] * depth, dtype=torch.float64)
    for weight, draft in drafted:
        tokens = draft.tokens[0].tolist()
        p = torch.stack([law(tuple(tokens[:n])) for n in range(len(tokens) + 1)])[None]
        for chance, out in outcomes(draft, p, rule):
            _spread(found, law, tuple(out[:depth]), weight * chance)
    _spread(exact, law, (), 1.0)
    return float((found - exact).abs().max())


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", CHAINS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_id_outside_the_vocabulary_is_a_rejection_and_keeps_the_law(rule, place):
    """Catches an id that wraps around or counts as token 0, first, between and last."""

    def drafted() -> Iterator[tuple[float, Draft]]:
        for weight, tokens, rows in _drafts(proposal_of(4), 3):
            tokens[place] = 3
            yield weight, Draft.chain(torch.tensor([tokens]), torch.tensor([3]), torch.stack(rows)[None])

    assert error_of(random_law(4), drafted(), rule) < 1e-12


def expected(rule: Callable, law: Callable, proposal: Callable, nodes: int) -> float:
    """Tokens emitted by one step, the mean over drafts and coins."""
    total = 0.0
    for weight, tokens, rows in _drafts(proposal, nodes):
        p = torch.stack([law(tuple(tokens[:n])) for n in range(nodes + 1)])[None]
        draft = Draft.chain(torch.tensor([tokens]), torch.tensor([nodes]), torch.stack(rows)[None])
        total += weight * sum(chance * len(out) for chance, out in outcomes(draft, p, rule))
    return total


@pytest.mark.usefixtures("scripted")
def test_block_verification_emits_no_fewer_tokens_and_mostly_more():
    """Catches a block rule that gives away what it is for.  By enumeration, 8 pairs of laws."""
    gains = [
        expected(accept_block, random_law(seed), proposal_of(seed), 3)
        - expected(accept_chain, random_law(seed), proposal_of(seed), 3)
        for seed in range(8)
    ]
    assert min(gains) > -1e-12
    assert sum(gain > 1e-3 for gain in gains) >= 5


@pytest.mark.usefixtures("scripted")
def test_block_verification_of_certain_nodes_emits_as_many_tokens_as_the_law():
    """One-hot q leaves nothing to save: p(first), p(first) p(second), as in the law."""
    proposal = lambda tokens: torch.nn.functional.one_hot(proposal_of(5)(tokens).argmax(), 3).double()
    one, other = (expected(rule, random_law(5), proposal, 3) for rule in CHAINS)
    assert one == pytest.approx(other, abs=1e-12)


# ── chains, planted faults ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("scripted")
def test_a_block_that_stops_at_the_first_failure_is_caught(monkeypatch):
    """Planted fault: the coins are read as the token-wise rule reads its own."""
    monkeypatch.setattr(twins, "_longest", lambda passed: passed.long().cumprod(-1).sum(-1))
    assert worst_error(random_law(0), chain(2), proposal_of(0), rule=as_chain(accept_block)) > 1e-3


@pytest.mark.usefixtures("scripted")
def test_a_block_that_corrects_from_the_token_wise_residual_is_caught(monkeypatch):
    """Planted fault: max(p - q, 0) where the block's weight belongs to p."""
    verdict = twins._Nodes.verdict
    monkeypatch.setattr(twins._Nodes, "verdict", lambda self, accepted, q, p, _, s: verdict(self, accepted, q, p, None, s))
    assert worst_error(random_law(0), chain(3), proposal_of(0), rule=as_chain(accept_block)) > 1e-5
    assert worst_error(random_law(0), chain(3), proposal_of(0), rule=as_chain(accept_chain)) < 1e-12


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("rule", CHAINS)
def test_a_chain_that_forgets_the_residual_is_caught(monkeypatch, rule):
    """Planted fault: the correction is drawn from p."""
    monkeypatch.setattr(twins, "_residual", lambda left, q: left)
    assert worst_error(random_law(0), chain(2), proposal_of(0), rule=as_chain(rule)) > 0.01


@given(st.integers(0, 2**20))
def test_a_fused_chain_with_coins_of_its_own_is_told_from_the_law(seed):
    """Planted fault: equality is a claim about noise, too.  300 slots; all alike by chance: below 1e-6."""
    p, q = TARGET.table.softmax(-1)[0, :4].expand(300, -1, -1), TARGET.table.softmax(-1)[1, :3].expand(300, -1, -1)
    streams = streams_of(300, seed)
    tokens = torch.stack([streams.draw(q[:, n], n, Purpose.DRAFT) for n in range(3)], 1)
    draft = Draft.chain(tokens, torch.full((300,), 3), q)
    law = accept(draft, p, streams).accepted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twins, "_coins", lambda s, nodes: torch.stack([s.uniform(n, Purpose.ACCEPT) for n in range(nodes)], 1))
        assert not torch.equal(accept_chain(draft, p, streams).accepted, law)


# ── chains, through the loop ──────────────────────────────────────────────────────────────────────────────────────────


def nearby(before: Tensor, own: Tensor) -> Tensor:
    """A q near the table's law."""
    return (0.5 * TARGET.table[before, own] + 0.3).softmax(-1)


def trust(before: Tensor, own: Tensor) -> Tensor:
    return torch.where(own % 2 == 0, 0.9, 0.2).float()


@pytest.mark.parametrize("rule", CHAINS)
@pytest.mark.parametrize("policy", [Fixed(4), ByConfidence(4, 0.3), OnAndOff(4)], ids=["fixed", "confidence", "on and off"])
def test_a_chains_twin_keeps_the_law_in_the_loop(rule, policy):
    """Catches noise that two steps share: the block throws coins for nodes it does not reach.  False alarm 1e-6."""
    assert keeps_the_law(TARGET, Drawn(nearby, 4, trust), policy, rule=rule, slots=4000)


def test_block_verification_keeps_more_in_the_loop():
    """Catches a loop that loses what the rule wins.  One-sided; means 0.12 a slot apart, 8 standard errors: below 1e-6."""
    kept = [emitted(TARGET, Drawn(nearby, 4), rule=rule, slots=4000)[2] for rule in CHAINS]
    assert kept[1] > kept[0]


def test_a_fault_in_the_block_is_caught_in_the_loop(monkeypatch):
    """Planted fault: the check of the loop has teeth for this rule, too."""
    monkeypatch.setattr(twins, "_longest", lambda passed: passed.long().cumprod(-1).sum(-1))
    assert not keeps_the_law(TARGET, Drawn(nearby, 4), rule=accept_block, slots=4000)


# ── coupled ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Coupled(Proposer):
    """Draws from `law` with the target's own noise."""

    def __init__(self, law: Callable[[Tensor, Tensor], Tensor], limit: int = 3):
        self.law, self.limit = law, limit

    def propose(self, memory, state, budget: Tensor) -> Draft:
        before, own = last_two(state)
        tokens, rows = [], []
        for depth in range(self.limit):
            rows.append(self.law(before, own))
            before, own = own, state.streams.draw(rows[-1], depth, Purpose.TARGET)
            tokens.append(own)
        return Draft.chain(torch.stack(tokens, 1), budget, torch.stack(rows, 1))


DRAFTERS = {
    "nothing": (Drawn(nearby, 3), Fixed(0)),
    "chain": (Drawn(nearby, 4), None),
    "coupled": (Coupled(nearby), None),
    "tree": (Tree(TARGET, [-1, -1, 0, 0, 1, 2], "without"), None),
    "certain": (Tree(TARGET, [-1, -1, -1, 0, 0, 3], "top"), OnAndOff(6)),
}


@given(drafts(with_q=True))
def test_the_coupled_rule_is_the_law_of_the_draft_without_its_q(made):
    """Catches another race than `Streams.draw`'s, another child, another count: token for token `accept` with q None."""
    draft, seed = made
    p, streams = law_of(draft, seed), streams_of(len(draft.sizes), seed)
    same(accept_coupled(draft, p, streams), accept(replace(draft, q=None), p, streams))
    greedy = torch.nn.functional.one_hot(p.argmax(-1), V).double()
    assert accept_coupled(draft, greedy, streams).kept() == accept_greedy(draft, p.argmax(-1), V)


@pytest.mark.parametrize("name", DRAFTERS.keys())
def test_the_coupled_text_does_not_hang_on_the_drafter(name):
    """Catches noise that counts steps instead of tokens; every text is plain decoding's."""
    drafter, policy = DRAFTERS[name]
    plain, _, none = emitted(TARGET, *DRAFTERS["nothing"], rule=accept_coupled, slots=1000)
    tokens, _, kept = emitted(TARGET, drafter, policy, rule=accept_coupled, slots=1000)
    assert torch.equal(tokens, plain)
    assert none == 0 and (name == "nothing" or kept > 500)


@pytest.mark.parametrize("name", ["chain", "coupled"])
def test_the_coupled_rule_keeps_the_law(name):
    """Catches a race that is not fair, and noise shared where it must not be.  False alarm 1e-6."""
    assert keeps_the_law(TARGET, *DRAFTERS[name], rule=accept_coupled, slots=5000)


def test_noise_that_counts_from_the_step_is_caught(monkeypatch):
    """Planted fault: the draw of a depth, not of an output index."""
    honest = twins._gumbel
    stuck = lambda streams, depth, vocabulary: honest(replace(streams, index=streams.index * 0), depth, vocabulary)
    monkeypatch.setattr(twins, "_gumbel", stuck)
    one, other = (emitted(TARGET, *DRAFTERS[name], rule=accept_coupled, slots=200)[0] for name in ("nothing", "chain"))
    assert not torch.equal(one, other)


def test_coupled_drafts_judged_by_the_ratio_are_caught():
    """Planted fault: the correction comes from the noise that chose the draft.  Why `accept_coupled` reads no q."""
    evenly = Coupled(lambda before, own: torch.full((len(own), len(TARGET.table)), 1 / len(TARGET.table), dtype=torch.float64))
    assert not keeps_the_law(TARGET, evenly, rule=accept_chain, slots=20_000)
    assert keeps_the_law(TARGET, evenly, rule=accept_coupled, slots=20_000)


def test_a_coupled_draft_is_met_as_often_as_the_paper_says():
    """sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i).  Binomial over 20,000 slots; false alarm 1e-6."""
    p = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    slots = 20_000
    streams = streams_of(slots, 0)
    tokens = streams.draw(q.expand(slots, -1), 0, Purpose.TARGET)[:, None]
    draft = Draft.chain(tokens, torch.ones(slots, dtype=torch.int64), q.expand(slots, 1, -1))
    met = int(accept_coupled(draft, p.expand(slots, 2, -1), streams).accepted.sum())
    promised = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum())
    distance = float((p - q).abs().sum() / 2)
    assert promised >= (1 - distance) / (1 + distance)
    assert stats.binomtest(met, slots, promised).pvalue > 1e-6


# ── top-1 drafts without a softmax ────────────────────────────────────────────────────────────────────────────────────


def settings_of(choices: Sequence[int]) -> Settings:
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 2}, {"temperature": 1, "top_p": 0.8}]
    return Settings.of([Sampling(**kinds[choice]) for choice in choices])


@given(drafts(with_q=True), st.lists(st.integers(0, 4), min_size=4, max_size=4), st.booleans())
def test_top1_from_logits_is_the_law_token_for_token(made, choices, has_cuts):
    """Catches temperature left out, slots of other settings judged alike, cuts forgotten, and a q that is not looked at."""
    draft, seed = made
    slots, nodes = draft.tokens.shape
    settings = settings_of([choice if has_cuts else choice % 3 for choice in choices[:slots]])
    logits = 3 * torch.randn(slots, nodes + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    streams = streams_of(slots, seed)
    same(accept_top1(draft, logits, settings, streams), accept(draft, distribution(logits, settings), streams))


@given(drafts())
def test_top1_reads_no_row_that_nobody_walks_through(made):
    """Catches work over [B, N+1, V]: rows off the path may hold anything."""
    draft, seed = made
    slots, nodes = draft.tokens.shape
    settings, streams = settings_of([1] * slots), streams_of(slots, seed)
    logits = torch.randn(slots, nodes + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    verdict = accept_top1(draft, logits, settings, streams)
    spoilt = torch.full_like(logits, torch.nan)
    rows = torch.cat([torch.zeros(slots, 1, dtype=torch.int64), verdict.path + 1], 1)[..., None].expand(-1, -1, V)
    spoilt.scatter_(1, rows, logits.gather(1, rows))
    same(accept_top1(draft, spoilt, settings, streams), verdict)


def from_logits(temperature: float) -> Callable:
    """`accept_top1` as a rule of the loop."""
    settings = Settings(torch.tensor([temperature]), None, None)
    return lambda draft, p, streams: accept_top1(draft, temperature * p.log(), settings, streams)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_top1_keeps_the_law_in_the_loop(temperature):
    """Catches a race that is not fair.  A tree of the likeliest tokens; false alarm 1e-6."""
    options = {"rule": from_logits(temperature), "sampling": {"temperature": temperature}}
    assert keeps_the_law(TARGET, Tree(TARGET, [-1, -1, -1, 0, 0, 3], "top"), slots=4000, **options)


def soft(draft: Draft, p: Tensor, streams: Streams):
    """Careless: the drafter's softmax as q of its own argmax."""
    q = torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64).expand(1, draft.tokens.shape[1], -1)
    return accept(replace(draft, q=q), p, streams)


def placeholder(draft: Draft, p: Tensor, streams: Streams):
    """Careless: a constant 1 as the probability of every token, as the skipped softmax leaves it."""
    return accept_without_checks(draft, torch.ones(1, draft.tokens.shape[1], 3, dtype=torch.float64), p, streams)


def from_p(draft: Draft, p: Tensor, streams: Streams):
    """Careless: the right test, p(x), and then the correction from p with the token still in it."""
    return accept_without_checks(draft, torch.zeros(1, draft.tokens.shape[1], 3, dtype=torch.float64), p, streams)


def accept_without_checks(draft: Draft, q: Tensor, p: Tensor, streams: Streams):
    """One certain node, kept with chance p(x); else a token from what is left of p without q."""
    went = bool(streams.uniform(0, Purpose.ACCEPT) * torch.tensor(1.0) < p[0, 0, draft.tokens[0, 0]])
    left = p[:, 1] if went else twins._residual(p[:, 0], q[:, 0])
    kept = torch.tensor([int(went)])
    return twins.Verdict(torch.zeros(1, int(went), dtype=torch.int64), kept, streams.draw(left, kept, Purpose.TARGET), 0 * kept)


@pytest.mark.parametrize("careless", [soft, placeholder, from_p])
def test_a_careless_top1_verification_is_caught(careless):
    """Planted faults, of papers that leave the drafter's softmax out: each is biased where the law has no error."""
    certain = lambda tokens: torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    for rule, is_exact in ((careless, False), (accept, True)):
        error = worst_error(random_law(1), [-1], certain, rule=rule, is_certain=True)
        assert (error < 1e-12) == is_exact
        assert is_exact or error > 0.02
