"""Lattices: the walk and its q over every outcome, trees against their definition, what they emit against the target's
distribution."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts.chances import Chance, difference, every_script, judged, paths_of
from contracts.test_acceptance_rule_enumerated import random_distribution
from contracts.test_acceptance_rule_trees import Drawing
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.nn.drafting import lattice as lattices
from outrider.nn.drafting import trees
from outrider.nn.drafting.lattice import Candidates, Lattice
from outrider.sampling.distribution import Settings
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

V = 4


def random_lattice(
    depth: int, k: int, vocabulary: int = V, seed: int = 0, slots: int = 1, has_rest: bool = True
) -> Lattice:
    """Candidates of random logits, and random scores of pairs."""
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(slots, depth, vocabulary, dtype=torch.float64, generator=noise)
    best = Candidates.of(logits, k)
    pairs = best.logits[:, 1:, None] + torch.randn(
        slots, depth - 1, k, k, dtype=torch.float64, generator=noise
    )  # fmt: skip
    rest = best.rest if has_rest else torch.full_like(best.rest, -torch.inf)
    return Lattice(best.ids, best.logits[:, 0], pairs, rest)


def scores_of(lattice: Lattice, path: tuple[int, ...], b: int = 0) -> torch.Tensor:
    """Scores [k] of the row after these candidates, by hand."""
    return lattice.first[b] if not path else lattice.pairs[b, len(path) - 1, path[-1]]


def probability(lattice: Lattice, path: tuple[int, ...], b: int = 0) -> float:
    """Of a path of candidates' numbers, by hand: other tokens count, where there are any."""
    found = 1.0
    for row, own in enumerate(path):
        weights = scores_of(lattice, path[:row], b).exp()
        found *= float(weights[own] / (weights.sum() + lattice.rest[b, row].exp()))
    return found


def test_candidates_are_the_likeliest_and_the_rest_is_what_they_leave() -> None:
    """Catches a rest that counts candidates, and one that is NaN where they are all there are."""
    logits = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    best = Candidates.of(logits, 4)
    ranked = logits.sort(-1, descending=True)
    assert torch.equal(best.ids, ranked.indices[..., :4]) and torch.equal(best.logits, ranked.values[..., :4])
    assert torch.allclose(best.rest, ranked.values[..., 4:].logsumexp(-1))
    assert float(Candidates.of(logits, 7).rest.exp().max()) < 1e-12


# ── one path ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_walk_without_noise_takes_the_best_after_what_it_took() -> None:
    """Catches the best of the row's own logits, and the best path as a whole."""
    lattice = random_lattice(5, 3, seed=2, slots=6)
    chosen, scores = lattices.walk(lattice, lattices.likeliest)
    for b in range(6):
        path: tuple[int, ...] = ()
        for row in range(5):
            assert torch.equal(scores[b, row], scores_of(lattice, path, b))
            path = (*path, int(scores_of(lattice, path, b).argmax()))
        assert chosen[b].tolist() == list(path)


def test_every_drawn_path_comes_as_often_as_its_q_says_and_they_sum_to_one() -> None:
    """Catches a q that is a row's own distribution, and one that is conditional on another candidate than was drawn.

    Exact: every outcome of every draw.
    """
    lattice, total = random_lattice(3, 3, seed=3), 0.0
    seen: dict[tuple[int, ...], tuple[float, float]] = {}

    def walked(chance: Chance) -> tuple[tuple[int, ...], float]:
        def draw(scores, row):
            return chance.draw(scores.softmax(-1), row, None)

        chosen, scores = lattices.walk(lattice, draw)
        q = scores.softmax(-1).gather(-1, chosen[..., None])[..., 0].prod()
        return tuple(chosen[0].tolist()), float(q)

    for weight, (path, q) in every_script(walked):
        assert path not in seen
        seen[path] = weight, q
        total += q
    assert len(seen) == 27 and abs(total - 1) < 1e-12
    assert all(abs(weight - q) < 1e-12 for weight, q in seen.values())


