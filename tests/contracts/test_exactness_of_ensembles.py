"""The contracts of exactness, over an ensemble: every drafter's greedy text is that of averaging whole passes."""

import functools
from collections.abc import Callable

import pytest
import torch
from conftest import DEVICE, Case, Plain, Workshop, cases, fast, scaled, tiny_model, trained_drafters
from contracts import test_exactness

from outrider.decoding.protocols import Drafter
from outrider.lab.targets.ensemble import EnsembleTarget
from outrider.targets.load import load_target

NEED_ONE_MODEL = ("gemma4_assistant", "layer_skip")
"""Kinds that read one model's keys or cut down its layers; see `targets/test_ensemble_target.py`."""

CASES = [case for case in cases() if case.kind not in NEED_ONE_MODEL]


@pytest.fixture(scope="session")
def target() -> EnsembleTarget:
    """Two models of other shapes, which disagree often."""
    other = tiny_model(5, hidden_size=24, num_hidden_layers=2, head_dim=12, num_attention_heads=2)
    both = [tiny_model(), scaled(other, 1.2)]
    return EnsembleTarget([load_target(model.to(DEVICE)) for model in both], [0.55, 0.45])


@pytest.fixture(scope="session")
def plain() -> Plain:
    """The mean of the members' own passes over the whole text, token by token: (target, prompt, count) to the new
    tokens."""

    @functools.cache
    @torch.inference_mode()
    def continued(target: EnsembleTarget, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        text = list(prompt)
        for _ in range(count):
            ids = torch.tensor([text], device=target.device)
            both = zip(target.members, target.weights, strict=True)
            p = sum(weight * member.model(ids, use_cache=False).logits[0, -1].softmax(-1) for member, weight in both)
            text.append(int(p.argmax()))
        return tuple(text[len(prompt) :])

    def cut(target: EnsembleTarget, prompt: list[int], count: int) -> list[int]:
        return list(continued(target, tuple(prompt), -(-count // 48) * 48)[:count])

    return cut


@pytest.fixture(scope="session")
def drafter_of(
    workshop: Workshop, target: EnsembleTarget, prompts: list[list[int]], plain: Plain
) -> Callable[[Case], Drafter]:
    """Drafters for the ensemble, those that learn trained on its texts."""
    return trained_drafters(workshop, target, prompts, plain)


@pytest.mark.parametrize("case", fast(CASES, ("dspark",)))
def test_one_prompt_alone(case, target, prompts, plain, drafter_of, monkeypatch):
    """The laws of a single model: catches a member that is left behind when the other goes back."""
    test_exactness.test_one_prompt_alone(case, target, prompts, plain, drafter_of)
    test_exactness.test_slots_are_used_again_in_mid_flight(case, target, prompts, plain, drafter_of)
    test_exactness.test_an_end_token_ends_inside_a_block(case, target, prompts, plain, drafter_of, monkeypatch)
