"""Auto against a simulated clock: seconds from a formula, acceptance from a seeded coin; nothing here sleeps.

Seeds are fixed, so a run that passed passes again.  Rates are expectations over the budgets that were played, so that
they hang on the choices alone and not on the luck of the coin.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import pytest
import torch

from outrider.decoding.accept import Accepted
from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.policies.auto import Auto
from outrider.sampling.settings import Sampling

LIMIT = 8
Chances = Callable[[int], Sequence[float]]
"""Of a slot: the chance of each node to be kept, given that the one before it was."""


class Clock:
    """Seconds of a pass over so many rows and of a draft so deep, with noise and now and then an outlier."""

    def __init__(self, free_rows: float, per_row: float, draft: float, start: float = 0.0):
        self.free_rows, self.per_row, self.draft, self.start = free_rows, per_row, draft, start
        self.random = random.Random(1)

    def seconds(self, rows: float, depth: int) -> tuple[float, float]:
        """Draft and pass, without noise: a pass is flat up to `free_rows`, then grows (the roofline)."""
        return (self.start + self.draft * depth if depth else 0.0), 1.0 + self.per_row * max(0.0, rows - self.free_rows)

    def timing(self, rows: int, depth: int) -> Timing:
        draft, verify = (part * self.random.uniform(0.9, 1.1) for part in self.seconds(rows, depth))
        outlier = 20.0 if self.random.random() < 0.005 else 1.0
        return Timing(draft=draft, verify=0.9 * verify * outlier, other=0.1 * verify)


class World:
    """Slots that accept by their chances, and a clock; what a policy does in it is played step by step."""

    def __init__(self, slots: int, clock: Clock, chances: Chances, seed: int = 0):
        self.clock, self.random = clock, random.Random(seed)
        self.text_steps, self.prompt, self.token_s = 0, 100, 0.0
        """Steps of a text, 0: it never ends; tokens of its prompt; and the drafter's seconds for each of these."""
        self.state = DecodeState(slots, 10**9)
        for row in range(slots):
            self.state.admit(row, Request([1, 2], 10**8, Sampling()))
        self.becomes(chances)
        self.budgets: list[list[int]] = []
        self.tokens, self.elapsed = [0.0], [0.0]
        """Expected, so far."""

    def becomes(self, chances: Chances) -> World:
        self.chances = [list(chances(row)) for row in range(len(self.state.tokens))]
        self.worth = [[0.0, *accumulate(accumulate(mine, mul))] for mine in self.chances]
        return self

    def play(self, policy: Policy, steps: int) -> World:
        for step in range(steps):
            if self.text_steps and step % self.text_steps == 0:
                self._next_texts()
            wanted = torch.minimum(policy.budget(self.state), torch.tensor(self.state.room)).clamp(0, LIMIT).tolist()
            live = list(zip(self.state.rows, wanted, strict=True))
            self.state.reached, self.state.is_drafting = wanted, any(wanted)
            rows, depth = len(wanted) * (1 + max(wanted)), max(wanted)
            kept = verdict([self._kept(row, size) for row, size in live])
            policy.observe(self.state, torch.tensor(wanted), kept, self.clock.timing(rows, depth))
            self.budgets.append(wanted)
            self.tokens.append(self.tokens[-1] + sum(1 + self.worth[row][size] for row, size in live))
            self.elapsed.append(self.elapsed[-1] + sum(self.clock.seconds(rows, depth)))
        return self

    def _next_texts(self) -> None:
        for row in list(self.state.rows):
            self.state.free(row)
            self.state.admit(row, Request([1] * self.prompt, 10**8, Sampling()))
            if self.state.is_drafting:
                self.state.read_s += self.prompt * self.token_s
                self.state.read_tokens += self.prompt
                self.elapsed[-1] += self.prompt * self.token_s

    def rate(self, last: int) -> float:
        """Committed tokens per second of the last steps."""
        return (self.tokens[-1] - self.tokens[-1 - last]) / (self.elapsed[-1] - self.elapsed[-1 - last])

    def fixed(self, nodes: int) -> float:
        """Committed tokens per second of a fixed budget."""
        rows = self.state.rows
        return sum(1 + self.worth[row][nodes] for row in rows) / sum(self.clock.seconds(len(rows) * (1 + nodes), nodes))

    def best(self) -> float:
        return max(map(self.fixed, range(LIMIT + 1)))

    def depths(self, last: int) -> list[int]:
        return [max(budget) for budget in self.budgets[-last:]]

    def _kept(self, row: int, size: int) -> int:
        return next((n for n in range(size) if self.random.random() >= self.chances[row][n]), size)