def test_a_confidence_is_the_best_candidates_share_whatever_is_drawn_in_its_row() -> None:
    """Catches a confidence that looks at the token drawn in its own row: a policy that stops by it would be inexact."""
    lattice = random_lattice(4, 3, seed=4, slots=5)
    for worst in (False, True):
        pick = (lambda scores, row: scores.argmin(-1)) if worst else lattices.likeliest
        chosen, scores = lattices.walk(lattice, pick)
        found = lattices.confidence(scores, lattice.rest)
        for b, path in enumerate(chosen.tolist()):
            by_hand = [
                probability(lattice, (*path[:row], int(scores[b, row].argmax())), b)
                / probability(lattice, tuple(path[:row]), b)
                for row in range(4)
            ]
            assert torch.allclose(found[b].double(), torch.tensor(by_hand).double(), atol=1e-6)


# ── the likeliest paths as a tree ─────────────────────────────────────────────────────────────────────────────────────


def by_hand(lattice: Lattice, nodes: int, b: int) -> list[tuple[int, ...]]:
    """The likeliest paths of candidates' numbers, of all there are."""
    depth, k = lattice.ids.shape[1:]
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(k), repeat=length)]
    return sorted(every, key=lambda path: -probability(lattice, path, b))[:nodes]


def numbers(lattice: Lattice, path: tuple[int, ...], b: int) -> tuple[int, ...]:
    """A path of tokens as candidates' numbers."""
    return tuple(lattice.ids[b, row].tolist().index(token) for row, token in enumerate(path))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(0, 10_000), st.booleans())
@examples(max_examples=40, deadline=None)
def test_a_tree_has_the_likeliest_paths_and_every_prefix_is_that_of_its_size(depth, k, nodes, seed, has_rest) -> None:
    """Catches branches scored after another parent than their own, a frontier that is too narrow, a rest left out."""
    lattice = random_lattice(depth, k, seed=seed, slots=2, has_rest=has_rest)
    tokens, parents = lattices.best_first(lattice, nodes)
    assert tokens.shape[1] == lattices.number_of_nodes(nodes, depth, k)
    draft = Draft(tokens, parents, torch.full((2,), tokens.shape[1]))
    assert draft.checked(2) is draft
    for b in range(2):
        paths = [numbers(lattice, path, b) for path in paths_of(draft, b)]
        assert paths == by_hand(lattice, nodes, b)
    for smaller in range(1, tokens.shape[1]):
        part = lattices.best_first(lattice, smaller)
        assert torch.equal(part[0], tokens[:, :smaller]) and torch.equal(part[1], parents[:, :smaller])


def test_the_first_path_of_a_certain_lattice_is_the_walk() -> None:
    """Catches a tree and a walk that read the pairs the other way round."""
    lattice = random_lattice(6, 3, vocabulary=9, seed=5, slots=4)
    lattice = lattice._replace(first=9 * lattice.first, pairs=9 * lattice.pairs, rest=lattice.rest - 90)
    tokens, parents = lattices.best_first(lattice, 12)
    chosen, _ = lattices.walk(lattice, lattices.likeliest)
    walked = lattice.ids.gather(2, chosen[..., None])[..., 0]
    trunk = Draft(tokens, parents, torch.full((4,), 12)).trunk()
    for b, size in enumerate(trunk.live):
        assert trunk.tokens[b, :size].tolist() == walked[b, :size].tolist()


# ── drawn trees, and what all of it emits ─────────────────────────────────────────────────────────────────────────────


def state_of(chance: Any, judge: SamplingJudge) -> SimpleNamespace:
    return SimpleNamespace(judge=judge, streams=chance)


def heated(temperature: float, top_k: int = 0) -> SamplingJudge:
    judge = SamplingJudge()
    judge.settings = Settings.of([Sampling(temperature, top_k=top_k)])
    return judge


