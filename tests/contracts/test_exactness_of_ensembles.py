"""The contracts of exactness, over an ensemble: every drafter's greedy text is that of averaging whole passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import DEVICE, Case, Plain, Workshop, cases, fast, scaled, tiny_model, trained_drafters
from contracts import test_exactness
from contracts.again import of_cases
from contracts.test_exactness import (  # noqa: F401  the laws, over the fixtures of this file
    oracle,
    test_a_tree_ends_inside_its_block,
    test_a_tree_whose_path_is_no_prefix,
)
from contracts.test_hostile import test_greedy_output_never_changes  # noqa: F401

from outrider.decoding.protocols import Drafter
from outrider.targets.ensemble import EnsembleTarget
from outrider.targets.load import load_target

NEED_ONE_MODEL = ("gemma4_assistant", "layer_skip")
"""Kinds that read one model's keys or cut down its layers; see `targets/test_ensemble_target.py`."""

FAST = ("ngram", "small_model", "eagle3", "dspark", "pipeline")
"""Kinds that are tried in `make test`: one without weights, a model, features, a block, stages."""
KINDS = fast(cases(), FAST)
LAWS = ("test_one_prompt_alone", "test_slots_are_used_again_in_mid_flight")
globals().update((name, test) for name, test in of_cases(test_exactness, KINDS) if name in LAWS)


def members(**sizes: object) -> EnsembleTarget:
    """Two models of other shapes, which disagree often."""
    other = tiny_model(5, hidden_size=24, num_hidden_layers=2, head_dim=12, num_attention_heads=2, **sizes)
    both = [tiny_model(**sizes), scaled(other, 1.2)]
    return EnsembleTarget([load_target(model.to(DEVICE)) for model in both], [0.55, 0.45])


@pytest.fixture(scope="session")
def target() -> EnsembleTarget:
    return members()


@pytest.fixture(scope="session")
def short_target() -> EnsembleTarget:
    """The same weights with a context of 20 tokens."""
    return members(max_position_embeddings=20)


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


@dataclass(frozen=True)
class OfFirst(Workshop):
    """Small drafters for an ensemble; what is made from a target's weights is made from its first member's."""

    def config(self, case: Case, target: EnsembleTarget) -> object:
        if case.kind in NEED_ONE_MODEL:
            pytest.skip("an ensemble refuses it")
        return super().config(case, target)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return OfFirst(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def drafter_of(
    workshop: Workshop, target: EnsembleTarget, prompts: list[list[int]], plain: Plain
) -> Callable[[Case], Drafter]:
    """Drafters for the ensemble, those that learn trained on its texts."""
    return trained_drafters(workshop, target, prompts, plain)


def test_the_members_disagree_often_enough(target, prompts, plain):
    """Guards the tests here: where one member decides alone, any mean would do."""
    texts = torch.tensor([(prompt + plain(target, prompt, 48))[:40] for prompt in prompts])
    ensemble = [tuple(plain(target, prompt, 24)) for prompt in prompts]
    alone = [
        [tuple(member.model(text[None]).logits[0].argmax(-1).tolist()) for text in texts] for member in target.members
    ]
    assert alone[0] != alone[1]
    share = sum(a == b for one, other in zip(*alone, strict=True) for a, b in zip(one, other, strict=True))
    assert share < 0.8 * texts.numel() and len(set(ensemble)) > 4
