"""ByConfidence stops where nodes are unlikely: what it cuts, what its shares follow, and that the output stays
exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import cases
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import Drawn, Proposer, TableTarget, Tree
from contracts.test_acceptance_rule import REPEATS
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.generation import generate, serve
from outrider.policies import by_confidence
from outrider.policies.by_confidence import ByConfidence
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling

TARGET = TableTarget.random(5)
KINDS = ("ngram", "small_model", "dflash", "dspark")
CASES = [case for case in cases() if case.kind in KINDS and not case.is_variant]
STATE = DecodeState(1, 100)
"""Of no interest to it but for the number of live slots."""


def told(
    policy: ByConfidence, sizes: Sequence[int], paths: Sequence[list[int]], following: Sequence[int] | None = None
) -> None:
    """One step's outcome."""
    accepted = Accepted(paths, following or [0] * len(paths), [0] * len(paths))
    policy.observe(STATE, torch.tensor(sizes), accepted, Timing())


# ── what it cuts ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), min_size=1, max_size=3),
    st.floats(0.0625, 1, width=32),
    st.data(),
)
def test_a_draft_is_verified_up_to_the_first_node_that_is_unlikely_to_be_reached_and_kept(confidence, least, data):
    """Catches a mean in place of the product, a node after an unlikely one, padding that is kept; by hand."""
    sizes = [data.draw(st.integers(0, 4)) for _ in confidence]
    policy = ByConfidence(4, least)
    # what was kept before is of no interest where the drafter says it beforehand
    for _ in range(20):
        told(policy, [4], [[]])
    wanted = []
    for size, own in zip(sizes, torch.tensor(confidence), strict=True):
        products = own.cumprod(-1).tolist()
        wanted.append(next((n for n in range(size) if products[n] < least), size))
    assert policy.keep(STATE, torch.tensor(sizes), torch.tensor(confidence)).tolist() == wanted


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_without_confidences_every_slot_is_cut_before_the_first_node_that_is_seldom_kept(sizes):
    """Catches a node after a rare one that is verified, and slots of their own numbers."""
    policy = ByConfidence(4, 0.4)
    assert policy.keep(STATE, torch.tensor(sizes), None).tolist() == sizes
    for _ in range(200):
        told(policy, [4], [[0, 1, 3]])
    assert policy.keep(STATE, torch.tensor(sizes), None).tolist() == [min(size, 2) for size in sizes]


def test_as_many_nodes_are_asked_for_as_it_was_made_for():
    """Catches a budget of one slot for all, and one that shrinks with the shares: a node never asked for never comes
    back."""
    policy, state = ByConfidence(3, 0.4), DecodeState(3, 100)
    for row in (0, 2):
        state.admit(row, Request([1], 9, Sampling()))
    for _ in range(50):
        told(policy, [3, 3], [[], []])
    assert policy.budget(state).tolist() == [3, 3]
    assert policy.keep(state, torch.tensor([3, 3]), None).tolist() == [0, 0]


# ── what a share follows ──────────────────────────────────────────────────────────────────────────────────────────────


def taught(chances: Sequence[float], steps: int, policy: ByConfidence) -> ByConfidence:
    """After chains whose node n is kept with chances[n], given that the one before it was."""
    noise = torch.Generator().manual_seed(0)
    for _ in range(steps):
        kept = 0
        while kept < len(chances) and float(torch.rand(1, generator=noise)) < chances[kept]:
            kept += 1
        told(policy, [len(chances)], [list(range(kept))])
    return policy


def test_a_share_is_how_often_a_node_was_kept():
    """Catches a chance that takes the node before it for granted: 0.5 of 0.8 of 0.9."""
    found = taught([0.9, 0.8, 0.5, 0.2], 1500, ByConfidence(4, 0.3)).shares()
    assert found == pytest.approx([0.9, 0.72, 0.36, 0.072], abs=0.1)


def test_a_share_follows_a_text_that_changes():
    """Catches counts that are never forgotten."""
    policy = taught([0.9, 0.9], 2000, ByConfidence(2, 0.3))
    assert taught([0.1, 0.9], 1000, policy).shares() == pytest.approx([0.1, 0.09], abs=0.1)


def test_a_node_is_known_by_its_number_in_a_tree():
    """Catches depths counted in place of nodes: the younger sibling is right, and its second child."""
    policy = ByConfidence(4, 0.3)
    for _ in range(300):
        told(policy, [4, 4], [[1, 3], [1, 3]])
    low, high, cut, last = policy.shares()
    assert max(low, cut) < 0.1
    assert min(high, last) > 0.9