def verdict(kept: Sequence[int]) -> Accepted:
    return Accepted([list(range(count)) for count in kept], [0] * len(kept), [0] * len(kept))


def alike(chance: float) -> Chances:
    return lambda row: [chance] * LIMIT


def falling(row: int) -> Sequence[float]:
    return [0.9 * 0.85**n for n in range(LIMIT)]


CLOCKS = {
    "free rows, cheap drafts": lambda: Clock(64, 0.01, 0.02),
    "dear drafts": lambda: Clock(64, 0.01, 0.25),
    "dear rows": lambda: Clock(4, 0.05, 0.02),
    "a parallel drafter": lambda: Clock(16, 0.02, 0.0, start=0.3),
}
CHANCES = {"poor": alike(0.3), "fair": alike(0.6), "good": alike(0.9), "falling": falling}
DEAR = Clock(64, 0.01, 5.0)
"""Drafts that cost more than all they could bring."""


@pytest.mark.parametrize(
    ("clock", "chances", "slots"),
    [
        ("free rows, cheap drafts", "falling", 1), ("free rows, cheap drafts", "poor", 16), ("dear drafts", "fair", 1),
        ("dear drafts", "good", 16), ("dear rows", "good", 1), ("dear rows", "falling", 16),
        ("a parallel drafter", "poor", 1), ("a parallel drafter", "fair", 16),
    ],
)  # fmt: skip
def test_it_comes_within_a_twentieth_of_the_best_fixed_budget(clock, chances, slots):
    """Catches a wrong gain, wrong seconds, exploring that costs too much, seconds that believe outliers, and flapping
    between depths."""
    world = World(slots, CLOCKS[clock](), CHANCES[chances]).play(Auto(LIMIT), 500)
    assert world.rate(350) >= 0.95 * world.best()


@pytest.mark.parametrize(
    ("clock", "chance", "slots"),
    [(CLOCKS["dear drafts"], 0.02, 1), (CLOCKS["dear rows"], 0.02, 16), (lambda: DEAR, 0.9, 1)],
    ids=["dear drafts", "dear rows", "drafts of five steps that are right"],
)
def test_worthless_drafts_cost_less_than_a_twentieth(clock, chance, slots):
    """Catches probes that are too dear or too many, and a policy that looks at acceptance alone.  The first tries,
    which are dear, are left out."""
    world = World(slots, clock(), alike(chance)).play(Auto(LIMIT), 700)
    assert world.rate(600) >= 0.95 * world.fixed(0)


@pytest.mark.parametrize(("clock", "slots"), [("dear drafts", 1), ("dear rows", 16)])
def test_it_comes_back_when_acceptance_returns(clock, slots):
    """Catches a policy that never tries again, or believes its old counts for too long."""
    world, policy = World(slots, CLOCKS[clock](), alike(0.0)), Auto(LIMIT)
    assert world.play(policy, 800).rate(600) >= 0.97 * world.fixed(0)
    world.becomes(alike(0.9)).play(policy, 400)
    assert world.rate(150) >= 0.93 * world.best()


def test_it_comes_back_when_drafts_become_cheap():
    """Catches a policy that never measures the draft again while it is off."""
    world, policy = World(1, Clock(64, 0.01, 1.5), alike(0.8)), Auto(LIMIT)
    assert world.play(policy, 600).depths(100).count(0) >= 90
    world.clock = Clock(64, 0.01, 0.02)
    assert world.play(policy, 1500).rate(200) >= 0.93 * world.best()


