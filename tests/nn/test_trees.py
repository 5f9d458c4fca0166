"""Trees grown level by level: the beam against all paths there are, drawn siblings against their distributions."""

import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from contracts.chances import fits
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from outrider.decoding.noise import Purpose, Streams
from outrider.nn.drafting import trees
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

HOT = Settings.of([Sampling(1.0)])


class Distribution:
    """A drafter's distribution in which every path has logits of its own; `slots` rows, each its own.  V tokens."""

    def __init__(self, vocabulary: int, seed: int = 0, slots: int = 1):
        self.vocabulary, self.seed, self.slots = vocabulary, seed, slots
        self.first = torch.stack([self.logits(b, ()) for b in range(slots)])

    @functools.cache  # noqa: B019  (as short-lived as the test)
    def logits(self, slot: int, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, slot, path)) % 2**60)
        return 1.5 * torch.randn(self.vocabulary, dtype=torch.float64, generator=generator)

    def path(self, tree, b: int, n: int) -> tuple[int, ...]:
        return () if n < 0 else (*self.path(tree, b, int(tree.parents[b, n])), int(tree.tokens[b, n]))

    def expand(self, tree, fresh: int) -> torch.Tensor:
        nodes = range(tree.tokens.shape[1] - fresh, tree.tokens.shape[1])
        return torch.stack(
            [torch.stack([self.logits(b, self.path(tree, b, n)) for n in nodes]) for b in range(self.slots)]
        )

    def score(self, slot: int, path: tuple[int, ...]) -> float:
        steps = (self.logits(slot, path[:n]).log_softmax(-1)[token] for n, token in enumerate(path))
        return float(sum(steps))

    def paths(self, draft, slot: int) -> list[tuple[int, ...]]:
        return [self.path(draft, slot, n) for n in range(int(draft.sizes[slot]))]


def budget_of(*nodes: int) -> torch.Tensor:
    return torch.tensor(nodes)


SIZES = st.tuples(st.integers(2, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 10_000))


def by_hand(exact: Distribution, slot: int, width: int, depth: int, nodes: int) -> list[tuple[int, ...]]:
    """The beam's definition, on paths."""
    best = sorted(((token,) for token in range(exact.vocabulary)), key=lambda path: -exact.score(slot, path))[:width]
    offered, level = list(best), best
    for _ in range(1, depth):
        level = sorted(level, key=lambda path: -exact.score(slot, path))[:width]
        fresh = []
        for path in level:
            ranked = sorted(range(exact.vocabulary), key=lambda token: -exact.score(slot, (*path, token)))[:width]
            fresh += [(*path, token) for token in ranked]
        offered, level = offered + fresh, fresh
    return sorted(offered, key=lambda path: -exact.score(slot, path))[:nodes]


@given(SIZES, st.integers(1, 9))
@examples(max_examples=40, deadline=None)
def test_a_beam_is_its_definition_and_every_prefix_the_beam_of_that_budget(drawn, width):
    """Catches a frontier that is not the level's best, a slot whose tree depends on its neighbour's budget."""
    vocabulary, depth, nodes, seed = drawn
    unequal = Distribution(vocabulary, seed, slots=3)
    shared = trees.beam(unequal.first, unequal.expand, budget_of(2, 0, nodes), width=width, depth=depth)
    assert [unequal.paths(shared, slot) for slot in range(3)] == [
        by_hand(unequal, slot, width, depth, most) for slot, most in enumerate((2, 0, nodes))
    ]
    exact = Distribution(vocabulary, seed)
    draft = trees.beam(exact.first, exact.expand, budget_of(nodes), width=width, depth=depth)
    paths = exact.paths(draft, 0)
    assert paths == by_hand(exact, 0, width, depth, nodes)
    assert draft.checked(1).sizes.tolist() == draft.sizes.tolist() == [len(paths)]
    assert draft.q is None
    for smaller in range(1, len(paths) + 1):
        assert paths[:smaller] == exact.paths(
            trees.beam(exact.first, exact.expand, budget_of(smaller), width=width, depth=depth), 0
        )


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 30))
def test_a_shape_keeps_to_its_sizes_and_begins_with_every_smaller_one(width, depth, nodes):
    """Catches a child before its parent, a node too many, and a shape that a smaller budget changes."""
    parents = trees.shape(width, depth, nodes)
    most = depth if width == 1 else (width ** (depth + 1) - width) // (width - 1)
    assert len(parents) == min(nodes, most)
    depths = []
    for n, parent in enumerate(parents):
        assert -1 <= parent < n
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) <= depth
    assert max(parents.count(parent) for parent in parents) <= width
    for smaller in range(1, len(parents)):
        assert trees.shape(width, depth, smaller) == parents[:smaller]


def streams_of(slots: int, seeded: torch.Tensor | None = None) -> Streams:
    return Streams(torch.arange(slots), torch.full((slots,), 3), seeded)


def drawn(exact, parents, sampling=HOT, replacement=False, streams=None, budget=None):
    slots, judge = len(exact.first), SamplingJudge()
    judge.settings = sampling
    state = SimpleNamespace(judge=judge, streams=streams or streams_of(slots))
    budget = torch.full((slots,), len(parents)) if budget is None else budget
    return trees.sampled(exact.first, exact.expand, budget, state, parents=parents, replacement=replacement)


class Flat:
    """The same logits [V] behind every path, for any number of slots."""

    def __init__(self, p: list[float], slots: int):
        self.first = torch.tensor(p, dtype=torch.float64).log().expand(slots, -1)

    def expand(self, tree, fresh):
        return self.first[:, None].expand(-1, fresh, -1)


