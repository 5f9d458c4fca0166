"""A block drafter's graph drafts the blocks that the plain path drafts."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Case, Workshop, tiny_model
from drafters.proposals import watch

from outrider import fast
from outrider.decoding import state
from outrider.fast import compile_passes
from outrider.generation import generate
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

DSPARK, TREE, DOMINO = Case("dspark"), Case("dspark", {"siblings": (2, 1)}), Case("domino")
GREEDY, DRAWN, SEEDED = Sampling(), Sampling(0.8), Sampling(0.8, seed=11)
SLOW = [(DSPARK, 3, GREEDY), (DOMINO, 3, SEEDED), (Case("dflash2"), 3, DRAWN)]
FAST = [
    (DSPARK, 3, DRAWN), (TREE, 3, SEEDED), (Case("dspark", {"markov": "rnn"}), 3, GREEDY),
    (Case("dflash", {"anchor_predicts": False}), 3, DRAWN), (DOMINO, 1, SEEDED),
    (Case("dspark", {"vocabulary": 40, "siblings": (2,)}), 3, GREEDY),
    (Case("dflash2", {"window": 9, "vocabulary": 40}), 3, GREEDY), (Case("dflash2"), 3, SEEDED),
]  # fmt: skip


class Uncompiled:
    """A package that is the function it would be compiled from."""

    def __init__(self, path: Path, traced: torch.nn.Module):
        self.forward = traced.forward

    def padded(self, width: int) -> int:
        return width


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graph", Uncompiled)
    monkeypatch.setattr(fast.Compiled, "_on_disk", lambda self: Path("none"))


def is_the_plain_one(case: Case, slots: int, sampling: Sampling, workshop: Workshop, target: Any, prompts: Any) -> None:
    found, calls = [], 0
    for is_compiled in (False, True):
        drafter = workshop.build(case, target)
        if is_compiled:
            assert compile_passes(drafter) >= 0
            graph = (drafter.drawn if sampling.temperature else drafter.greedy).graph
            forward = graph.forward

            def counted(*given: object, forward: Any = forward) -> Any:
                nonlocal calls
                calls += 1
                return forward(*given)

            graph.forward = counted
        drafts, noise = watch(drafter), itertools.count(90)  # the same both times
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state.secrets, "randbits", lambda bits, noise=noise: next(noise))
            texts = generate(target, prompts, drafter, max_new_tokens=12, slots=slots, sampling=sampling)
        found.append(([one.tokens for one in texts], [one.draft for one in drafts]))
    (plain, said), (fast, mine) = found
    assert fast == plain
    for one, other in zip(mine, said, strict=True):
        assert (one.ids, one.tree, one.live) == (other.ids, other.tree, other.live)
        assert (one.q is None) == (other.q is None)
        if other.q is not None:
            torch.testing.assert_close(one.q, other.q, rtol=1e-6, atol=1e-8)
        if other.confidence is not None:
            torch.testing.assert_close(one.confidence, other.confidence, rtol=1e-5, atol=1e-5)
    assert calls > len(said) // 2


@pytest.mark.slow
@pytest.mark.parametrize(("case", "slots", "sampling"), SLOW, ids=str)
def test_a_compiled_block_is_the_plain_one(case, slots, sampling, workshop, target, prompts) -> None:
    """Catches taps, padding, masks or places that the graph reads otherwise."""
    is_the_plain_one(case, slots, sampling, workshop, target, prompts[:5])


@pytest.mark.parametrize(("case", "slots", "sampling"), FAST, ids=str)
def test_the_function_that_is_compiled_drafts_the_plain_block(
    case, slots, sampling, workshop, target, prompts, uncompiled
) -> None:
    """The same before it is compiled, which takes no minutes."""
    is_the_plain_one(case, slots, sampling, workshop, target, prompts[:4])


def test_a_block_is_not_drafted_by_a_graph_of_former_weights(workshop: Workshop, uncompiled: None) -> None:
    """Catches a drafter that is trained on and drafts as before, whether its own weights changed or a borrowed one."""
    target = load_target(tiny_model(), compile=False)
    drafter = workshop.build(Case("dspark"), target)
    compile_passes(drafter)

    def fits() -> bool:
        """Asked of a new batch's memory: within one batch weights stay."""
        kept = drafter.allocate(target.allocate(1, 40)).kv_cache
        kept.open([0], 3)
        with torch.inference_mode():
            taps = torch.zeros(1, 3, len(drafter.taps), target.spec.hidden, dtype=torch.float64)
            drafter.backbone.remember(taps, torch.arange(3)[None], kept)
        kept.append([3])
        return all(step.fits(kept, [0], 8) for step in drafter.steps)

    for weight in (drafter.backbone.fc.weight, target.model.lm_head.weight):
        assert fits()
        with torch.no_grad():
            weight.mul_(1.0)
        assert not fits()
        assert compile_passes(drafter) == 0
