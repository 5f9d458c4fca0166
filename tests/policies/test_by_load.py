"""ByLoad: Algorithm 1 against every choice there is, the paper's counter-example by enumeration, and what it is for
against a simulated clock.  Seeds are fixed, so a run that passed passes again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from operator import mul
from typing import Any

import pytest
import torch
from conftest import cases, first
from contracts.chances import keeps_the_distribution, outcomes, worst_error
from contracts.parties import Drawn, Proposer, TableTarget, Tree
from contracts.test_acceptance_rule import REPEATS, knows_the_token_before, moves_behind_its_cut, state_of
from contracts.test_acceptance_rule import even as halves
from contracts.test_acceptance_rule_enumerated import even, flat, random_distribution
from hypothesis import given
from hypothesis import strategies as st
from policies.test_adaptive import CHANCES, CLOCKS, DEAR, LIMIT, Clock, World, alike, verdict
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.errors import ConfigError
from outrider.generation import serve
from outrider.policies import by_load
from outrider.policies.by_load import ByBatch, ByLoad
from outrider.policies.fixed import Fixed
from outrider.policies.scheduler import Survival, admitted, admitted_columns, best_count, columns, largest
from outrider.policies.step_rates import StepRates
from outrider.sampling.settings import Sampling

JAGGED = StepRates({(slots, width): 1 + 0.3 * (slots * width // 4) for slots in (1, 2, 3, 8) for width in range(1, 10)})
"""Seconds rise by steps of four tokens."""
Lengths = Callable[[Survival], list[int]]


def survival_of(confidence: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(accumulate(own, mul)) for own in confidence]


# ── Algorithm 1 ───────────────────────────────────────────────────────────────────────────────────────────────────────


def theta(survival: Survival, lengths: Sequence[int], rate: Callable[[int], float]) -> float:
    """Expected tokens per second, as the paper defines them."""
    expected = sum(1 + sum(own[:length]) for own, length in zip(survival, lengths, strict=True))
    return expected * rate(len(survival) + sum(lengths))


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0, 0.5), min_size=9, max_size=9),
)
def test_algorithm_1_finds_the_best_of_all_lengths_where_the_rate_has_one_peak(confidence, rises):
    """Catches a wrong order of nodes, a wrong count of tokens or of what is expected, and a stop too early or too late.

    Rising gains of seconds and falling gains of tokens have one peak.
    """
    survival = survival_of(confidence)
    seconds = list(accumulate(accumulate(sorted(rises)), initial=0.0))

    def rate(tokens: int) -> float:
        return 1 / (1 + seconds[tokens - len(survival)])

    found = admitted(survival, rate)
    every = product(*(range(len(own) + 1) for own in survival))
    assert theta(survival, found, rate) == pytest.approx(max(theta(survival, each, rate) for each in every))


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.05, 1), min_size=10, max_size=10),
)
def test_algorithm_1_stops_at_the_first_node_that_does_not_raise_the_rate(confidence, rates):
    """Catches a search that goes on behind a step of the table; by the plainest loop over all nodes, sorted."""
    survival = survival_of(confidence)
    nodes = sorted((-a, slot, n) for slot, own in enumerate(survival) for n, a in enumerate(own))
    wanted, lengths = 0.0, [0] * len(survival)
    for _, slot, n in nodes:
        after = [length + (other == slot) for other, length in enumerate(lengths)]
        wanted = theta(survival, lengths, lambda tokens: rates[tokens - 1])
        if theta(survival, after, lambda tokens: rates[tokens - 1]) <= wanted:
            break
        assert n == lengths[slot]
        lengths = after
    assert admitted(survival, lambda tokens: rates[tokens - 1]) == lengths


@given(st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=4), st.integers(0, 16))
def test_the_largest_are_the_first_nodes_of_slots(confidence, count):
    """Catches a node without the one before it, and a number of nodes that is not what was asked for."""
    survival = survival_of(confidence)
    lengths = largest(survival, count)
    every = sorted((a for own in survival for a in own), reverse=True)
    chosen = [a for own, length in zip(survival, lengths, strict=True) for a in own[:length]]
    assert sorted(chosen, reverse=True) == every[:count]


@given(st.lists(st.floats(0, 3), max_size=5), st.lists(st.floats(0.05, 1), min_size=6, max_size=6))
def test_the_best_number_is_looked_for_without_a_stop(gains, rates):
    """Catches an early stop where none is needed."""
    found = best_count(gains, 3, 3, lambda tokens: rates[tokens // 3 - 1])
    reached = [(3 + sum(gains[:n])) * rates[n] for n in range(len(gains) + 1)]
    assert reached[found] == pytest.approx(max(reached))


def test_columns_that_follow_are_expected_to_bring_what_they_did():
    """Catches a stop at a step of the table that later columns pay for; and one that is passed for nothing."""

    def rate(tokens: int) -> float:
        return 1.0 if tokens == 1 else 1 / 1.5

    gains = [0.4, 0.35, 0.3, 0.25]
    assert admitted_columns(gains, 1, rate) == 0
    assert admitted_columns(gains, 1, rate, means=[0.8, 0.7, 0.6, 0.5]) == 4
    assert admitted_columns(gains, 1, rate, means=[0.8, 0.1, 0.0, 0.0]) == 0
    assert admitted_columns([0.1, 0.1, 0.1, 0.1], 1, rate, means=[0.8, 0.7, 0.6, 0.5]) == 0


def test_a_column_costs_what_its_widest_slot_costs():
    """Catches columns of one slot's nodes that are priced as one token each."""
    survival = [[0.9, 0.9], [0.9], [], [0.9]]
    assert columns(survival) == pytest.approx([2.7, 0.9])
    assert admitted_columns(columns(survival), 4, lambda tokens: {4: 1.0, 8: 0.7, 12: 0.65}[tokens]) == 2
    assert admitted_columns(columns(survival), 4, lambda tokens: {4: 1.0, 8: 0.7, 12: 0.6}[tokens]) == 1


