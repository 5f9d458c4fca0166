"""ByConfidence stops where nodes are unlikely: what it cuts, what its shares follow, and that the output stays
exact."""

from collections.abc import Sequence

import pytest
import torch
from contracts.chances import keeps_the_distribution
from contracts.parties import TableTarget, Tree
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.accept import Accepted
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.policies.by_confidence import ByConfidence
from outrider.sampling.settings import Sampling

TARGET = TableTarget.random(5)
STATE = DecodeState(1, 100)
"""Of no interest to it but for the number of live slots."""


def told(
    policy: ByConfidence, sizes: Sequence[int], paths: Sequence[list[int]], following: Sequence[int] | None = None
) -> None:
    """One step's outcome."""
    accepted = Accepted(paths, following or [0] * len(paths), [0] * len(paths))
    policy.observe(STATE, torch.tensor(sizes), accepted, Timing())


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


def test_without_confidences_every_slot_is_cut_before_the_first_node_that_is_seldom_kept():
    """Catches a policy that begins by cutting, a node after a rare one that is verified, and slots of their own
    numbers."""
    policy, sizes = ByConfidence(4, 0.4), [3, 0, 1, 4, 2]
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


def test_a_share_is_how_often_a_node_was_kept():
    """Catches a chance that takes the node before it for granted."""
    policy = ByConfidence(4, 0.3)
    for step in range(400):
        told(policy, [4], [[0, 1, 2, 3][: (4, 2, 1, 0)[step % 4]]])
    assert policy.shares() == pytest.approx([0.75, 0.5, 0.25, 0.25], abs=0.1)


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


@pytest.mark.parametrize(("how", "before_draw"), [("without", True), ("mixed", False)], ids=["confidences", "shares"])
def test_drawn_trees_keep_the_distribution_and_are_cut(how, before_draw):
    """Catches a q that no longer fits its node, and a policy that never cuts.  False alarm 1e-6."""
    cut: list[float] = []

    class Watching(ByConfidence):
        def keep(self, state: DecodeState, sizes: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
            found = super().keep(state, sizes, confidence)
            cut.append(float((found < sizes).float().mean()))
            return found

    tree = Tree(TARGET, [-1, -1, 0, 0, 1, 2], how)
    tree.confidence_before_draw = before_draw
    assert keeps_the_distribution(TARGET, tree, Watching(6, 0.3), slots=1500)
    assert max(cut) > 0.2