def error_of_a_tree(lattice: Lattice, parents: tuple[int, ...], judge: SamplingJudge, vocabulary: int = V) -> float:
    """Largest difference between what a drawn tree emits and the target's distribution, over every draft and coin."""
    p = random_distribution(7, vocabulary)

    def distribution(path):
        return judge.distribution(p(path).log()[None])[0]

    def grown(chance):
        first, after = lattices.expand(lattice, lambda scores, ids: lattices.spread(scores, ids, vocabulary))
        budget = torch.tensor([len(parents)])
        return trees.sampled(first, after, budget, state_of(chance, judge), parents=parents)

    return difference(judged(every_script(grown, Drawing), distribution), distribution)


def test_the_q_of_a_drawn_node_is_that_of_the_candidates_after_its_own_parent() -> None:
    """Catches branches drawn from their row's own distribution: exact, and not what the pairs are for."""
    lattice, parents = random_lattice(3, 3, seed=12), (-1, -1, 0, 1, 2, 3)
    first, after = lattices.expand(lattice, lambda scores, ids: lattices.spread(scores, ids, V))
    streams = Streams(torch.tensor([3]), torch.tensor([0]))
    draft = trees.sampled(first, after, torch.tensor([6]), state_of(streams, heated(1.0)), parents=parents)
    paths = paths_of(draft)
    for n, parent in enumerate(parents):
        above = numbers(lattice, paths[parent], 0) if parent >= 0 else ()
        q = torch.zeros(V, dtype=torch.float64).scatter(
            0, lattice.ids[0, len(above)], scores_of(lattice, above).softmax(-1)
        )
        q[[draft.ids[0][m] for m in range(n) if parents[m] == parent]] = 0
        assert torch.allclose(draft.q[0, n], q / q.sum())


SHAPES = {"siblings": (-1, -1, -1), "branches": (-1, -1, 0, 1), "younger below": (-1, 0, 0, 2)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_drawn_tree_emits_the_targets_distribution_exactly(shape) -> None:
    """Catches a sibling's q that forgets its elders, a branch's that is another branch's, and marginals as q.

    Exact, over every draft and every coin: of four tokens two are candidates, so siblings run out of them too.
    """
    lattice = random_lattice(3, 2, seed=8)
    assert error_of_a_tree(lattice, shape, heated(1.0)) < 1e-12


def test_a_drawn_tree_of_cold_and_cut_requests_emits_the_targets_distribution_exactly() -> None:
    """Catches a certain sibling that says it was drawn."""
    lattice = random_lattice(3, 3, seed=9)
    assert error_of_a_tree(lattice, (-1, -1, 0), heated(0.7, top_k=2)) < 1e-12
    assert error_of_a_tree(lattice, (-1, -1, 0), heated(0.0)) < 1e-12


def test_a_drawn_walk_emits_the_targets_distribution_exactly_and_from_marginals_it_does_not() -> None:
    """Catches a q that is each row's own distribution, whatever was drawn before: it shows here that this is wrong."""
    lattice, p, vocabulary = random_lattice(3, 2, vocabulary=3, seed=10), random_distribution(7), 3

    def emitted(is_marginal: bool) -> float:
        def drawn(chance):
            chosen, scores = lattices.walk(lattice, lambda own, row: chance.draw(own.softmax(-1), row, None))
            tokens = lattice.ids.gather(2, chosen[..., None])[..., 0]
            if is_marginal:
                scores = torch.cat([lattice.first[:, None], lattice.pairs[:, :, 0]], 1)
            q = lattices.spread(scores, lattice.ids, vocabulary).softmax(-1)
            return Draft.chain(tokens, torch.tensor([3]), q)

        return difference(judged(every_script(drawn), p), p)

    assert emitted(False) < 1e-12
    assert emitted(True) > 1e-3


def test_a_tree_without_noise_emits_the_targets_distribution_exactly() -> None:
    """Catches a duplicate among siblings, which would be tested twice."""
    lattice, p = random_lattice(3, 3, seed=11), random_distribution(7, V)
    tokens, parents = lattices.best_first(lattice, 6)
    draft = Draft(tokens, parents, torch.tensor([6]))
    assert len(set(paths_of(draft))) == 6
    assert difference(judged([(1.0, draft)], p), p) < 1e-12