# ── exact ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PAPER = StepRates.by_tokens({1: 1.0, 2: 0.5, 3: 0.45})


class LookAhead(ByLoad):
    """Planted fault: the best number of nodes by the confidences of this very step."""

    def _lengths(self, survival: Survival) -> list[int]:
        gains = sorted((a for own in survival for a in own), reverse=True)
        return largest(survival, best_count(gains, len(survival), 1, self._rate(len(survival), self.limit)))


def cut(policy: ByLoad, confidence: Sequence[Sequence[float]]) -> list[int]:
    sizes = torch.tensor([len(own) for own in confidence])
    width = int(sizes.max())
    padded = torch.tensor([[*own, *[1.0] * (width - len(own))] for own in confidence], dtype=torch.float64)
    return policy.keep(state_of(len(sizes)), sizes, padded).tolist()


def papers_error(policy: ByLoad, depth: int = 1) -> float:
    """Of the paper's counter-example: the second confidence has seen the first token."""
    return worst_error(
        flat([0.7, 0.3]), [-1, 0], even, depth=depth,
        keep=lambda tokens: cut(policy, [[0.8, 1.0 if tokens[0] == 0 else 0.0]])[0],
    )  # fmt: skip


@pytest.mark.parametrize("padded", [True, False])
def test_the_papers_counter_example_is_exact(padded):
    """Catches a look beyond the first node that does not pay, which emits (.85, .15) where the target is (.7, .3)."""
    assert papers_error(ByLoad(2, PAPER, padded=padded), depth=3) < 1e-12


def test_a_search_without_an_early_stop_is_caught_by_the_same_check():
    """Planted fault; the paper's own numbers."""
    assert papers_error(LookAhead(2, PAPER)) == pytest.approx(0.15, abs=1e-12)


def after_steps(policy: ByLoad, earlier: Sequence[Sequence[Sequence[float]]]) -> ByLoad:
    for confidence in earlier:
        cut(policy, confidence)
    return policy


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("late", [[0.8, 1.0], [0.8, 0.0], [1.0, 1.0]], ids=str)
def test_the_counter_example_is_exact_with_confidences_of_two_steps_before(late, padded):
    """Catches a number of nodes that the confidences of the step itself take part in."""

    def error(policy: Callable[[], ByLoad]) -> float:
        def keep(tokens: list[int]) -> int:
            now = [[0.8, 1.0 if tokens[0] == 0 else 0.0]]
            return cut(after_steps(policy(), [[late], [[0.1, 0.1]]]), now)[0]

        return worst_error(flat([0.7, 0.3]), [-1, 0], even, depth=3, keep=keep)

    assert error(lambda: ByLoad(2, PAPER, delay=2, padded=padded)) < 1e-12


@pytest.mark.parametrize("padded", [True, False])
def test_the_number_of_nodes_is_that_of_two_steps_before(padded):
    """Catches one step or three in place of two, and Algorithm 1's early stop where there is no need of it."""
    policy = ByLoad(2, PAPER, delay=2, padded=padded)
    # by SPS (1, .5, .45): both nodes where the second is sure, else none, as the first alone never pays
    sure, unsure = [[0.8, 1.0]], [[0.8, 0.1]]
    found = [cut(policy, confidence)[0] for confidence in (sure, unsure, unsure, sure, sure, unsure)]
    assert found == [0, 0, 2, 0, 0, 2]


