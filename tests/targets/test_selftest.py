"""The self-test catches a model that ignores its cache, and stores its answer on disk."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import first, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import CAUSAL, NESTED, built, continued
from outrider.errors import DataError, TargetError
from outrider.generation import generate
from outrider.storage import cache
from outrider.targets.hf.proof import capabilities, miniature, selftest
from outrider.targets.load import load_target


def assert_exact(model, count: int = 6) -> None:
    """Beside a longer prompt, and beside one of the same length."""
    target = load_target(model)
    target.ends = frozenset()
    prompts = [[5, 9, 11], [7] * 40, [3, 8, 4]]
    wanted = [continued(model, prompt, count)[len(prompt) :] for prompt in prompts]
    assert [found.tokens for found in generate(target, prompts, max_new_tokens=count, slots=3)] == wanted


@pytest.mark.parametrize("kind", first(["gpt_neo", "bart", "mpt", "deepseek_v32", "git", "xglm", "beam"]))
def test_a_config_of_the_class_alone_is_enough(kind):
    """Catches a size that is read under a name that the class does not have."""
    assert_exact(built(kind, CAUSAL, torch.float32 if kind in ("xglm", "beam") else torch.float64))
    if kind == "gpt_neo":  # its local layers count columns, which is right only before its window is full
        assert load_target(built(kind, CAUSAL)).spec.mode == "chain"


@pytest.mark.parametrize("kind", first(["gemma3", "qwen2_5_vl", "cosmos3_omni"]))
def test_the_text_part_of_a_model_that_reads_images_is_a_target(kind):
    """Catches sizes that stand in a nested config, and a vision tower that is taken for the decoder."""
    model = built(kind, NESTED)
    target = load_target(model)
    text = model.config.get_text_config(decoder=True)
    assert (target.spec.layers, target.spec.hidden, target.spec.vocabulary) == (
        text.num_hidden_layers, text.hidden_size, text.vocab_size,
    )  # fmt: skip
    assert_exact(model)


def test_images_are_refused_by_name():
    """Catches an image that is dropped in silence, or a tensor error deep in the model."""
    model = built("gemma3", NESTED)
    target = load_target(model)
    with pytest.raises(DataError, match="image"):
        target.encode([3, model.config.image_token_id])

    class Chat:
        chat_template = ""

    target.tokenizer = Chat()
    with pytest.raises(DataError, match="'image'"):
        target.encode(
            [{"role": "user", "content": [{"type": "text", "text": "what is this"}, {"type": "image", "url": "x"}]}]
        )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("openai-gpt", "it has no cache"), ("reformer", "with its own cache differ"), ("bert", "not causal"),
        ("phi4_multimodal", "its own `generate`"),
    ],
)  # fmt: skip
def test_a_model_without_a_cache_or_that_is_not_causal_is_refused_by_name(kind, reason):
    """Catches a reference that is measured through the cache under test."""
    with pytest.raises(TargetError, match=rf"{kind}.*can't be decoded here.*{reason}"):
        load_target(built(kind, CAUSAL, torch.float32))


def test_a_model_that_is_random_is_refused(monkeypatch):
    """Catches noise that is taken for rounding and allows all that comes after it."""
    model = tiny_model()
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: head(hidden) + torch.randn(1))
    with pytest.raises(TargetError, match="it is random"):
        selftest.selftest(load_untested(model))


def load_untested(model):
    return type(load_target(tiny_model()))(model, tested=False)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return cache.folder() / "selftest"


def passes(model) -> int:
    """Forward passes that a load costs the model itself."""
    counted = []
    handle = model.register_forward_pre_hook(lambda *_: counted.append(1))
    load_target(model)
    handle.remove()
    return len(counted)


def test_a_miniature_is_tested_once(folder, monkeypatch):
    """Catches a test that is asked of the model again, an answer that is not found again or is given to another config:
    107 passes of a large model take minutes."""
    assert passes(tiny_model()) <= 5
    assert len(list(folder.glob("*.json"))) == 1
    asked = []
    monkeypatch.setattr(miniature, "build", lambda model: asked.append(model))
    assert passes(tiny_model(seed=1)) <= 5
    assert not asked
    load_target(tiny_model(rms_norm_eps=1e-5))
    load_target(tiny_model().float())
    assert len(asked) == 2


def test_a_damaged_answer_is_asked_again_and_a_model_that_does_not_agree_is_asked_all(folder, monkeypatch):
    """Catches a file that was cut off, or is of another version, and is believed; and an answer on disk that outweighs
    what the model itself says."""
    target = load_target(tiny_model())
    [path] = folder.glob("*.json")
    for damage in ("{", '{"masks": "x", "selftest": null, "refused": "no"}'):
        path.write_text(damage)
        assert load_target(tiny_model()).selftest.mode == target.selftest.mode
        assert json.loads(path.read_text())["selftest"]["mode"] == target.selftest.mode
    stored = capabilities._load(path)
    changed = replace(stored, masks="one", selftest=replace(stored.selftest, mode="chain"))
    capabilities._save(path, changed)
    assert load_target(tiny_model()).spec.mode == "chain"
    monkeypatch.setattr("outrider.targets.hf.proof.selftest.agreed", lambda *asked: None)
    assert load_target(tiny_model()).spec.mode == target.spec.mode == "tree"


def test_a_miniature_has_every_kind_of_layer_and_short_limits():
    """Catches a miniature that is small because it lacks what the model has."""
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26, sliding_window=4096)
    small = type(config)(**miniature.arguments(config, narrow=True))
    assert set(small.layer_types) == set(config.layer_types)
    assert small.num_hidden_layers < 8
    assert small.sliding_window == miniature.LIMIT
    assert (
        small.num_attention_heads // small.num_key_value_heads
        == config.num_attention_heads // config.num_key_value_heads
    )
    assert small.head_dim == config.head_dim
    state = torch.random.get_rng_state()
    model = AutoModelForCausalLM.from_config(small)
    after = torch.random.get_rng_state()
    assert not torch.equal(state, after)
    assert miniature.build(model) is not None
    assert torch.equal(torch.random.get_rng_state(), after)