@pytest.mark.parametrize("replacement", [False, True])
def test_q_is_the_distribution_each_node_was_drawn_from(replacement):
    """Catches a younger sibling's q that forgets its elders, or the temperature."""
    exact, parents = Distribution(5, 2, slots=4), (-1, -1, 0, 0, 1, 0, 1, 2)
    sampling = Settings.of([Sampling(0.7, top_k=4)] * 4)
    draft = drawn(exact, parents, sampling, replacement)
    for b in range(4):
        for n, parent in enumerate(parents):
            q = distribution(
                exact.logits(b, exact.path(draft, b, parent))[None], Settings.of([Sampling(0.7, top_k=4)])
            )[0]
            if not replacement:
                q[[int(draft.tokens[b, m]) for m in range(n) if parents[m] == parent]] = 0
                q = q / q.sum()
            assert torch.allclose(draft.q[b, n], q, atol=1e-12)
            assert float(draft.q[b, n, draft.tokens[b, n]]) > 0
    assert draft.parents.tolist() == [list(parents)] * 4


@pytest.mark.parametrize("replacement", [False, True])
def test_siblings_and_branches_follow_their_joint_distribution(replacement):
    """Catches siblings drawn from one another's noise, and a salt that is dropped, which the distribution can't see:
    only one branch is ever walked.  20000 slots; false alarm 1e-6."""
    p, slots = [0.5, 0.3, 0.15, 0.05], 20_000
    tokens = drawn(Flat(p, slots), (-1, -1, 0, 1), replacement=replacement).tokens
    joint = torch.zeros(4, 4, 4, 4, dtype=torch.float64)
    for x, y, z, w in itertools.product(range(4), repeat=4):
        second = p[y] if replacement else p[y] / (1 - p[x]) * (x != y)
        joint[x, y, z, w] = p[x] * second * p[z] * p[w]
    counts = torch.bincount((tokens * torch.tensor([64, 16, 4, 1])).sum(-1), minlength=256)
    assert fits(counts, joint)


@pytest.mark.parametrize("replacement", [False, True])
def test_the_eldest_children_are_the_chain_that_would_be_drawn(replacement):
    """Catches a tree whose trunk is another draft than width 1 gives."""
    exact = Distribution(6, 4, slots=5)
    trunk = drawn(exact, trees.shape(3, 4, 14), replacement=replacement).trunk()
    chain = drawn(exact, trees.shape(1, 4, 4))
    assert trunk.tokens.tolist() == chain.tokens.tolist()
    streams = streams_of(5)
    assert streams.draw(distribution(exact.first, HOT), 0, Purpose.DRAFT).tolist() == chain.tokens[:, 0].tolist()


@pytest.mark.parametrize("replacement", [False, True])
def test_where_nothing_is_left_the_runner_up_is_certain(replacement):
    """Catches a slot at temperature 0 in a sampled batch whose siblings repeat or have no valid q."""
    exact = Distribution(5, 6, slots=3)
    mixed = Settings.of([Sampling(), Sampling(1.0), Sampling(1.0, top_k=1)])
    draft = drawn(exact, (-1, -1, -1, 0, 0), mixed, replacement)
    for b in (0, 2):
        for start, path in ((0, ()), (3, exact.path(draft, b, 0))):
            ranked = exact.logits(b, path).argsort(descending=True).tolist()
            nodes = range(start, 3 if start == 0 else 5)
            assert [int(draft.tokens[b, n]) for n in nodes] == ranked[: len(nodes)]
            assert all(float(draft.q[b, n, draft.tokens[b, n]]) == 1.0 == float(draft.q[b, n].sum()) for n in nodes)


@pytest.mark.parametrize("replacement", [False, True])
def test_a_seeded_slot_drafts_what_the_target_would_draw_then_what_it_nearly_drew(replacement):
    """Catches salted noise under a seed: a tree that the target's own draws rarely follow."""
    exact, streams = Distribution(6, 8, slots=4), streams_of(4, torch.tensor([True, False, True, True]))
    draft = drawn(exact, (-1, -1, 0, 1, 1), replacement=replacement, streams=streams)
    for b in (0, 2, 3):
        tokens = draft.tokens[b].tolist()
        one = Streams(torch.tensor([b]), torch.tensor([3]))
        for node, parent, depth in ((0, (), 0), (2, (tokens[0],), 1), (3, (tokens[1],), 1)):
            assert tokens[node] == int(one.draw(exact.logits(b, parent).softmax(-1)[None], depth, Purpose.TARGET))
        assert tokens[0] != tokens[1] and tokens[3] != tokens[4]


def test_a_smaller_budget_draws_the_same_nodes():
    """Catches noise that hangs on the budget."""
    exact = Distribution(5, 9, slots=2)
    whole = drawn(exact, trees.shape(3, 3, 10))
    part = drawn(exact, trees.shape(3, 3, 10), budget=budget_of(4, 2))
    assert part.sizes.tolist() == [4, 2]
    assert part.tokens.tolist() == whole.tokens[:, :4].tolist()
    assert torch.equal(part.q, whole.q[:, :4])


def test_more_siblings_than_tokens_stay_valid():
    """Catches a q of zeros where every token is taken."""
    draft = drawn(Flat([0.6, 0.4], 50), (-1, -1, -1))
    assert bool((draft.q.sum(-1) == 1).all())
    assert bool((draft.q.gather(-1, draft.tokens[..., None]) > 0).all())
    assert math.isclose(float(draft.q[:, 1].max()), 1.0)