def joint_error(lengths: Lengths, seed: int, slots: int = 2, nodes: int = 2) -> float:
    """Largest difference between the joint distribution of the first two tokens of every slot, exactly as emitted, and
    the target's own, where the cut of each slot depends on confidences that have seen the tokens of all."""
    p, q = random_distribution(seed, 2), random_distribution(seed + 500, 2)
    noise = random.Random(seed)
    confidence = [{path: noise.choice((0.1, 0.6, 0.95)) for n in range(nodes) for path in product((0, 1), repeat=n)}
                  for _ in range(slots)]  # fmt: skip
    paths = list(product((0, 1), repeat=nodes))
    exact = torch.zeros(2, 2, dtype=torch.float64)
    for one, two in product((0, 1), repeat=2):
        exact[one, two] = p(())[one] * p((one,))[two]
    emitted = {(path, size): emitted_by(p, q, path, size) for path in paths for size in range(nodes + 1)}
    found, wanted = torch.zeros(4**slots, dtype=torch.float64), exact.flatten()
    for _ in range(slots - 1):
        wanted = torch.outer(wanted, exact.flatten()).flatten()
    for drafted in product(paths, repeat=slots):
        own = [[table[path[:n]] for n in range(nodes)] for table, path in zip(confidence, drafted, strict=True)]
        joint = torch.ones(1, dtype=torch.float64)
        for path, size in zip(drafted, lengths(survival_of(own)), strict=True):
            weight = torch.stack([q(path[:n])[token] for n, token in enumerate(path)]).prod()
            joint = torch.outer(joint, weight * emitted[path, size].flatten()).flatten()
        found += joint
    return float((found - wanted).abs().max())


def emitted_by(p: Callable, q: Callable, path: tuple[int, ...], size: int) -> Tensor:
    """Distribution of the first two tokens [2, 2] that a slot emits with this draft, of which `size` nodes stay."""
    rows = torch.stack([p(path[:n]) for n in range(len(path) + 1)])[None]
    drawn = torch.stack([q(path[:n]) for n in range(len(path))])[None]
    draft = Draft.chain(torch.tensor([path]), torch.tensor([size]), drawn)
    found = torch.zeros(2, 2, dtype=torch.float64)
    for chance, out in outcomes(draft, rows):
        first, *rest = out
        found[first] += chance * (torch.eye(2, dtype=torch.float64)[rest[0]] if rest else p((first,)))
    return found


def rate_of(seed: int) -> Callable[[int], float]:
    noise = random.Random(seed)
    seconds = list(accumulate(noise.choice((0.05, 0.05, 0.6)) for _ in range(20)))
    return lambda tokens: 1 / (1 + seconds[tokens])


def algorithm_1(seed: int) -> Lengths:
    return lambda survival: admitted(survival, rate_of(seed))


def algorithm_1_over_columns(seed: int) -> Lengths:
    means = sorted((random.Random(seed + 1).random() for _ in range(2)), reverse=True)

    def lengths(survival: Survival) -> list[int]:
        width = admitted_columns(columns(survival), len(survival), rate_of(seed), means)
        return [min(width, len(own)) for own in survival]

    return lengths


def a_fixed_number(seed: int) -> Lengths:
    return lambda survival: largest(survival, 1 + seed % 3)


def the_best_number(seed: int) -> Lengths:
    """Planted fault."""

    def lengths(survival: Survival) -> list[int]:
        gains = sorted((a for own in survival for a in own), reverse=True)
        return largest(survival, best_count(gains, len(survival), 1, rate_of(seed)))

    return lengths


@pytest.mark.parametrize("way", [algorithm_1, algorithm_1_over_columns, a_fixed_number], ids=lambda way: way.__name__)
def test_slots_that_decide_about_each_other_are_exact_together(way):
    """Catches a slot whose cut depends on its own later confidences by way of another slot's.  Joint distribution of
    two slots, summed over all drafts; the wanted one has no chance of a false alarm."""
    assert max(joint_error(way(seed), seed) for seed in range(12)) < 1e-12


def test_slots_that_look_ahead_are_caught():
    """The check above has teeth."""
    assert max(joint_error(the_best_number(seed), seed) for seed in range(12)) > 0.01


def policies(nodes: int) -> list[ByLoad]:
    made = [ByLoad(nodes, JAGGED), ByLoad(nodes, JAGGED, padded=False)]
    made += [ByLoad(nodes, JAGGED, delay=2), ByLoad(nodes, JAGGED, delay=2, padded=False)]
    return made


