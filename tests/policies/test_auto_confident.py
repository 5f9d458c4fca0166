"""Auto with confidences and with a table: columns against plain arithmetic, cuts that later confidences must not move,
and what it is for against a simulated clock.  Seeds are fixed, so a run that passed passes again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest
import torch
from conftest import first
from contracts.test_acceptance_rule import moves_behind_its_cut, state_of
from policies.test_auto import CHANCES, CLOCKS, LIMIT, Clock, World, alike, verdict

from outrider.costs.passes import PassSeconds
from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.policies.auto import Auto
from outrider.policies.fixed import Fixed
from outrider.policies.survival import admitted_columns, columns
from outrider.sampling.settings import Sampling

JAGGED = PassSeconds(
    {(slots, width): 1 + 0.3 * (slots * width // 4) for slots in (1, 2, 3, 8) for width in range(1, 10)}
)
"""Seconds rise by steps of four tokens."""


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


def test_a_later_confidence_never_moves_a_cut_whatever_was_learnt():
    """Catches every look ahead that enumerations are too small for; with steps before that fill the means."""
    generator, found = torch.Generator().manual_seed(0), set()
    for case in range(120):
        slots, nodes = 1 + case % 3, 1 + case % 6
        one, other = torch.rand(2, slots, nodes, generator=generator) ** 0.3
        sizes = torch.randint(nodes + 1, (slots,), generator=generator)
        policy = Auto(nodes, JAGGED)
        policy._means = (torch.rand(nodes, generator=generator).cumprod(-1)).tolist()
        assert not moves_behind_its_cut(policy, sizes, one, other, case % slots)
        found.add(tuple(policy.keep(state_of(slots), torch.full((slots,), nodes), one).tolist()))
    assert len(found) > 5


def test_confidences_that_are_none_do_not_last():
    """Catches a NaN, an infinite or a negative confidence that is remembered, and turns every later choice."""
    policy = Auto(3, PassSeconds.by_tokens({1: 1.0, 2: 0.9, 4: 0.8}))
    policy.costs.untried(1).clear()
    state = state_of(1)
    for step in range(60):
        budget = policy.budget(state)
        wild = [float("nan"), float("inf"), -1.0, 7.0][step % 4]
        sizes = policy.keep(state, budget, torch.tensor([[0.9, wild, 0.9]]))
        state.reached = sizes.tolist()
        policy.observe(state, sizes, verdict([0]), Timing(verify=1.0))
    assert all(0 <= mean <= 1 for mean in policy.promises.means())
    assert 0 < policy.promises.scale < 10


def settled(limit: int = LIMIT, rates: PassSeconds | None = JAGGED, live: int = 1) -> Auto:
    """A policy without first tries."""
    policy = Auto(limit, rates)
    policy.costs.untried(live).clear()
    return policy


def test_a_slot_that_may_not_be_drafted_for_gets_none():
    """Catches a request's max_draft that the policy forgets, and slots beside it that lose theirs."""
    for policy in (settled(live=3),):
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


def table(clock: Clock) -> PassSeconds:
    """The clock's seconds, as measured at the start."""
    sizes = [(2**power, n) for power in range(7) for n in range(1, LIMIT + 2)]
    return PassSeconds({(slots, n): clock.seconds(slots * n, 0)[1] for slots, n in sizes})


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
    world = Confident(slots, made(), level).play(Auto(LIMIT, None if learns else table(made())), 500)
    best = max(Confident(slots, made(), level).play(Fixed(n), 350).rate(350) for n in (0, 1, 3, 5, LIMIT))
    assert world.rate(350) >= (0.95 if learns else 0.97) * best


@pytest.mark.parametrize(("chances", "slots", "learns"), [("fair", 1, True), ("falling", 16, False)])
@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS.keys())
def test_without_confidences_it_comes_within_a_twentieth_of_the_best_depth(clock, chances, slots, learns):
    """Catches acceptance by depth that is not used, or is used twice."""
    world = World(slots, clock(), CHANCES[chances]).play(Auto(LIMIT, None if learns else table(clock())), 700)
    assert world.rate(500) >= 0.95 * world.best()


def test_drafting_resumes_in_the_step_in_which_the_batch_empties():
    """Catches a policy that must try again what its table says: sixteen slots do not pay, one does."""
    clock = PARALLEL["dear rows"]()
    world, policy = Confident(16, clock, 0.4), Auto(LIMIT, table(clock))
    policy.costs.untried(1).clear()
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
        policy = Auto(LIMIT, None if learns else table(world.clock))
        world.play(policy, 500)
        assert sum(max(budget) <= 0 for budget in world.budgets[-100:]) >= 80
        world.level = 0.9
        world.becomes(alike(0.9)).play(policy, 500)
        assert sum(max(budget) > 0 for budget in world.budgets[-100:]) > 90


def test_a_head_that_promises_too_much_is_not_believed_for_long():
    """Catches confidences that are never compared with what was accepted."""
    policy, state = settled(rates=PassSeconds.by_tokens({1: 1.0, 9: 0.5})), state_of(1)
    for step in range(300):
        budget = policy.budget(state)
        sizes = policy.keep(state, budget, torch.full((1, int(budget)), 0.9)) if int(budget) else budget
        state.reached = sizes.tolist()
        accepted = verdict([int(int(sizes) > 0 and step % 5 == 0)])
        policy.observe(state, sizes, accepted, Timing(draft=0.1, verify=1 + int(sizes) / 8))
    assert policy.promises.scale < 0.3
    assert not policy.is_on
