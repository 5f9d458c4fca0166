"""A draft as a tree: depths, visibility, prefixes and reach against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.draft import Draft
from outrider.errors import DrafterError


@st.composite
def trees(draw):
    slots, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    parents = [[draw(st.integers(-1, n - 1)) for n in range(nodes)] for _ in range(slots)]
    sizes = [draw(st.integers(0, nodes)) for _ in range(slots)]
    return parents, sizes


def made(parents, sizes) -> Draft:
    shape = (len(parents), len(parents[0]))
    return Draft(
        torch.arange(shape[0] * shape[1]).view(shape), torch.tensor(parents, dtype=torch.int64).view(shape), torch.tensor(sizes)
    )


def ancestors(parents: list[int], n: int) -> list[int]:
    return [] if n < 0 else [n, *ancestors(parents, parents[n])]


@given(trees())
def test_depth_counts_the_ancestors(tree):
    """Catches positions that are off in a branch."""
    parents, sizes = tree
    wanted = [[len(ancestors(row, n)) - 1 for n in range(len(row))] for row in parents]
    assert made(parents, sizes).depths().tolist() == wanted


@given(trees())
def test_a_node_sees_the_anchor_its_ancestors_and_itself(tree):
    """Catches a node that looks at its sibling."""
    parents, sizes = tree
    nodes = len(parents[0])
    seen = made(parents, sizes).visible()
    for b, row in enumerate(parents):
        for n in range(-1, nodes):
            wanted = {0, *(m + 1 for m in ancestors(row, n))}
            assert {column for column in range(nodes + 1) if seen[b, n + 1, column]} == wanted


@given(trees())
def test_reach_is_the_depth_of_the_live_nodes(tree):
    """Catches padding that counts."""
    parents, sizes = tree
    wanted = [max((len(ancestors(row, n)) for n in range(size)), default=0) for row, size in zip(parents, sizes, strict=True)]
    assert made(parents, sizes).reach() == wanted


@given(trees(), st.data())
def test_first_keeps_a_prefix_of_every_slot(tree, data):
    """Catches q or confidences that are cut elsewhere than the tokens."""
    parents, sizes = tree
    keep = torch.tensor([data.draw(st.integers(-1, 8)) for _ in sizes])
    draft = made(parents, sizes)
    slots, nodes = draft.tokens.shape
    draft = Draft(draft.tokens, draft.parents, draft.sizes, torch.rand(slots, nodes, 5), torch.rand(slots, nodes))
    cut = draft.first(keep)
    wanted = [max(0, min(size, int(most))) for size, most in zip(sizes, keep, strict=True)]
    width = max(wanted)
    assert cut.sizes.tolist() == wanted
    for name in ("tokens", "parents", "q", "confidence"):
        assert torch.equal(getattr(cut, name), getattr(draft, name)[:, :width])


@given(st.integers(1, 3), st.integers(0, 6))
def test_a_chain_is_the_tree_with_one_branch(slots, nodes):
    """Catches the short ways for chains when they differ from the long ones."""
    tokens, sizes = torch.zeros(slots, nodes, dtype=torch.int64), torch.full((slots,), nodes)
    chain = Draft.chain(tokens, sizes)
    tree = Draft(tokens, chain.parents, sizes)
    assert not chain.branches
    assert torch.equal(chain.depths(), tree.depths())
    assert torch.equal(chain.visible(), tree.visible())
    assert chain.reach() == tree.reach()
    assert torch.equal(chain.checked(slots).sizes, tree.checked(slots).sizes)


def test_an_empty_draft_has_slots_and_no_nodes():
    """Catches a plain step that is not a draft of the right shape."""
    draft = Draft.empty(3).checked(3)
    assert draft.tokens.shape == (3, 0)
    assert draft.sizes.tolist() == draft.reach() == [0, 0, 0]
    assert draft.visible().shape == (3, 1, 1)


@given(st.lists(st.integers(-4, 8), min_size=5, max_size=5), st.integers(-4, 9))
def test_checked_ends_a_slot_before_its_first_unsound_parent(parents, size):
    """Catches a parent that stands behind its child, or nowhere; the neighbour slot keeps all of its nodes."""
    sound = next((n for n, parent in enumerate(parents) if not -1 <= parent < n), 5)
    draft = Draft(
        torch.zeros(2, 5, dtype=torch.int64), torch.tensor([parents, [-1, 0, 0, 1, 2]]), torch.tensor([size, 5])
    ).checked(2)
    assert draft.sizes.tolist() == [max(0, min(size, sound)), 5]
    assert draft.parents[0, :sound].tolist() == parents[:sound]
    # what is left as padding may still be indexed with
    draft.depths()
    assert draft.visible().shape == (2, 6, 6)


def test_shapes_that_do_not_belong_together_are_refused():
    """Catches a draft for another number of slots."""
    chain = Draft.chain(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]))
    assert chain.checked(2).sizes.tolist() == [3, 3]
    with pytest.raises(DrafterError, match="slots"):
        chain.checked(3)
