"""A block drafter's graph drafts the blocks that the plain path drafts."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from conftest import Case, Workshop, tiny_model

from outrider.compiled import compile_passes
from outrider.decoding import state
from outrider.generation import generate
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target
from outrider.targets.transformers import TransformersTarget

CASES = (
    Case("dspark"), Case("dflash"), Case("dspark", {"siblings": (2, 1)}), Case("dspark", {"markov": "rnn"}),
    Case("dflash", {"anchor_predicts": False}), Case("domino"),
)  # fmt: skip
SAMPLINGS = {"greedy": Sampling(), "drawn": Sampling(0.8), "seeded": Sampling(0.8, seed=11)}
FAST = [(Case("dspark"), 1, "greedy"), (Case("dspark"), 3, "seeded")]
ALL = [
    pytest.param(*one, marks=[] if one in FAST else [pytest.mark.slow], id="-".join(map(str, one)))
    for one in itertools.product(CASES, (1, 3), SAMPLINGS)
]


@pytest.mark.parametrize(("case", "slots", "chosen"), ALL)
def test_a_compiled_block_is_the_plain_one(
    case: Case, slots: int, chosen: str, workshop: Workshop, target: TransformersTarget, prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches taps, padding, masks or places that the graph reads otherwise: drafts are compared, not only what is
    kept."""
    found, calls, sampling = [], 0, SAMPLINGS[chosen]
    for is_compiled in (False, True):
        drafter, drafts = workshop.build(case, target), []
        if is_compiled:
            assert compile_passes(drafter) >= 0
            graph = (drafter.drawn if sampling.temperature else drafter.greedy).graph
            forward = graph.forward

            def counted(*given: object, forward: Any = forward) -> Any:
                nonlocal calls
                calls += 1
                return forward(*given)

            graph.forward = counted
        monkeypatch.setattr(drafter, "propose", functools.partial(noted, drafter.propose, drafts))
        noise = itertools.count(90)  # the same both times
        monkeypatch.setattr(state.secrets, "randbits", lambda bits, noise=noise: next(noise))
        texts = generate(target, prompts, drafter, max_new_tokens=16, slots=slots, sampling=sampling)
        found.append((texts, drafts))
    (plain, said), (fast, mine) = found
    assert [generation.tokens for generation in fast] == [generation.tokens for generation in plain]
    assert len(mine) == len(said)
    for one, other in zip(mine, said, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.parents, other.parents)
        assert torch.equal(one.sizes, other.sizes)
        assert (one.q is None) == (other.q is None)
        if other.q is not None:
            torch.testing.assert_close(one.q, other.q, rtol=1e-6, atol=1e-8)
        if other.confidence is not None:
            torch.testing.assert_close(one.confidence, other.confidence, rtol=1e-5, atol=1e-5)
    assert calls > len(said) // 2


def noted(propose, drafts, memory, state, budget):
    drafts.append(propose(memory, state, budget))
    return drafts[-1]


def test_a_block_is_not_drafted_by_a_graph_of_former_weights(workshop: Workshop) -> None:
    """Catches a drafter that is trained on and drafts as before, whether its own weights changed or a borrowed one."""
    target = load_target(tiny_model())
    drafter = workshop.build(Case("dspark"), target)
    compile_passes(drafter)  # the test before left it on disk

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


def test_plain_blocks_go_on_after_one_was_traced(workshop, target, prompts, plain):
    """Catches tensors of a trace that stay behind in the drafter: a server that compiles at its start drafts plainly
    for some requests."""
    drafter = workshop.build(Case("dspark", {"siblings": (2, 1)}), target)
    for step in drafter.steps:
        function, arguments, dims = step.example()
        arguments = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, arguments)
        with torch.no_grad():
            torch.export.export(function, arguments, dynamic_shapes=dims, strict=False)
    found = generate(target, prompts[:3], drafter, max_new_tokens=20, slots=3, policy="fixed")
    assert [one.tokens for one in found] == [plain(target, prompt, 20) for prompt in prompts[:3]]