def test_each_runner_has_seconds_of_its_own():
    """Catches drafts that a whole step makes for little, and that are left out since they are dear by several calls;
    and seconds that are learnt anew whenever the runner changes."""
    dear, cheap = Clock(64, 0.01, 1.5), Clock(64, 0.01, 0.02)
    world, policy = World(1, dear, alike(0.8)), Auto(LIMIT)
    assert world.play(policy, 600).depths(100).count(0) >= 90
    world.state.runner, world.clock = "whole", cheap
    assert world.play(policy, 60).rate(40) >= 0.9 * world.best()
    world.state.runner, world.clock = "plain", dear
    assert world.play(policy, 40).depths(40).count(0) >= 36


def test_it_follows_a_text_that_changes():
    """Catches counts that fade too slowly, and an acceptance that is never questioned."""
    world, policy = World(1, Clock(64, 0.01, 0.1), alike(0.95)), Auto(LIMIT)
    world.play(policy, 1000).becomes(alike(0.3)).play(policy, 300)
    assert world.rate(150) >= 0.93 * world.best()


def test_a_new_request_is_a_new_text():
    """Catches counts that outlive their request: with them it takes longer to see that the next text is another."""
    world, policy = World(1, Clock(64, 0.01, 0.1), alike(0.9)), Auto(LIMIT)
    world.play(policy, 600).state.free(0)
    weight = policy.acceptance.tests[0]
    world.state.admit(0, Request([1, 2], 10**8, Sampling()))
    policy.budget(world.state)
    assert policy.acceptance.tests[0] == policy.acceptance.NEW_TEXT < weight / 5


def test_unlike_slots_are_asked_for_what_is_best_for_all():
    """Catches a mean acceptance that is raised to a power: of unlike slots the longest drafts are kept far more
    often."""
    world = World(4, Clock(64, 0.01, 0.1), lambda row: [0.95 if row % 2 else 0.1] * LIMIT)
    world.play(Auto(LIMIT), 500)
    assert world.rate(350) >= 0.95 * world.best()


@pytest.mark.parametrize(("token_s", "is_on"), [(0.01, True), (1.0, False)])
def test_reading_prompts_is_part_of_what_drafting_costs(token_s, is_on):
    """Catches a policy that drafts because its steps are faster, while the drafter's reading of every prompt takes more
    than they save."""
    world = World(2, Clock(64, 0.01, 0.05), alike(0.7))
    world.text_steps, world.prompt, world.token_s = 50, 100, token_s
    depths = world.play(Auto(LIMIT), 1500).depths(500)
    assert depths.count(0) < 50 if is_on else depths.count(0) > 400


def test_a_tree_is_asked_for_as_a_whole():
    """Catches chances of a tree read as a chain's: here node 0 is always wrong, and its sibling, node 1, always
    right."""
    policy = Auto(LIMIT)
    state = World(1, DEAR, alike(0.5)).state
    budgets = []
    for _ in range(200):
        size = int(policy.budget(state)[0])
        right = size > 1
        state.reached = [min(size, 1)]
        said = Accepted([[1] if right else []], [0], [0])
        policy.observe(state, torch.tensor([size]), said, Timing(draft=0.05 * size, verify=1.0))
        budgets.append(size)
    assert budgets[-100:].count(2) > 90


def test_no_budget_exceeds_the_room_that_is_left():
    """Catches tries and probes that forget the room, a budget that is not looked at again before it is used up, and
    steps of a slot with none; and a crash with a drafter that has no room at all."""
    state, policy = DecodeState(2, 300), Auto(LIMIT)
    state.admit(0, Request([1], 1, Sampling()))
    state.admit(1, Request([1], 200, Sampling()))
    while len(state.tokens[1]) < 200:
        budget = policy.budget(state)
        assert budget[0] == 0
        assert 0 <= budget[1] <= state.room[1]
        state.tokens[1] += [0] * (1 + int(budget[1]))
        state.reached = budget.tolist()
        policy.observe(state, budget, verdict([0, int(budget[1])]), Timing(draft=0.01, verify=1.0))
    assert max(World(2, Clock(64, 0.01, 0.02), alike(0.9)).play(Auto(0), 50).depths(50)) == 0