def test_a_node_that_was_not_there_was_not_tried():
    """Catches short drafts that count as rejections; and a slot that ended in mid-block, whose later nodes show
    nothing."""
    policy = ByConfidence(3, 0.3)
    for _ in range(300):
        told(policy, [1, 0], [[0], []])
    first, second, third = policy.shares()
    # a share that knows nothing is taken for the one before it
    assert first == pytest.approx(second, abs=0.01) == pytest.approx(third, abs=0.01)
    assert first > 0.9
    before = policy.shares()
    told(policy, [3, 3], [[], [0]], following=[-1, -1])
    assert policy.shares() == pytest.approx(before, abs=0.01)
    told(policy, [3], [[]])
    assert policy.shares()[2] < before[2] - 0.1


def test_nothing_known_is_worth_a_try():
    """Catches a policy that begins by cutting."""
    policy = ByConfidence(5, 0.6)
    assert policy.shares() == [by_confidence.GUESS] * 5
    assert policy.keep(STATE, torch.tensor([5]), None).tolist() == [5]


def test_what_is_not_tried_any_more_is_tried_again_now_and_then_and_trusted_when_it_returns():
    """Catches a drafter that fails for a while, is cut at its first node, and so never comes back; or is never cut."""
    policy, tried = ByConfidence(2, 0.3), []
    for step in range(3000):
        size = int(policy.keep(STATE, torch.tensor([2]), None))
        tried.append(size > 0)
        is_right = step >= 2000
        told(policy, [size], [list(range(size)) if is_right else []])
    assert all(tried[:3])
    assert 0.005 < sum(tried[100:2000]) / 1900 < 0.05
    assert all(tried[2200:])


# ── exact ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Watching(ByConfidence):
    """Notes what share of each step's drafts was cut."""

    def __init__(self, nodes: int, least: float):
        super().__init__(nodes, least)
        self.cut: list[float] = []

    def keep(self, state: DecodeState, sizes: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
        found = super().keep(state, sizes, confidence)
        self.cut.append(float((found < sizes).float().mean()))
        return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stopping_where_nodes_are_unlikely_keeps_the_distribution(case, workshop):
    """Catches a confidence that has seen its own token, and a q that no longer fits its node.  False alarm 1e-6."""
    drafter = workshop.build(case, TARGET)
    policy = Watching(drafter.limit, 0.4)
    assert keeps_the_distribution(TARGET, drafter, policy, prompt=REPEATS, slots=800)
    assert max(policy.cut) > 0.2


@pytest.mark.parametrize("before_draw", [True, False], ids=["confidences", "shares"])
@pytest.mark.parametrize("how", ["replacement", "without", "mixed"])
def test_drawn_trees_keep_the_distribution_and_are_cut(how, before_draw):
    """As above, for siblings; and guards both against a policy that never cuts.  False alarm 1e-6."""
    tree, policy = Tree(TARGET, [-1, -1, 0, 0, 1, 2], how), Watching(6, 0.3)
    tree.confidence_before_draw = before_draw
    assert keeps_the_distribution(TARGET, tree, policy, slots=1500)
    assert max(policy.cut) > 0.2


@pytest.fixture
def jumpy(monkeypatch):
    monkeypatch.setattr(by_confidence, "DOUBT", 0.5)


class Alone:
    """A ByConfidence for every slot, so jumpy that what a slot verifies depends on the outcome of its own last
    steps."""

    def __init__(self, nodes: int, slots: int):
        self.nodes, self.sizes = nodes, []
        self.policies = [ByConfidence(nodes, 0.5) for _ in range(slots)]
        for policy in self.policies:
            policy.WINDOW = 1.5

    def budget(self, state: DecodeState) -> torch.Tensor:
        return torch.full((len(state.rows),), self.nodes)

    def keep(self, state: DecodeState, sizes: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
        kept = [policy.keep(state, sizes[b : b + 1], None) for b, policy in enumerate(self.policies)]
        self.sizes.append(torch.cat(kept))
        return self.sizes[-1]

    def observe(self, state: DecodeState, sizes: torch.Tensor, accepted: Accepted, timing: Timing) -> None:
        for b, policy in enumerate(self.policies):
            policy.observe(state, sizes[b : b + 1], Accepted(*(part[b : b + 1] for part in accepted)), timing)


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, -1, 0, 0, 1, 2]], ids=["chain", "tree"])
def test_cuts_that_depend_on_a_slots_own_earlier_steps_keep_the_distribution(parents, jumpy):
    """Catches a share that depends on what it decides about.  False alarm 1e-6."""
    slots, drafter = 1500, Tree(TARGET, parents, "without")
    drafter.confidence_before_draw = False
    policy = Alone(drafter.limit, slots)
    assert keeps_the_distribution(TARGET, drafter, policy, slots=slots)
    assert len(policy.sizes[-1].unique()) > 1


