"""Two drafts under the same anchors: what their union holds, and that it keeps the distribution."""

from collections.abc import Iterator

import pytest
import torch
from contracts.chances import _drafts, difference, judged, paths_of
from contracts.test_acceptance_rule_enumerated import drawn, random_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.draft import Draft
from outrider.policies.merge import deterministic, merged

V = 3


@st.composite
def trees(draw, slots: int):
    """A deterministic tree a slot whose siblings differ."""
    rows = []
    for _ in range(slots):
        tokens, parents, paths = [], [], [()]
        for _ in range(draw(st.integers(0, 5))):
            above, token = draw(st.integers(0, len(paths) - 1)), draw(st.integers(0, 2))
            if (*paths[above], token) not in paths:
                tokens.append(token)
                parents.append(above - 1)
                paths.append((*paths[above], token))
        rows.append((tokens, parents))
    width = max(len(tokens) for tokens, _ in rows)
    padded = [
        (tokens + [7] * (width - len(tokens)), parents + [-1] * (width - len(parents))) for tokens, parents in rows
    ]
    tokens, parents = (torch.tensor([row[i] for row in padded], dtype=torch.int64).view(slots, width) for i in (0, 1))
    return Draft(tokens, parents, torch.tensor([len(tokens) for tokens, _ in rows]))


@settings(max_examples=30)
@given(trees(2), trees(2), st.lists(st.integers(0, 11), min_size=2, max_size=2))
def test_the_union_of_certain_trees_holds_every_path_once(one, other, most):
    """Catches a node twice, a child under the wrong parent, a path lost while there is room, and an order that is no
    tree."""
    union, places = merged(one, other, torch.tensor(most))
    assert union.q is None
    sound = union.checked(2)
    assert sound.live == union.live
    for b in range(2):
        found, own, theirs = paths_of(union, b), paths_of(one, b), paths_of(other, b)
        assert len(found) <= most[b]
        assert len(set(found)) == len(found)
        assert found[: len(own)] == own[: most[b]]
        assert set(found) <= {*own, *theirs}
        if len({*own, *theirs}) <= most[b]:
            assert set(found) == {*own, *theirs}
        # what is missing had no room
        assert len(found) in (most[b], len({*own, *theirs}))
        # every node of the other is told where its path stands, and no node that had no room
        assert {theirs[n]: found[at] for n, at in places[b].items()} == {path: path for path in theirs if path in found}


def test_two_chains_that_go_on_from_each_other_are_a_chain():
    """Catches a tree's mask where a chain's would do."""
    one = Draft.chain(torch.tensor([[1, 2]]), torch.tensor([2]))
    other = Draft.chain(torch.tensor([[1, 2, 0, 1]]), torch.tensor([4]))
    union, _ = merged(one, other, torch.tensor([9]))
    assert not union.branches
    assert union.ids == [[1, 2, 0, 1]]
    assert merged(one, Draft.empty(1), torch.tensor([9]))[0] is one
    assert merged(one.only([[0, 1]]), other, torch.tensor([9]))[0].origin is None


def soft(tokens: list[int], seed: int = 0) -> torch.Tensor:
    q = torch.rand(1, len(tokens), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return q / q.sum(-1, keepdim=True)


def test_a_certain_node_merges_with_a_drawn_one_and_a_drawn_one_with_none():
    """Catches a sampled node that is left out for its token, and a subtree that hangs where it is never reached."""
    chain, size = torch.tensor([[1, 2]]), torch.tensor([2])
    by_chance, fixed = Draft.chain(chain, size, soft([1, 2])), Draft.chain(torch.tensor([[1, 0]]), size)
    union, _ = merged(by_chance, fixed, torch.tensor([9]))
    assert union.ids == [[1, 2, 0]] and union.tree == ((-1, 0, 0),)
    assert torch.equal(union.q[0, :2], by_chance.q[0])
    assert union.q[0, 2].tolist() == [1, 0, 0]
    turned, _ = merged(fixed, by_chance, torch.tensor([9]))
    # the drawn 1 stays a younger sibling of the certain 1; its child hangs under the elder
    assert turned.ids == [[1, 0, 1, 2]] and turned.tree == ((-1, 0, -1, 0),)
    assert torch.equal(turned.q[0, 2:], by_chance.q[0])


def test_a_confidence_that_is_not_known_stops_nothing():
    """Catches a node without a confidence that a policy takes for hopeless, and one that lends its neighbour's."""
    one = Draft.chain(torch.tensor([[1]]), torch.tensor([1]), None, torch.tensor([[0.25]]))
    other = Draft.chain(torch.tensor([[1, 2]]), torch.tensor([2]))
    assert merged(one, other, torch.tensor([9]))[0].confidence.tolist() == [[0.25, 1.0]]
    third = Draft.chain(torch.tensor([[0]]), torch.tensor([1]), None, torch.tensor([[0.5]]))
    assert merged(other, third, torch.tensor([9]))[0].confidence.tolist() == [[1.0, 1.0, 0.5]]


def test_an_id_outside_the_vocabulary_has_no_q():
    """Catches an index error where a certain draft beside a drawn one holds an impossible id."""
    one = Draft.chain(torch.tensor([[1]]), torch.tensor([1]), soft([1]))
    union, _ = merged(one, Draft.chain(torch.tensor([[-1, 5]]), torch.tensor([2])), torch.tensor([9]))
    assert union.ids == [[1, -1, 5]]
    assert union.q[0, 1:].count_nonzero() == 0


def test_slots_with_a_seed_count_as_deterministic():
    """Catches a node of a seeded slot that is not merged with its twin, or a q of it that is one-hot at another
    token."""
    tokens, sizes = torch.tensor([[1, 2], [1, 5], [0, 1]]), torch.tensor([2, 2, 2])
    q = torch.full((3, 2, V), 1 / V, dtype=torch.float64)
    draft = Draft.chain(tokens, sizes, q)
    assert deterministic(draft, None) is draft
    bare = Draft.chain(tokens, sizes)
    assert deterministic(bare, torch.tensor([True] * 3)) is bare
    assert deterministic(draft, torch.tensor([True] * 3)).q is None
    found = deterministic(draft, torch.tensor([True, True, False])).q
    assert found[0].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert found[1].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert torch.equal(found[2], q[2])


def proposals(seed: int, how: str, parents: list[int]) -> Iterator[tuple[float, Draft]]:
    for weight, tokens, rows in _drafts(drawn(parents, seed, how), len(parents)):
        q = None if how == "top" else torch.stack(rows)[None]
        yield weight, Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(parents)]), q)


SHAPES = ([-1], [-1, 0]), ([-1, 0], [-1, -1])


@pytest.mark.parametrize(
    ("how", "shapes", "most"),
    [
        (("replacement", "replacement"), SHAPES[0], 9), (("without", "top"), SHAPES[1], 2),
        (("top", "without"), SHAPES[0], 9), (("top", "without"), SHAPES[0], 2), (("mixed", "without"), SHAPES[1], 2),
    ],
)  # fmt: skip
def test_a_union_follows_the_target_exactly(how, shapes, most):
    """Catches any wrong q, order or cut of a union, with no chance of a false alarm."""
    unions = (
        (weight * chance, merged(one, other, torch.tensor([most]))[0])
        for weight, one in proposals(3, how[0], shapes[0])
        for chance, other in proposals(13, how[1], shapes[1])
    )
    assert difference(judged(unions, random_distribution(0)), random_distribution(0), depth=2) < 1e-12
