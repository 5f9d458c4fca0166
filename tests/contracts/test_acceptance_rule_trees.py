"""Drawn trees keep the target's distribution: through the loop, and exactly over every draft and every coin; planted
faults do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import Case
from contracts.chances import Chance, _spread, emitted, keeps_the_distribution, outcomes
from contracts.parties import Proposer, TableTarget, last_two
from contracts.test_acceptance_rule_enumerated import random_distribution

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.nn import trees
from outrider.policies.by_confidence import ByConfidence
from outrider.sampling.distribution import Settings
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

TARGET = TableTarget.random(5)
UNEVEN = TableTarget.of([0.6, 0.3, 0.1])
KINDS = pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])


class Grown(Proposer):
    """Grows trees from a distribution that is near the table's but not it.  `bend` may spoil the draft, as a faulty
    drafter would."""

    confidence_before_draw = True

    def __init__(
        self, target: TableTarget, width: int, depth: int, nodes: int, replacement: bool, bend=lambda draft: draft
    ):
        noise = torch.randn(target.table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        self.table = 0.6 * target.table + 0.7 * noise
        self.parents, self.replacement, self.bend = trees.shape(width, depth, nodes), replacement, bend
        self.limit = len(self.parents)

    def propose(self, memory, state, budget):
        before, anchor = last_two(state)

        def expand(tree: Draft, fresh: int) -> torch.Tensor:
            own, parents = tree.tokens[:, -fresh:], tree.parents[:, -fresh:]
            above = torch.where(parents < 0, anchor[:, None], tree.tokens.gather(1, parents.clamp(min=0)))
            return self.table[above, own]

        return self.bend(
            trees.sampled(
                self.table[before, anchor], expand, budget, state, parents=self.parents, replacement=self.replacement
            )
        )


def unconditioned(draft: Draft) -> Draft:
    """Every sibling says it was drawn from its eldest's q."""
    q = draft.q.clone()
    for n, parent in enumerate(draft.parents[0].tolist()):
        q[:, n] = draft.q[:, draft.parents[0].tolist().index(parent)]
    return replace(draft, q=q)


def contrary(replacement: bool, bend=lambda draft: draft) -> Grown:
    """A tree for `UNEVEN` that likes what the target does not, so that the second sibling decides often."""
    drafter = Grown(UNEVEN, 2, 2, 6, replacement, bend)
    drafter.table = TableTarget.of([0.2, 0.2, 0.6]).table
    return drafter


# ── through the loop ──────────────────────────────────────────────────────────────────────────────────────────────────


@KINDS
def test_drawn_trees_keep_the_distribution(replacement):
    """Catches a q that is not what a sibling was drawn from, and noise that is used twice.  False alarm 1e-6."""
    drafter = Grown(TARGET, 3, 3, 8, replacement)
    assert keeps_the_distribution(TARGET, drafter, slots=2500)
    assert keeps_the_distribution(TARGET, drafter, slots=1500, sampling={"temperature": 0.7, "top_k": 3, "top_p": 0.9})
    _, _, kept = emitted(TARGET, drafter, slots=200)
    assert kept > 200


@KINDS
def test_a_tree_under_a_seed_emits_the_targets_own_draws(replacement):
    """Catches a tree that moves a seeded text, and one that ignores the target's noise: then less is kept."""
    plain, _, _ = emitted(TARGET, Grown(TARGET, 1, 1, 1, False), slots=300, seeded=True)
    found, _, kept = emitted(TARGET, Grown(TARGET, 3, 3, 8, replacement), slots=300, seeded=True)
    assert torch.equal(found, plain)
    _, _, chain = emitted(TARGET, Grown(TARGET, 1, 3, 3, False), slots=300, seeded=True)
    assert kept > 1.2 * chain


@KINDS
def test_a_tree_may_be_cut_by_a_policy(replacement):
    """Catches an order of nodes that hangs on what was drawn.  False alarm 1e-6."""

    def trust(draft: Draft) -> Draft:
        """How sure the parent's distribution is of its best token, known before the draw."""
        return replace(draft, confidence=draft.q.amax(-1).float().clamp(0, 1))

    drafter = Grown(TARGET, 2, 3, 6, True, trust)
    drafter.replacement = replacement
    assert keeps_the_distribution(TARGET, drafter, ByConfidence(6, 0.3), slots=2000)


