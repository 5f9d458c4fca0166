"""Drawn trees keep the target's distribution: through the loop, and exactly over every draft and every coin."""

from types import SimpleNamespace

import pytest
import torch
from conftest import Case
from contracts.chances import Chance, difference, every_script, judged, keeps_the_distribution, paths_of
from contracts.parties import TableTarget
from contracts.test_acceptance_rule_enumerated import random_distribution

from outrider.nn.drafting import trees
from outrider.sampling.distribution import Settings
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

KINDS = pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])


def test_the_trees_of_a_small_model_keep_the_distribution(workshop):
    """Catches a cache or a mask that gives another q than what was drawn from.  False alarm 1e-6."""
    target = TableTarget.random(7)
    drafter = workshop.build(Case("small_model", {"width": 3, "nodes": 7}), target)
    assert keeps_the_distribution(target, drafter, slots=700, prompt=[0, 3])


class Drawing(Chance):
    """Answers every draw of one slot's tree from a script."""

    def draw(self, weights, depth, purpose, salt=None):
        return torch.tensor([[self._answer((row / row.sum()).tolist()) for row in weights[0]]])


def error(
    parents: tuple[int, ...], replacement: bool, seed: int, temperature: float = 1.0, top_k: int = 0
) -> float:  # fmt: skip
    """Largest difference between the distribution of the first three tokens emitted and the target's, over every draft
    and coin."""
    p, q, judge = random_distribution(seed), random_distribution(seed + 77), SamplingJudge()
    judge.settings = Settings.of([Sampling(temperature, top_k=top_k)])

    def distribution(path):
        return judge.distribution(p(path).log()[None])[0]

    def grown(chance):
        expand = lambda tree, fresh: torch.stack([q(path).log() for path in paths_of(tree)[-fresh:]])[None]
        state = SimpleNamespace(judge=judge, streams=chance)
        budget = torch.tensor([len(parents)])
        return trees.sampled(q(()).log()[None], expand, budget, state, parents=parents, replacement=replacement)

    return difference(judged(every_script(grown, Drawing), distribution), distribution)


SHAPES = {
    "all tokens": (-1, -1, -1),
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