@pytest.mark.parametrize("way", range(4), ids=["columns", "nodes", "late columns", "late nodes"])
def test_a_later_confidence_never_moves_a_cut_whatever_was_learnt(way):
    """Catches every look ahead that the enumerations are too small for; with steps before that fill the means."""
    generator = torch.Generator().manual_seed(way)
    for case in range(400):
        slots, nodes = 1 + case % 3, 1 + case % 6
        one, other, before = torch.rand(3, slots, nodes, generator=generator) ** 0.3
        sizes = torch.randint(nodes + 1, (slots,), generator=generator)
        policy = policies(nodes)[way]
        policy._means = (torch.rand(nodes, generator=generator).cumprod(-1)).tolist()
        if case % 2 and policy.delay:
            policy.history.extend([before.cumprod(-1).tolist()] * 2)
        assert not moves_behind_its_cut(policy, sizes, one, other, case % slots)


def test_cuts_happen_in_the_contract():
    """Guards the test above against policies that keep all or nothing."""
    generator = torch.Generator().manual_seed(0)
    found: list[set[tuple[int, ...]]] = [set() for _ in range(4)]
    for case in range(50):
        confidence, before = torch.rand(2, 3, 6, generator=generator) ** (0.1 + case / 50)
        for way, policy in enumerate(policies(6)):
            policy.history.extend([before.cumprod(-1).tolist()] * policy.delay)
            found[way].add(tuple(policy.keep(state_of(3), torch.tensor([6, 6, 6]), confidence).tolist()))
    assert min(map(len, found)) >= 3
    assert len(found[1]) > 20 < len(found[3])


class Timed:
    """A policy that is told the table's seconds, so that its choices do not hang on this machine; notes its cuts."""

    def __init__(self, policy: ByLoad):
        self.policy, self.cut = policy, list[float]()

    def budget(self, state: DecodeState) -> Tensor:
        return self.policy.budget(state)

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        found = self.policy.keep(state, sizes, confidence)
        self.cut.append(float((found < sizes).float().mean()))
        return found

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None:
        rates, slots = self.policy.seconds.rates, len(sizes)
        assert rates is not None
        seconds = rates.seconds(slots, slots * (1 + int(sizes.max())))
        self.policy.observe(state, sizes, accepted, Timing(draft=0.01, verify=seconds))


TARGET = TableTarget.random(5)
KINDS = ("ngram", "small_model", "dflash", "dspark", "eagle3")


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("tries", [True, False])
def test_cuts_by_load_keep_the_distribution(padded, delay, tries):
    """Catches a cut that hangs on what it cuts, through the whole loop.  False alarm 1e-6."""
    slots = 1500
    table = StepRates({(slots, 1): 1.0, (slots, 2): 1.2, (slots, 4): 2.2, (slots, 5): 3.0})
    policy = Timed(ByLoad(4, table, delay=delay, padded=padded))
    if not tries:
        policy.policy.seconds.todo(slots).clear()
        policy.policy.is_confident, policy.policy._means = True, [0.6, 0.5, 0.4, 0.3]
    assert keeps_the_distribution(TARGET, Tree(TARGET, [-1, 0, 1, 2], "without"), policy, slots=slots)
    assert tries or max(policy.cut) > 0.2


@pytest.mark.parametrize("padded", first([True, False]))
@pytest.mark.parametrize("case", [case for case in cases() if case.kind in KINDS and not case.is_variant], ids=str)
def test_cuts_by_load_keep_the_distribution_of_the_packages_drafters(case, padded, workshop):
    """As above, with the package's own drafters, and their confidences where they have any.  False alarm 1e-6."""
    drafter, slots = workshop.build(case, TARGET), 1200
    table = StepRates({(slots, 1): 1.0, (slots, 2): 1.2, (slots, 3): 1.6, (slots, 5): 3.0})
    policy = Timed(ByLoad(drafter.limit, table, padded=padded))
    policy.policy.seconds.todo(slots).clear()
    policy.policy.is_confident, policy.policy._means = True, [0.8 - 0.1 * n for n in range(drafter.limit)]
    assert keeps_the_distribution(TARGET, drafter, policy, prompt=REPEATS, slots=slots)
    assert max(policy.cut) > 0.2 or not drafter.confidence_before_draw


