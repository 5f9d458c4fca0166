"""A draft as a tree: depths, visibility, prefixes and reach against brute force."""

import random

import torch
from decoding.drafts import numbers
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.draft import Draft, padded


@st.composite
def trees(draw):
    slots, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    parents = [[draw(st.integers(-1, n - 1)) for n in range(nodes)] for _ in range(slots)]
    sizes = [draw(st.integers(0, nodes)) for _ in range(slots)]
    return parents, sizes


def made(parents, sizes) -> Draft:
    shape = (len(parents), len(parents[0]))
    return Draft(
        torch.arange(shape[0] * shape[1]).view(shape),
        torch.tensor(parents, dtype=torch.int64).view(shape),
        torch.tensor(sizes),
    )


def ancestors(parents: list[int], n: int) -> list[int]:
    return [] if n < 0 else [n, *ancestors(parents, parents[n])]


@given(trees())
def test_a_node_sees_the_anchor_its_ancestors_and_itself(tree):
    """Catches a node that looks at its sibling, positions that are off in a branch, and padding that is reached."""
    parents, sizes = tree
    draft, nodes = made(parents, sizes), len(parents[0])
    seen, depths = draft.rows()
    for b, row in enumerate(parents):
        for n in range(-1, nodes):
            above = ancestors(row, n)
            assert {column for column in range(nodes + 1) if seen[b, n + 1, column]} == {0, *(m + 1 for m in above)}
            assert depths[b, n + 1] == len(above)
        assert draft.reach()[b] == max((len(ancestors(row, n)) for n in range(sizes[b])), default=0)


@given(trees(), st.data())
def test_first_keeps_a_prefix_of_every_slot(tree, data):
    """Catches q or confidences that are cut elsewhere than the tokens."""
    parents, sizes = tree
    keep = torch.tensor([data.draw(st.integers(-1, 8)) for _ in sizes])
    draft = made(parents, sizes)
    slots, nodes = draft.tokens.shape
    q, confidence = torch.rand(slots, nodes, 5), torch.rand(slots, nodes)
    draft = Draft(draft.tokens, draft.parents, draft.sizes, q, confidence, origin=9 - draft.tokens)
    cut = draft.first(keep)
    wanted = [max(0, min(size, int(most))) for size, most in zip(sizes, keep, strict=True)]
    width = max(wanted)
    assert cut.sizes.tolist() == wanted
    for name in ("tokens", "parents", "q", "confidence", "origin"):
        assert torch.equal(getattr(cut, name), getattr(draft, name)[:, :width])


@given(trees(), st.integers(0, 2**20))
def test_a_node_keeps_its_number_its_parent_and_all_that_was_said_of_it(tree, seed):
    """Catches rows of q, confidences or numbers that stay behind where nodes go, once and again, and a child left
    alone."""
    (parents, sizes), coin = tree, random.Random(seed)
    whole = made(parents, sizes)
    slots, nodes = whole.tokens.shape
    whole = Draft(whole.tokens, whole.parents, whole.sizes, torch.rand(slots, nodes, 3), torch.rand(slots, nodes))
    assert numbers(whole).tolist() == [list(range(nodes))] * slots
    draft = whole
    for _ in range(2):
        kept: list[list[int]] = []
        for own, above in zip(draft.live, draft.tree, strict=True):
            kept.append([])
            for n in range(own):
                if (above[n] < 0 or above[n] in kept[-1]) and coin.random() < 0.7:
                    kept[-1].append(n)
        before, draft = draft, draft.only(kept)
        assert draft.checked(slots).live == draft.live == [len(nodes) for nodes in kept]
        for b, nodes in enumerate(kept):
            assert numbers(draft)[b, : len(nodes)].tolist() == numbers(before)[b, nodes].tolist()
    for b, own in enumerate(draft.live):
        origin = numbers(draft)[b, :own]
        for name in ("tokens", "q", "confidence"):
            assert torch.equal(getattr(draft, name)[b, :own], getattr(whole, name)[b, origin])
        for n, parent in enumerate(draft.tree[b][:own]):
            wanted = int(whole.parents[b, origin[n]])
            assert (int(origin[parent]) if parent >= 0 else -1) == wanted
            assert draft.branches or parent == n - 1


@given(trees())
def test_the_trunk_is_the_chain_of_eldest_children(tree):
    """Catches a younger sibling, whose q knows of the elder's rejection, in a chain that knows of none."""
    parents, sizes = tree
    draft = made(parents, sizes)
    trunk = draft.trunk()
    assert not trunk.branches or not any(sizes)
    for b, row in enumerate(parents):
        wanted, at = [], -1
        while (child := next((n for n in range(sizes[b]) if row[n] == at), None)) is not None:
            wanted.append(child)
            at = child
        assert numbers(trunk)[b, : trunk.live[b]].tolist() == wanted
        assert trunk.tokens[b, : trunk.live[b]].tolist() == draft.tokens[b, wanted].tolist()
        assert list(trunk.tree[b][: trunk.live[b]]) == list(range(-1, len(wanted) - 1))


def test_lists_of_unequal_length_are_one_tensor():
    """Catches padding at the wrong end, and a tensor without a width where every list is empty."""
    assert padded([[1], [2, 3, 4], []], 7).tolist() == [[1, 7, 7], [2, 3, 4], [7, 7, 7]]
    assert padded([[], []], 7).shape == (2, 0)
    assert padded([[], []], 7).dtype == torch.int64


def test_an_empty_draft_has_slots_and_no_nodes():
    """Catches a plain step that is not a draft of the right shape."""
    draft = Draft.empty(3).checked(3)
    assert draft.tokens.shape == (3, 0)
    assert draft.sizes.tolist() == draft.reach() == [0, 0, 0]
    assert draft.rows()[0].shape == (3, 1, 1)
    assert draft.rows()[1].tolist() == [[0], [0], [0]]


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
    assert draft.rows()[0].shape == (2, 6, 6)
    assert draft.rows()[1].shape == (2, 6)
