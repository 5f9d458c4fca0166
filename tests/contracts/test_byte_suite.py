"""The contract suite for a target of bytes and patches, trained for both kinds that draft for it.

Its tests are those of the other files; what they ask for is made here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from byte_targets import SIZES, byte_model
from conftest import OF_BYTES, Case, batch_of, train
from contracts import test_exactness, test_restarts, test_slots, test_threads
from contracts.again import of_cases
from contracts.test_slots import few_objects  # noqa: F401  (a fixture)
from contracts.test_threads import eager_switches  # noqa: F401  (a fixture)
from sampling import test_prefix
from sampling.test_prefix import wanted  # noqa: F401  (a fixture)
from serve import test_prefixes

from outrider.decoding.protocols import Drafter
from outrider.drafters import find, patch_diffusion
from outrider.generation import generate
from outrider.targets.byte_model import ByteConfig, ByteModel
from outrider.targets.load import load_target
from outrider.targets.transformers import TransformersTarget

CASES = [*map(Case, OF_BYTES), Case("eagle3")]
"""Both kinds, and one that is trained on the taps of the local layers."""


@pytest.fixture(scope="module")
def target(prompts) -> TransformersTarget:
    """Trained on what it wrote itself, so that it still writes that and fills blocks of it."""
    before = load_target(byte_model())
    texts = torch.tensor([(prompt + generate(before, prompt, max_new_tokens=60)[0].tokens)[:48] for prompt in prompts])
    torch.manual_seed(1)
    config = patch_diffusion.Config(block=4, mask_token=63, anchors=16)
    model = patch_diffusion.TargetModel(config, before).double()
    train(model, batch_of(before, (), texts), 150, lr=2e-3)
    return model.eval().drafter().target


@pytest.fixture(scope="module")
def short_target(target) -> TransformersTarget:
    """The same weights with a context of 20 bytes."""
    model = ByteModel(ByteConfig(**SIZES | {"max_position_embeddings": 20})).double().eval()
    model.load_state_dict(target.model.state_dict())
    return load_target(model)


@pytest.fixture(scope="module")
def drafter_of(workshop, target, prompts, plain) -> Callable[[Case], Drafter]:
    @functools.cache
    def made(case: Case) -> Drafter:
        if not case.trains or "Model" not in vars(find(case.kind)):
            return workshop.build(case, target)
        model = workshop.model(case, target)
        texts = torch.tensor([(prompt + plain(target, prompt, 48))[:40] for prompt in prompts])
        train(model, batch_of(target, model.taps, texts), 60)
        return model.eval().drafter()

    return made


for file in (test_exactness, test_slots, test_restarts, test_threads, test_prefix, test_prefixes):
    globals().update(of_cases(file, CASES))


def test_tests_were_found():
    """Guards against a suite that runs nothing."""
    assert sum(name.startswith("test_") for name in globals()) > 20