def test_a_look_ahead_is_caught_through_the_whole_loop():
    """Planted fault: the paper's, slot by slot."""

    class Alone(Timed):
        def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
            assert confidence is not None
            own = zip(sizes.tolist(), confidence.tolist(), strict=True)
            found = [cut(self.policy, [each[:size]])[0] if size else 0 for size, each in own]
            self.policy.survival = None
            return torch.tensor(found)

    def judged(policy: ByLoad) -> bool:
        target = TableTarget.of([0.7, 0.3])
        drafter = Drawn(halves, 2, knows_the_token_before)
        policy.seconds.todo(2000).clear()
        return keeps_the_distribution(target, drafter, Alone(policy), slots=2000)

    rates = StepRates.by_tokens({1: 1.0, 2: 0.5, 3: 0.45})
    assert judged(ByLoad(2, rates))
    assert not judged(LookAhead(2, rates))


def test_confidences_that_are_none_do_not_last():
    """Catches a NaN, an infinite or a negative confidence that is remembered, and turns every later choice."""
    policy = ByLoad(3, StepRates.by_tokens({1: 1.0, 2: 0.9, 4: 0.8}))
    policy.seconds.todo(1).clear()
    state = state_of(1)
    for step in range(60):
        budget = policy.budget(state)
        wild = [float("nan"), float("inf"), -1.0, 7.0][step % 4]
        sizes = policy.keep(state, budget, torch.tensor([[0.9, wild, 0.9]]))
        state.reached = sizes.tolist()
        policy.observe(state, sizes, verdict([0]), Timing(verify=1.0))
    assert all(0 <= mean <= 1 for mean in policy.promises.means())
    assert 0 < policy.promises.scale < 10


# ── what it asks for ──────────────────────────────────────────────────────────────────────────────────────────────────


def settled(limit: int = LIMIT, rates: StepRates | None = JAGGED, live: int = 1, **options: Any) -> ByLoad:
    """A policy without first tries."""
    policy = ByLoad(limit, rates, **options)
    policy.seconds.todo(live).clear()
    return policy


def test_drafting_stops_and_resumes_at_different_rates(monkeypatch):
    """Catches a threshold at which every second decision changes all: between the two, what is on stays on, and what
    is off stays off."""
    policy, state, asked = settled(), state_of(1), dict[tuple[bool, float], bool]()
    for rate in (1.5, 1.01, 0.99, 1.01, 1.05):
        monkeypatch.setattr(policy, "rates", lambda room, rate=rate: {0: 1.0, LIMIT: rate})
        policy.decided, policy.probes.credit, policy.probes.left = policy.decided - policy.REST, -100.0, 0
        before, policy.depth = policy.is_on, LIMIT
        asked[before, rate] = int(policy.budget(state)[0]) > 0
    assert asked == {(True, 1.5): True, (True, 1.01): True, (True, 0.99): False, (False, 1.01): False,
                     (False, 1.05): True}  # fmt: skip


def test_a_slot_that_may_not_be_drafted_for_gets_none():
    """Catches a request's max_draft that the policy forgets, and slots beside it that lose theirs."""
    for policy in (settled(live=3), ByBatch({1: 8})):
        state = DecodeState(3, 100)
        for row, most in enumerate((None, 0, 2)):
            state.admit(row, Request([1, 2], 50, Sampling(), max_draft=most))
        for _ in range(40):
            budget = policy.budget(state)
            assert budget[1] == 0
            assert budget[2] <= 2
            state.reached = budget.tolist()
            policy.observe(state, budget, verdict(budget.tolist()), Timing(draft=0.01, verify=1.0))
        assert budget[0] > 2 == budget[2]


def test_what_a_slot_may_not_draft_is_not_expected_of_it():
    """Catches a rate that counts the tokens of drafts which nobody may have."""
    policy = settled(live=4)
    every, one = policy.rates([8, 8, 8, 8]), policy.rates([8, 0, 0, 0])
    assert every[0] == one[0]
    assert one[8] < 0.5 * every[8]


def test_no_budget_exceeds_the_room_that_is_left():
    """Catches tries and probes that forget the room, and a budget that is not looked at again before it is used up."""
    state, policy = DecodeState(2, 300), ByLoad(LIMIT, JAGGED)
    state.admit(0, Request([1], 1, Sampling()))
    state.admit(1, Request([1], 200, Sampling()))
    while len(state.tokens[1]) < 200:
        budget = policy.budget(state)
        assert budget[0] == 0
        assert 0 <= budget[1] <= state.room[1]
        state.tokens[1] += [0] * (1 + int(budget[1]))
        state.reached = budget.tolist()
        policy.observe(state, budget, verdict([0, int(budget[1])]), Timing(draft=0.01, verify=1.0))


def test_without_nodes_there_is_nothing_to_ask_for():
    """Catches a crash with a drafter that has no room at all."""
    assert max(World(2, Clock(64, 0.01, 0.02), alike(0.9)).play(ByLoad(0), 50).depths(50)) == 0


