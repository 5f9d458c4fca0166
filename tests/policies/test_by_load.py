"""ByLoad: Algorithm 1 against every choice there is, the paper's counter-example by enumeration, and what it is for
against a simulated clock.  Seeds are fixed, so a run that passed passes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
import torch
from conftest import first
from contracts.test_acceptance_rule import moves_behind_its_cut, state_of
from hypothesis import given
from hypothesis import strategies as st
from policies.test_adaptive import CHANCES, CLOCKS, LIMIT, Clock, World, alike, verdict

from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.errors import ConfigError
from outrider.policies.by_load import ByBatch, ByLoad
from outrider.policies.fixed import Fixed
from outrider.policies.scheduler import Survival, admitted, admitted_columns, columns, largest
from outrider.policies.step_rates import StepRates
from outrider.sampling.settings import Sampling

JAGGED = StepRates({(slots, width): 1 + 0.3 * (slots * width // 4) for slots in (1, 2, 3, 8) for width in range(1, 10)})
"""Seconds rise by steps of four tokens."""


def survival_of(confidence: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(accumulate(own, mul)) for own in confidence]


def theta(survival: Survival, lengths: Sequence[int], rate: Callable[[int], float]) -> float:
    """Expected tokens per second, as the paper defines them."""
    expected = sum(1 + sum(own[:length]) for own, length in zip(survival, lengths, strict=True))
    return expected * rate(len(survival) + sum(lengths))


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.05, 1), min_size=10, max_size=10),
)
def test_algorithm_1_stops_at_the_first_node_that_does_not_raise_the_rate(confidence, rates):
    """Catches a wrong order of nodes, a wrong count of tokens or of what is expected, and a search that goes on behind
    a step of the table; by the plainest loop over all nodes, sorted."""
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


PAPER = StepRates.by_tokens({1: 1.0, 2: 0.5, 3: 0.45})


def cut(policy: ByLoad, confidence: Sequence[Sequence[float]]) -> list[int]:
    sizes = torch.tensor([len(own) for own in confidence])
    width = int(sizes.max())
    padded = torch.tensor([[*own, *[1.0] * (width - len(own))] for own in confidence], dtype=torch.float64)
    return policy.keep(state_of(len(sizes)), sizes, padded).tolist()


@pytest.mark.parametrize("padded", [True, False])
def test_the_number_of_nodes_is_that_of_two_steps_before(padded):
    """Catches one step or three in place of two, and Algorithm 1's early stop where there is no need of it."""
    policy = ByLoad(2, PAPER, delay=2, padded=padded)
    # by SPS (1, .5, .45): both nodes where the second is sure, else none, as the first alone never pays
    sure, unsure = [[0.8, 1.0]], [[0.8, 0.1]]
    found = [cut(policy, confidence)[0] for confidence in (sure, unsure, unsure, sure, sure, unsure)]
    assert found == [0, 0, 2, 0, 0, 2]


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("padded", [True, False])
def test_a_later_confidence_never_moves_a_cut_whatever_was_learnt(padded, delay):
    """Catches every look ahead that enumerations are too small for; with steps before that fill the means."""
    generator, found = torch.Generator().manual_seed(0), set()
    for case in range(120):
        slots, nodes = 1 + case % 3, 1 + case % 6
        one, other, before = torch.rand(3, slots, nodes, generator=generator) ** 0.3
        sizes = torch.randint(nodes + 1, (slots,), generator=generator)
        policy = ByLoad(nodes, JAGGED, padded=padded, delay=delay)
        policy._means = (torch.rand(nodes, generator=generator).cumprod(-1)).tolist()
        if case % 2 and delay:
            policy.history.extend([before.cumprod(-1).tolist()] * 2)
        assert not moves_behind_its_cut(policy, sizes, one, other, case % slots)
        found.add(tuple(policy.keep(state_of(slots), torch.full((slots,), nodes), one).tolist()))
    assert len(found) > 5


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


def settled(limit: int = LIMIT, rates: StepRates | None = JAGGED, live: int = 1, **options: Any) -> ByLoad:
    """A policy without first tries."""
    policy = ByLoad(limit, rates, **options)
    policy.seconds.todo(live).clear()
    return policy


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
    policy = settled(live=4)
    every, one = policy.rates([8, 8, 8, 8]), policy.rates([8, 0, 0, 0])
    assert every[0] == one[0]
    assert one[8] < 0.5 * every[8], "tokens of drafts which nobody may have"


def test_a_table_by_batch_is_read_at_the_live_slots():
    """Catches the entry above in place of the one below, one read by all slots in place of the live ones, and settings
    without meaning."""
    policy, found = ByBatch({16: 0, 1: 7, 4: 3}), {}
    state = DecodeState(20, 100)
    for row in range(20):
        state.admit(row, Request([1, 2], 50, Sampling()))
        found[row + 1] = policy.budget(state).tolist()
    assert found == {live: [7 if live < 4 else 3 if live < 16 else 0] * live for live in range(1, 21)}
    for wrong in ({}, {2: 3}, {1: -1}, {0: 3, 1: 2}):
        with pytest.raises(ConfigError, match="a table by batch needs nodes of at least 0 by slots"):
            ByBatch(wrong)
    with pytest.raises(ConfigError, match="delay must be at least 0 steps, got -1"):
        ByLoad(3, delay=-1)


def table(clock: Clock) -> StepRates:
    """The clock's seconds, as measured at the start."""
    sizes = [(2**power, n) for power in range(7) for n in range(1, LIMIT + 2)]
    return StepRates({(slots, n): clock.seconds(slots * n, 0)[1] for slots, n in sizes})


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


PARALLEL = {"free rows": lambda: Clock(16, 0.02, 0.0, start=0.3), "dear rows": lambda: Clock(8, 0.04, 0.0, start=0.15)}


@pytest.mark.parametrize("level", first([0.6, 0.3, 0.85]))
@pytest.mark.parametrize(
    ("clock", "slots", "learns"), [("free rows", 1, True), ("free rows", 32, False), ("dear rows", 16, True)]
)
def test_with_confidences_it_comes_near_the_better_of_plain_and_every_fixed_depth(clock, level, slots, learns):
    """Catches wrong seconds, wrong gains, a switch that flaps and probes that are too dear."""
    made = PARALLEL[clock]
    world = Confident(slots, made(), level).play(ByLoad(LIMIT, None if learns else table(made())), 500)
    best = max(Confident(slots, made(), level).play(Fixed(n), 350).rate(350) for n in (0, 1, 3, 5, LIMIT))
    assert world.rate(350) >= (0.95 if learns else 0.97) * best


@pytest.mark.parametrize(("chances", "slots", "learns"), [("fair", 1, True), ("falling", 16, False)])
@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS.keys())
def test_without_confidences_it_comes_within_a_twentieth_of_the_best_depth(clock, chances, slots, learns):
    """Catches acceptance by depth that is not used, or is used twice."""
    world = World(slots, clock(), CHANCES[chances]).play(ByLoad(LIMIT, None if learns else table(clock())), 700)
    assert world.rate(500) >= 0.95 * world.best()


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
