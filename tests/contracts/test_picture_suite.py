"""The contract suite for a target of words and pictures.  Its laws are those of the other files; what they ask for is
made here."""

from collections.abc import Callable

import pytest
import torch
from conftest import Case, fast, trained_drafters
from contracts import test_exactness, test_restarts, test_slots
from picture_targets import picture_model

from outrider.decoding.protocols import Drafter
from outrider.lab.targets.pictures import vocabulary
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

CASES = [Case("jacobi", {"init": "repeat"}), Case("eagle3", {"aggregate": "metaquery"}), Case("jacobi_denoising"),
         Case("small_model"), Case("ngram")]  # fmt: skip
"""The methods whose papers are about pictures, the drafter of the lossy scorer, and one that looks up."""


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return load_target(picture_model())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A caption, a picture, both, and the end of one."""
    noise = torch.Generator().manual_seed(3)
    codes = torch.randint(vocabulary.FIRST, 64, (6, 7), generator=noise).tolist()
    caption = vocabulary.tokenizer(64 - vocabulary.FIRST).encode("a 7:")
    equals, full_stop = vocabulary.tokenizer(1).encode("=.")
    whole = [*codes[1], equals, *caption, *codes[2]]
    clip = [*caption, *codes[4], full_stop, *codes[5]]
    return [caption, codes[0][:1], whole, codes[3][:3], clip, caption[:1], [*codes[0], equals], codes[1][:3] * 3]


@pytest.fixture(scope="module")
def drafter_of(workshop, target, prompts, plain) -> Callable[[Case], Drafter]:
    return trained_drafters(workshop, target, prompts, plain)


@pytest.mark.parametrize("case", fast(CASES, ("jacobi", "eagle3")))
def test_the_laws_of_text_hold_for_words_and_pictures(case, target, prompts, plain, drafter_of, workshop):
    """Catches a method that takes codes for another kind of token than letters."""
    if case.kind != "jacobi_denoising":  # without its training it drafts noise; its texts are equal all the same
        test_exactness.test_one_prompt_alone(case, target, prompts, plain, drafter_of)
    if case.kind not in {*test_restarts.LEARNING, "jacobi_denoising"}:
        test_restarts.test_every_drafter_begun_again_has_as_much_accepted(case, target, prompts, drafter_of)
    test_exactness.test_slots_are_used_again_in_mid_flight(case, target, prompts, plain, drafter_of)
    test_slots.test_a_slot_used_again_drafts_as_a_fresh_one(case, target, workshop)