def test_a_delay_is_a_number_of_steps():
    with pytest.raises(ConfigError, match="delay must be at least 0 steps, got -1"):
        ByLoad(3, delay=-1)


def test_a_table_by_batch_is_read_at_the_live_slots():
    """Catches the entry above in place of the one below, and one read by all slots in place of the live ones."""
    policy, found = ByBatch({16: 0, 1: 7, 4: 3}), {}
    state = DecodeState(20, 100)
    for row in range(20):
        state.admit(row, Request([1, 2], 50, Sampling()))
        found[row + 1] = policy.budget(state).tolist()
    assert found == {live: [7 if live < 4 else 3 if live < 16 else 0] * live for live in range(1, 21)}


@pytest.mark.parametrize("wrong", [{}, {2: 3}, {1: -1}, {0: 3, 1: 2}])
def test_a_table_by_batch_that_leaves_slots_open_is_refused(wrong):
    with pytest.raises(ConfigError, match="a table by batch needs nodes of at least 0 by slots"):
        ByBatch(wrong)


# ── what it is for ────────────────────────────────────────────────────────────────────────────────────────────────────


def table(clock: Clock, factor: Callable[[], float] = lambda: 1.0) -> StepRates:
    """The clock's seconds times a factor for each size, as measured at the start."""
    sizes = [(2**power, n) for power in range(7) for n in range(1, LIMIT + 2)]
    return StepRates({(slots, n): clock.seconds(slots * n, 0)[1] * factor() for slots, n in sizes})


class Confident(World):
    """Every step of a slot is easy or hard, which the drafter's confidences know: the chances of its nodes."""

    def __init__(self, slots: int, clock: Clock, level: float, padded: bool = True):
        super().__init__(slots, clock, alike(level))
        self.level, self.padded = level, padded

    def play(self, policy: Policy, steps: int) -> Confident:
        for _ in range(steps):
            wanted, live = policy.budget(self.state).tolist(), len(self.state.rows)
            chances = [[self.random.betavariate(2 * self.level, 2 * (1 - self.level))] * LIMIT for _ in range(live)]
            sizes, depth = torch.tensor(wanted), max(wanted)
            if depth:
                sizes = policy.keep(self.state, sizes, torch.tensor(chances))
            self.state.reached = own = sizes.tolist()
            rows = live * (1 + max(own)) if self.padded else live + sum(own)
            accepted = [self._first(chance, size) for chance, size in zip(chances, own, strict=True)]
            policy.observe(self.state, sizes, verdict(accepted), self.clock.timing(rows, depth))
            self.budgets.append(own if depth else [-1] * live)
            expected = (sum(accumulate(chance[:size], mul)) for chance, size in zip(chances, own, strict=True))
            self.tokens.append(self.tokens[-1] + sum(1 + each for each in expected))
            self.elapsed.append(self.elapsed[-1] + sum(self.clock.seconds(rows, depth)))
        return self

    def _first(self, chances: Sequence[float], size: int) -> int:
        return next((n for n in range(size) if self.random.random() >= chances[n]), size)


PARALLEL = {
    "free rows": lambda: Clock(16, 0.02, 0.0, start=0.3),
    "dear rows": lambda: Clock(8, 0.04, 0.0, start=0.15),
    "rows by tiles": lambda: Tiles(8, 0.04, 0.0, start=0.15),
}


