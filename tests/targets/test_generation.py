"""`generate` without a `sampling` is `model.generate(do_sample=False)`, whatever the model's generation_config says."""

import logging

import pytest
import torch
from conftest import tiny_model
from contracts.parties import Oracle
from transformers import WatermarkingConfig

from outrider.errors import ConfigError
from outrider.generation import generate, stream
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length")
NEW = 20
ENDS = [n for n in range(64) if n % 9 == 4]
OBEYED = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "suppress_tokens": {"suppress_tokens": [*range(0, 64, 3), 64, -1]},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(0, 64, 5)] + [[n, n + 1] for n in range(60)]},
    "bad_words_ids, an end": {"bad_words_ids": [[16], *([end] for end in ENDS)]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2}, "min_new_tokens, too many": {"min_new_tokens": 100},
    "both lengths": {"min_length": 30, "min_new_tokens": 12}, "forced_bos_token_id": {"forced_bos_token_id": 11},
    "forced_bos_token_id, suppressed": {"forced_bos_token_id": 8, "begin_suppress_tokens": list(range(0, 64, 2))},
    "forced_eos_token_id, several": {"forced_eos_token_id": [13, 4], "min_new_tokens": 40},
    "sequence_bias": {"sequence_bias": [[[5], 2.0], [[9, 3], 7.0]], "repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5, "repetition_penalty": 1.2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.3)},
    "remove_invalid_values": {"remove_invalid_values": True, "bad_words_ids": [[3]]},
    "idle": {
        "do_sample": True, "temperature": 1.7, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "typical_p": 0.7,
        "renormalize_logits": True, "max_new_tokens": 3, "max_length": 7, "prompt_lookup_num_tokens": 3,
        "num_assistant_tokens": 7,
    },
    "one end": {"eos_token_id": 13}, "no end": {"eos_token_id": None},
    "many": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [1, 2], "begin_suppress_tokens": [8],
        "bad_words_ids": [[3], [4, 8]], "min_new_tokens": 6, "forced_eos_token_id": 22, "do_sample": True,
        "temperature": 0.6,
    },
}  # fmt: skip
REFUSED = {
    "num_beams": 3, "num_return_sequences": 2, "penalty_alpha": 0.6, "dola_layers": "high", "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(), "token_healing": True, "stop_strings": ["a"], "max_time": 3.0,
    "constraints": [1], "force_words_ids": [[1]], "is_assistant": True,
}  # fmt: skip
UNREADABLE = {
    "repetition_penalty": -1.0, "no_repeat_ngram_size": "two", "sequence_bias": {"5": 2.0}, "bad_words_ids": [["a"]],
    "forced_eos_token_id": 64, "forced_bos_token_id": -1, "exponential_decay_length_penalty": 3, "suppress_tokens": 5,
    "min_new_tokens": "many",
}  # fmt: skip


@pytest.fixture(scope="module")
def own_target():
    """A target of its own, whose generation_config a test may change."""
    return load_target(tiny_model())


@pytest.fixture
def configured(own_target, monkeypatch):
    """Sets keys of the model's generation_config after it was loaded, for one test."""

    def set_keys(**keys):
        for key, value in {"eos_token_id": ENDS, "pad_token_id": 0, **keys}.items():
            monkeypatch.setattr(own_target.model.generation_config, key, value, raising=False)
        return own_target

    return set_keys


def by_transformers(target, prompt: list[int], **options) -> list[int]:
    text = torch.tensor([prompt])
    out = target.model.generate(
        text, attention_mask=torch.ones_like(text), do_sample=False, **{"max_new_tokens": NEW, **options}
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    """Unequal prompts, one of a single token, one that repeats itself."""
    return [*prompts[:2], prompts[-1]]


@pytest.fixture(scope="module")
def unasked(own_target, texts) -> list[list[int]]:
    """What the prompts become where the config names ends and nothing else."""
    return [by_transformers(own_target, prompt, eos_token_id=ENDS, pad_token_id=0) for prompt in texts]


@pytest.mark.parametrize("name", OBEYED)
def test_every_key_of_a_generation_config_means_what_it_means_to_generate(name, configured, texts, unasked):
    """Catches a key that is dropped in silence, in plain decoding, behind a drafter."""
    target = configured(**OBEYED[name])
    wanted = [by_transformers(target, prompt) for prompt in texts]
    assert (wanted == unasked) == (name == "idle")
    oracle = Oracle([prompt + text for prompt, text in zip(texts, wanted, strict=True)], 64)
    for drafter in (None, oracle):
        found = generate(target, texts, drafter, max_new_tokens=NEW, slots=3)
        assert [generation.tokens for generation in found] == wanted
    assert sum(sum(generation.accepted) for generation in found) > sum(map(len, wanted)) / 4


def test_a_key_that_is_not_greedy_decoding_is_refused_by_name(configured, monkeypatch):
    """Catches a beam search that is answered greedily, and a refusal that does not say what to do."""
    for key, value in REFUSED.items():
        target = configured(**{key: value})
        for call in (generate, stream):
            with pytest.raises(ConfigError, match=rf"generation_config\.{key}.*remove the key.*sampling="):
                call(target, [1, 2], max_new_tokens=3)
        assert len(generate(target, [1, 2], max_new_tokens=3, sampling=Sampling())[0].tokens) > 0
        monkeypatch.undo()


def test_a_key_that_cant_be_read_is_refused_by_name(configured, monkeypatch):
    """Catches a TypeError from deep within, or an index error at the step that first needs the value."""
    for key, value in UNREADABLE.items():
        with pytest.raises(ConfigError, match=key):
            generate(configured(**{key: value}), [1, 2], max_new_tokens=3)
        monkeypatch.undo()


def test_a_sampling_takes_the_place_of_the_configs_settings_but_not_of_its_ends(configured, prompts):
    """Catches penalties that are applied twice, and an explicit setting that loses the model's ends."""
    target = configured(repetition_penalty=1.4, no_repeat_ngram_size=2)
    found = generate(target, prompts, max_new_tokens=NEW, sampling=Sampling())
    wanted = [by_transformers(target, prompt, repetition_penalty=1.0, no_repeat_ngram_size=0) for prompt in prompts]
    assert [generation.tokens for generation in found] == wanted
    assert any(generation.finish_reason == "stop" for generation in found)


def test_ends_are_those_of_the_moment(configured, own_target):
    """Catches ends that are noted at load, so that those set later end nothing."""
    for value, ends in ((5, {5}), (None, set()), ([3, 7], {3, 7}), (torch.tensor([2]), {2}), (torch.tensor(2), {2})):
        assert configured(eos_token_id=value).ends == ends
    again = load_target(own_target.model)
    again.ends = frozenset()
    assert again.ends == frozenset() and own_target.ends == {2}


def test_a_model_whose_config_alone_names_an_end_says_that_texts_will_not_stop_there(caplog):
    """Catches a text that stops where `generate` goes on, and one that goes on without a word."""
    model = tiny_model(eos_token_id=5)
    model.generation_config.eos_token_id = None
    with caplog.at_level(logging.WARNING):
        target = load_target(model)
    assert target.ends == frozenset()
    assert "generation_config.eos_token_id" in caplog.text
