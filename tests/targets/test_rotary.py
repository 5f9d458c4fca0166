"""Rotary factors that look at the length of a text: each text has its own, as in `generate`."""

import copy
import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from contracts.parties import Oracle
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.decoding import scheduler as decoding
from outrider.generation import generate
from outrider.targets.hf.proof.miniature import enlivened
from outrider.targets.load import load_target

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 2.0 * n for n in range(8)],
    "original_max_position_embeddings": 24,
}  # fmt: skip
FAMILIES = {
    "longrope, reread": ("phi3", {"max_position_embeddings": 128, "original_max_position_embeddings": 24}, LONGROPE),
    "longrope": ("llama", {"max_position_embeddings": 128}, LONGROPE),
    "dynamic": ("llama", {"max_position_embeddings": 24}, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
}  # fmt: skip
PROMPTS = [list(range(2, 12)), [(7 * n) % 60 + 2 for n in range(40)], [9, 3, 5], [(5 * n) % 60 + 2 for n in range(24)]]
"""Before the limit and crossing it, beyond, too short to reach it, and ending at it."""
COUNTS = 24


def model_of(name: str):
    kind, sizes, rope = FAMILIES[name]
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES, **sizes, rope_parameters=dict(rope))
    return enlivened(AutoModelForCausalLM.from_config(config)).double().eval()


@functools.cache
def texts_of(name: str) -> list[list[int]]:
    """Each by a model of its own: factors of a long text stay in it."""
    settings = {"max_new_tokens": COUNTS, "do_sample": False}
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    return [model_of(name).generate(own, attention_mask=torch.ones_like(own), **settings)[0].tolist() for own in ids]


@pytest.mark.parametrize(("name", "chunk"), [*((name, 7) for name in FAMILIES), ("longrope, reread", 512)])
def test_text_that_crosses_the_limit_is_the_models_own(name, chunk, monkeypatch):
    """Catches factors of the longest row given to all."""
    monkeypatch.setattr(decoding, "PREFILL_CHUNK", chunk)  # a chunk that goes by its own end has a shorter text's keys
    target = load_target(model_of(name))
    assert target.spec.mode == "tree"
    for drafter in (None, Oracle(texts_of(name), SIZES["vocab_size"], true_is_eldest=False)):
        found = generate(target, PROMPTS, drafter, max_new_tokens=COUNTS, slots=4)
        for prompt, text, generation in zip(PROMPTS, texts_of(name), found, strict=True):
            assert generation.tokens == text[len(prompt) :]


def test_threads_that_share_a_target_keep_their_own_factors():
    """Catches factors that another thread's pass left in the module: it holds those that were used last."""
    target = load_target(model_of("dynamic"))
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda prompt: generate(target, prompt, max_new_tokens=COUNTS)[0].tokens, PROMPTS))
    finally:
        sys.setswitchinterval(5e-3)
    assert [prompt + tokens for prompt, tokens in zip(PROMPTS, texts, strict=True)] == texts_of("dynamic")


def test_a_copy_of_a_loaded_model_calls_its_own_modules():
    """Catches a closure, which a copy shares with the original: its factors would be the original's."""
    copied = copy.deepcopy(load_target(model_of("longrope")).model)
    taught = [module for module in copied.modules() if isinstance(vars(module).get("forward"), functools.partial)]
    assert taught
    assert all(module.forward.args[0] is module for module in taught)