def test_siblings_that_share_their_noise_are_caught(monkeypatch):
    """Planted fault: with replacement a younger sibling drawn from its elder's noise is the elder, whatever its q
    says."""
    assert keeps_the_distribution(UNEVEN, contrary(True), slots=1500)
    draw = Streams.draw

    def unsalted(self, weights, depth, purpose, salt=None):
        return draw(self, weights, depth, purpose, None if salt is None else 0 * salt)

    monkeypatch.setattr(Streams, "draw", unsalted)
    assert not keeps_the_distribution(UNEVEN, contrary(True), slots=1500)


def test_siblings_without_replacement_that_say_they_are_with_are_caught():
    """Planted fault: q of a younger sibling is not conditioned on its elders."""
    assert keeps_the_distribution(UNEVEN, contrary(False), slots=1500)
    assert not keeps_the_distribution(UNEVEN, contrary(False, unconditioned), slots=1500)


@pytest.mark.parametrize("replacement", [False, True])
def test_the_trees_of_a_small_model_keep_the_distribution(replacement, workshop):
    """Catches a cache or a mask that gives another q than what was drawn from.  False alarm 1e-6."""
    target = TableTarget.random(7)
    drafter = workshop.build(Case("small_model", {"width": 3, "nodes": 7, "replacement": replacement}), target)
    assert keeps_the_distribution(target, drafter, slots=1000, prompt=[0, 3])


# ── exactly ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Drawing(Chance):
    """Answers every draw of one slot's tree from a script."""

    def draw(self, weights, depth, purpose, salt=None):
        return torch.tensor([[self._answer((row / row.sum()).tolist()) for row in weights[0]]])


def error(
    parents: tuple[int, ...], replacement: bool, seed: int, bend: Callable[[Draft], Draft] = lambda draft: draft,
    temperature: float = 1.0, top_k: int = 0, depth: int = 3,
) -> float:  # fmt: skip
    """Largest difference between the distribution of the first `depth` tokens emitted and the target's, over every
    draft and coin."""
    p, q, judge = random_distribution(seed), random_distribution(seed + 77), SamplingJudge()
    judge.settings = Settings.of([Sampling(temperature, top_k=top_k)])

    def distribution(path):
        return judge.distribution(p(path).log()[None])[0]

    def path(tree, n):
        return () if n < 0 else (*path(tree, int(tree.parents[0, n])), int(tree.tokens[0, n]))

    def expand(tree, fresh):
        nodes = range(tree.tokens.shape[1] - fresh, tree.tokens.shape[1])
        return torch.stack([q(path(tree, n)).log() for n in nodes])[None]

    found = torch.zeros((len(distribution(())),) * depth, dtype=torch.float64)
    script: list[int] = []
    while True:
        chance = Drawing(script)
        draft = bend(
            trees.sampled(
                q(()).log()[None], expand, torch.tensor([len(parents)]), SimpleNamespace(judge=judge, streams=chance),
                parents=parents, replacement=replacement,
            )
        )  # fmt: skip
        if chance.weight > 0:
            rows = torch.stack([distribution(()), *(distribution(path(draft, n)) for n in range(len(parents)))])[None]
            for weight, out in outcomes(draft, rows):
                _spread(found, distribution, tuple(out[:depth]), chance.weight * weight)
        script = chance.script
        while script and script[-1] + 1 == chance.open[len(script) - 1]:
            script.pop()
        if not script:
            break
        script[-1] += 1
    exact = torch.zeros_like(found)
    _spread(exact, distribution, (), 1.0)
    return float((found - exact).abs().max())


SHAPES = {
    "siblings": (-1, -1),
    "all tokens": (-1, -1, -1),
    "both": (-1, -1, 0),
    "late sibling": (-1, 0, -1),
    "deep": (-1, 0, 0),
}


@KINDS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_a_drawn_tree_emits_follows_the_target_exactly(shape, replacement):
    """Catches any wrong q of a sibling, a repeated token's residual too, with no chance of a false alarm."""
    assert error(shape, replacement, 0) < 1e-12


@KINDS
def test_siblings_that_run_out_of_tokens_follow_the_target_exactly(replacement):
    """Catches a certain sibling that says it was drawn: two tokens are possible, three siblings asked for."""
    assert error((-1, -1, -1), replacement, 1, temperature=0.8, top_k=2) < 1e-12
    assert error((-1, -1, 0), replacement, 1, temperature=0.0) < 1e-12


def test_an_unconditioned_q_is_caught_exactly():
    """The planted fault above, where no draw can hide it; with replacement it is the truth."""
    assert error((-1, -1), False, 0, unconditioned) > 0.01
    assert error((-1, -1), True, 0, unconditioned) < 1e-12
