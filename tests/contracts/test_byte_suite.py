"""The contract suite for a target of bytes and patches, trained for both kinds that draft for it.

Its laws are those of the other files; what they ask for is made here.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from byte_targets import byte_model
from conftest import OF_BYTES, Case, batch_of, fast, train
from contracts import test_exactness, test_restarts, test_slots

from outrider.decoding.protocols import Drafter
from outrider.drafters import find
from outrider.generation import generate
from outrider.lab.drafters import patch_diffusion
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

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
    train(model, batch_of(before, (), texts), 35, lr=5e-3)
    return model.eval().drafter().target


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


@pytest.mark.parametrize("case", fast(CASES, OF_BYTES))
def test_one_prompt_alone(case, target, prompts, plain, drafter_of, workshop):
    """The laws of other targets: catches a latent that is kept of a rejected byte, and one that ends a patch late."""
    test_exactness.test_one_prompt_alone(case, target, prompts, plain, drafter_of)
    test_exactness.test_slots_are_used_again_in_mid_flight(case, target, prompts, plain, drafter_of)
    test_restarts.test_every_drafter_begun_again_has_as_much_accepted(case, target, prompts, drafter_of)
    test_slots.test_a_slot_used_again_drafts_as_a_fresh_one(case, target, workshop)