class Tiles(Clock):
    """Seconds rise by steps of 16 rows."""

    def seconds(self, rows: float, depth: int) -> tuple[float, float]:
        return super().seconds(-(-rows // 16) * 16, depth)


@pytest.mark.parametrize("learns", [True, False], ids=["learnt", "table"])
@pytest.mark.parametrize("slots", [1, 4, 32])
@pytest.mark.parametrize("level", first([0.6, 0.3, 0.85]))
@pytest.mark.parametrize("clock", PARALLEL.keys())
def test_with_confidences_it_comes_near_the_better_of_plain_and_every_fixed_depth(clock, level, slots, learns):
    """Catches wrong seconds, wrong gains, a switch that flaps and probes that are too dear.

    What is learnt while decoding is linear between the widths that were tried, so a tile is known from a table alone.
    """
    made = PARALLEL[clock]
    world = Confident(slots, made(), level).play(ByLoad(LIMIT, None if learns else table(made())), 500)
    best = max(Confident(slots, made(), level).play(Fixed(n), 350).rate(350) for n in (0, 1, 3, 5, LIMIT))
    assert world.rate(350) >= (0.97 if not learns else 0.9 if clock == "rows by tiles" else 0.95) * best


@pytest.mark.parametrize("level", [0.6, 0.85])
@pytest.mark.parametrize("clock", PARALLEL.keys())
def test_a_table_timed_beside_other_work_is_mended_while_decoding(clock, level):
    """Catches a table that is corrected as a whole, so its cheapest mistake is what is drafted."""
    made = PARALLEL[clock]
    best = max(Confident(4, made(), level).play(Fixed(n), 350).rate(350) for n in (0, 1, 3, 5, LIMIT))
    for seed in range(3):
        noise = random.Random(seed)
        spoilt = table(made(), lambda noise=noise: noise.lognormvariate(0, 0.4))
        world = Confident(4, made(), level).play(ByLoad(LIMIT, spoilt), 1000)
        assert world.rate(600) >= 0.97 * best


def test_confidences_bring_more_than_any_fixed_depth():
    """Catches confidences that decide nothing: where some steps are easy and some are hard, depth should follow."""
    clock = PARALLEL["dear rows"]
    world = Confident(4, clock(), 0.6).play(ByLoad(LIMIT, table(clock())), 500)
    best = max(Confident(4, clock(), 0.6).play(Fixed(n), 350).rate(350) for n in range(LIMIT + 1))
    assert world.rate(350) > 1.04 * best
    nodes = Confident(8, clock(), 0.6, padded=False).play(ByLoad(LIMIT, table(clock()), padded=False), 500)
    best = max(Confident(8, clock(), 0.6, padded=False).play(Fixed(n), 350).rate(350) for n in range(LIMIT + 1))
    assert nodes.rate(350) > 1.1 * best


@pytest.mark.parametrize("learns", [True, False], ids=["learnt", "table"])
@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("chances", CHANCES.values(), ids=CHANCES.keys())
@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS.keys())
def test_without_confidences_it_comes_within_a_twentieth_of_the_best_depth(clock, chances, slots, learns):
    """Catches acceptance by depth that is not used, or is used twice."""
    world = World(slots, clock(), chances).play(ByLoad(LIMIT, None if learns else table(clock())), 700)
    assert world.rate(500) >= 0.95 * world.best()


@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("clock", [*CLOCKS.values(), lambda: DEAR], ids=[*CLOCKS.keys(), "drafts of five steps"])
def test_worthless_drafts_cost_less_than_a_thirtieth(clock, slots):
    """Catches probes that are too dear or too many.  The first tries, which are dear, are left out."""
    world = World(slots, clock(), alike(0.02)).play(ByLoad(LIMIT, table(clock())), 700)
    assert world.rate(600) >= 0.967 * world.fixed(0)


def test_a_drafter_that_seldom_offers_a_draft_is_not_slower_than_plain():
    """Catches seconds of full drafts that are expected where most steps have none, as n-grams do."""
    for chance in (0.1, 0.9):
        world = World(4, Clock(4, 0.05, 0.0), alike(chance))
        world.offers = lambda size, world=world: size if world.random.random() < 0.1 else 0
        world.play(ByLoad(LIMIT, table(world.clock)), 800)
        assert world.rate(600) >= 0.95 * world.fixed(0)


def test_a_tree_is_asked_for_as_a_whole():
    """Catches confidences of a tree read as a chain's: node 0 is always wrong, and node 1, its sibling, always
    right."""
    policy, state, budgets = ByLoad(LIMIT, StepRates.by_tokens({1: 1.0, 9: 0.8})), state_of(1), list[int]()
    for _ in range(200):
        size = policy.budget(state)
        if int(size):
            size = policy.keep(state, size, torch.tensor([[0.01, 0.9, *[0.01] * 6]])[:, : int(size)])
        nodes = int(size)
        state.reached = [min(nodes, 1)]
        said = Accepted([[1] if nodes > 1 else []], [0], [0])
        policy.observe(state, size, said, Timing(draft=0.1 * nodes, verify=1.0))
        budgets.append(nodes)
    assert budgets[-100:].count(2) > 80


def test_drafting_resumes_in_the_step_in_which_the_batch_empties():
    """Catches a policy that must try again what its table says: sixteen slots do not pay, one does."""
    clock = PARALLEL["dear rows"]()
    world, policy = Confident(16, clock, 0.4), ByLoad(LIMIT, table(clock))
    policy.seconds.todo(1).clear()
    world.play(policy, 400)
    assert sum(max(budget) > 0 for budget in world.budgets[-100:]) < 30
    for row in range(1, 16):
        world.state.free(row)
    world.play(policy, 100)
    assert sum(max(budget) > 0 for budget in world.budgets[-100:]) > 90
    assert max(world.budgets[-100]) > 0


@pytest.mark.parametrize("learns", [True, False], ids=["learnt", "table"])
def test_it_stops_and_comes_back_with_the_acceptance(learns):
    """Catches a policy that never tries again, or believes its old counts for too long; with and without
    confidences."""
    for world in (World(1, CLOCKS["dear drafts"](), alike(0.0)), Confident(4, PARALLEL["dear rows"](), 0.02)):
        policy = ByLoad(LIMIT, None if learns else table(world.clock))
        world.play(policy, 500)
        assert sum(max(budget) <= 0 for budget in world.budgets[-100:]) >= 80
        world.level = 0.9
        world.becomes(alike(0.9)).play(policy, 500)
        assert sum(max(budget) > 0 for budget in world.budgets[-100:]) > 90


def test_a_head_that_promises_too_much_is_not_believed_for_long():
    """Catches confidences that are never compared with what was accepted."""
    policy, state = settled(rates=StepRates.by_tokens({1: 1.0, 9: 0.5})), state_of(1)
    for step in range(300):
        budget = policy.budget(state)
        sizes = policy.keep(state, budget, torch.full((1, int(budget)), 0.9)) if int(budget) else budget
        state.reached = sizes.tolist()
        accepted = verdict([int(int(sizes) > 0 and step % 5 == 0)])
        policy.observe(state, sizes, accepted, Timing(draft=0.1, verify=1 + int(sizes) / 8))
    assert policy.promises.scale < 0.3
    assert not policy.is_on


def test_equal_outcomes_and_timings_give_equal_cuts():
    """Catches noise of its own, and a look at the real clock."""
    first, second = (
        Confident(4, PARALLEL["dear rows"](), 0.6).play(ByLoad(LIMIT, table(PARALLEL["dear rows"]())), 300).budgets
        for _ in "ab"
    )
    assert first == second


class Sure(Proposer):
    """Knows the text to come, and says how sure it is; a chain."""

    confidence_before_draw, limit = True, 6

    def __init__(self, texts: Sequence[list[int]]):
        self.texts = texts

    def propose(self, memory: torch.Generator, state: DecodeState, budget: Tensor) -> Draft:
        tokens = torch.zeros(len(state.rows), 6, dtype=torch.int64)
        for b, row in enumerate(state.rows):
            text = state.tokens[row]
            coming = next(known for known in self.texts if known[: len(text)] == text)[len(text) :][:6]
            tokens[b, : len(coming)] = torch.tensor(coming, dtype=torch.int64)
        confidence = torch.rand(tokens.shape, generator=memory) ** 0.2
        return Draft.chain(tokens, budget, None, confidence)


@pytest.mark.parametrize("options", [{}, {"padded": False}, {"delay": 2}], ids=str)
def test_greedy_text_is_the_targets_own_and_a_request_may_decline(options, target, prompts, plain):
    """Catches slots used again, cuts that lose tokens, and a draft for a request that wants none."""
    counts = [9, 17, 5, 12, 3, 8, 14, 11]
    wanted = [plain(target, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    drafter = Sure([prompt + plain(target, prompt, 40) for prompt in prompts])
    requests = [
        Request(prompt, count, Sampling(), max_draft=0 if n % 3 == 2 else None)
        for n, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    found: list[list[int]] = [[] for _ in requests]
    accepted = [0] * len(requests)
    for progress in serve(target, requests, drafter, policy=settled(6, live=3, **options), slots=3):
        found[progress.request] += progress.tokens
        accepted[progress.request] += progress.accepted
        assert requests[progress.request].max_draft is None or progress.reached == 0
    assert found == wanted
    assert sum(accepted) > 10


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_verifying_all_that_is_drafted_is_caught(monkeypatch):
    """Planted fault: the load is not looked at."""
    clock = PARALLEL["free rows"]

    def ratio() -> float:
        world = Confident(16, clock(), 0.6).play(ByLoad(LIMIT, table(clock())), 500)
        best = max(Confident(16, clock(), 0.6).play(Fixed(n), 350).rate(350) for n in (0, 1, 3, 5, LIMIT))
        return world.rate(350) / best

    assert ratio() >= 0.97
    monkeypatch.setattr(ByLoad, "_lengths", lambda self, survival: [len(own) for own in survival])
    monkeypatch.setattr(ByLoad, "OFF", 0.0)
    assert ratio() < 0.97


def test_seconds_of_drafts_that_are_forgotten_are_caught(monkeypatch):
    """Planted fault: drafts seem free, and so it drafts where they cost five steps."""
    monkeypatch.setattr(by_load.StepSeconds, "draft", lambda self, live, depth: 0.0)
    world = World(1, DEAR, alike(0.9)).play(ByLoad(LIMIT, table(DEAR)), 700)
    assert world.rate(600) < 0.967 * world.fixed(0)
