"""SmolLM2-135M-Instruct as its GGUF file stores it, against transformers' own dequantised model in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import SMOLLM2
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig

from outrider import generate, load_drafter, load_target
from outrider.targets.identity import load_tokenizer

PROMPTS = ("def read(path):\n    ", "The three laws of thermodynamics are", "Zürich, 東京 and 12345:")
NEW = 40


@pytest.fixture(scope="module")
def reference() -> Any:
    source = {"pretrained_model_name_or_path": str(SMOLLM2.parent), "gguf_file": SMOLLM2.name}
    return AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(SMOLLM2, compile=False)


@torch.inference_mode()
def test_logits_are_those_of_the_dequantised_model(target: Any, reference: Any) -> None:
    """Catches a permutation, a scale or a split of texts that tiny models don't show; the difference is held against
    that of float32 itself from float64."""
    exact: nn.Module = copy.deepcopy(reference).double()
    for prompt in PROMPTS:
        ids = torch.tensor([target.encode(prompt)])
        ours, theirs, truth = (model(input_ids=ids).logits for model in (target.model, reference, exact))
        rounding = (theirs.double() - truth).abs().max()
        assert (ours.double() - truth).abs().max() <= 3 * rounding
        assert (ours - theirs).abs().max() <= 4 * rounding


@torch.inference_mode()
def test_greedy_texts_are_those_of_the_dequantised_model(target: Any, reference: Any) -> None:
    """Catches an error that only long texts show, and a drafter that changes a token."""
    drafter = load_drafter("suffix", target)
    for prompt in PROMPTS:
        ids = torch.tensor([target.encode(prompt)])
        expected = reference.generate(ids, do_sample=False, max_new_tokens=NEW)[0, ids.shape[1] :].tolist()
        for own in (None, drafter):
            [found] = generate(target, [prompt], own, max_new_tokens=NEW)
            assert found.tokens == expected


def test_it_takes_the_memory_of_its_file(target: Any) -> None:
    """Catches a float copy of its matrices, which is four times the file."""
    held = {part.data_ptr(): part.nbytes for part in (*target.model.parameters(), *target.model.buffers())}
    assert sum(held.values()) <= 1.05 * SMOLLM2.stat().st_size


def test_hashes_are_those_of_the_checkpoint_made_from_it(target: Any) -> None:
    """Catches drafters trained for `smollm2` that are refused for the file that it was made from."""
    assert target.spec.weights_hash == "7d222eedbdb0c8bf"
    assert target.spec.tokenizer_hash == "3140867f1c79f789" and load_tokenizer(str(SMOLLM2))[1] == ""