UNEVEN = TableTarget.of([0.7, 0.3])


def even(before: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0.4, 0.6], dtype=torch.float64).expand(len(own), -1)


def test_a_confidence_that_sees_its_own_token_is_caught():
    """Planted fault: the q of the drawn token, said to be known before the draw."""

    def peek(draft: Draft) -> Draft:
        return Draft.chain(
            draft.tokens, draft.sizes, draft.q, draft.q.gather(-1, draft.tokens[..., None])[..., 0].float()
        )

    peeking = Drawn(even, 2, bend=peek)
    assert not keeps_the_distribution(UNEVEN, peeking, ByConfidence(2, 0.5))
    # that it was not said, the loop hides it, and the shares of earlier steps are what remains
    peeking.confidence_before_draw = False
    assert keeps_the_distribution(UNEVEN, peeking, ByConfidence(2, 0.5))
    assert keeps_the_distribution(UNEVEN, Drawn(even, 2), ByConfidence(2, 0.5))


def test_a_share_of_the_step_itself_is_caught(jumpy):
    """Planted fault: each slot's policy has counted the draft that it decides about, as its most likely tokens say."""

    class Hasty(Alone):
        drafted = torch.empty(0, 2)

        def keep(self, state: DecodeState, sizes: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
            likely = [row.index(1) if 1 in row else len(row) for row in self.drafted.tolist()]
            for policy, size in zip(self.policies, likely, strict=True):
                told(policy, [2], [list(range(size))])
            return super().keep(state, sizes, confidence)

    def built(kind: Callable[[int, int], Alone]) -> bool:
        policy = kind(2, 3000)

        def noted(draft: Draft) -> Draft:
            policy.drafted = draft.tokens
            return draft

        return keeps_the_distribution(UNEVEN, Drawn(even, 2, bend=noted), policy, slots=3000)

    assert built(Alone)
    assert not built(Hasty)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_text_is_the_targets_own(case, target, prompts, plain, drafter_of):
    """Catches a drafter that is told less than happened where its draft was cut, and slots used again."""
    drafter = drafter_of(case)
    counts = [9, 17, 5, 12, 3, 8, 14, 11]
    requests = [Request(prompt, count, Sampling()) for prompt, count in zip(prompts, counts, strict=True)]
    found: list[list[int]] = [[] for _ in requests]
    for progress in serve(target, requests, drafter, policy=ByConfidence(drafter.limit, 0.3), slots=3):
        found[progress.request] += progress.tokens
    assert found == [plain(target, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]


# ── what it is for ────────────────────────────────────────────────────────────────────────────────────────────────────


class HalfRight(Proposer):
    """Six tokens, of which the first two are mostly right and the others mostly wrong; deterministic."""

    limit = 6

    def __init__(self, text: list[int]):
        self.text = text

    def propose(self, memory: torch.Generator, state: DecodeState, budget: torch.Tensor) -> Draft:
        at = len(state.tokens[0])
        coming = torch.tensor((self.text[at : at + 6] + [0] * 6)[:6])
        is_right = torch.rand(6, generator=memory) < torch.tensor([0.95, 0.9, 0.3, 0.1, 0.1, 0.1])
        return Draft.chain(torch.where(is_right, coming, (coming + 1) % 64)[None], budget)


def test_nodes_are_saved_for_few_tokens(target, prompts, plain):
    """Catches shares that stop nothing, or what is kept as well."""
    whole = prompts[0] + plain(target, prompts[0], 200)
    found = {}
    for name, policy in (("all", Fixed(6)), ("likely", ByConfidence(6, 0.3))):
        nodes: list[int] = []

        class Counting:
            budget, keep = policy.budget, policy.keep

            def observe(
                self, state: Any, sizes: torch.Tensor, accepted: Any, timing: Any, policy=policy, nodes=nodes
            ) -> None:
                nodes.append(int(sizes.sum()))
                policy.observe(state, sizes, accepted, timing)

        (text,) = generate(target, prompts[0], HalfRight(whole), max_new_tokens=190, policy=Counting())
        assert text.tokens == whole[len(prompts[0]) :][:190]
        found[name] = (len(text.tokens) / text.steps, sum(nodes) / len(nodes))
    assert found["likely"][1] < 0.6 * found["all"][1]
    assert found["likely"][0] > 0.85 * found["all"][0]


def test_equal_outcomes_give_equal_cuts():
    """Catches noise of its own, and what one batch taught reaching the next."""
    tree = Tree(TARGET, [-1, 0, 1], "without")
    tree.confidence_before_draw = False
    (one, _, _), (two, _, _) = (emitted(TARGET, tree, ByConfidence(3, 0.2), slots=50) for _ in "ab")
    assert torch.equal(one, two)
