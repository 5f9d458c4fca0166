"""What can't be decoded exactly is refused by name; what is refused says what to do."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import TargetError
from outrider.targets.load import load_target

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": None,
}  # fmt: skip


def saved(tmp_path, family: str, **overrides) -> str:
    config = AutoConfig.for_model(family, **(SMALL | overrides))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_an_unknown_path_is_refused(tmp_path):
    """Catches a traceback of another library where a name was mistyped."""
    with pytest.raises(TargetError, match="nowhere"):
        load_target(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="empty"):
        load_target(tmp_path / "empty")


def test_a_broken_config_is_refused(tmp_path):
    """Catches a JSON error without the name of the target."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TargetError, match="can't load target"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(TargetError):
        load_target(tmp_path)


def test_a_dtype_that_is_none_is_refused(tmp_path):
    """Catches an attribute error of torch."""
    path = saved(tmp_path, "qwen3")
    for dtype in ("float12", "int64", "nn"):
        with pytest.raises(TargetError, match="dtype"):
            load_target(path, dtype=dtype)
    assert load_target(path, dtype="float64").spec.dtype == "float64"
    assert load_target(path, dtype=torch.bfloat16).spec.dtype == "bfloat16"


def test_a_folder_without_a_tokenizer_is_served_with_ids(tmp_path, caplog):
    """Catches a target that can't be used, or that says nothing of what it lacks."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        target = load_target(tmp_path, dtype="float64")
    assert "token ids" in caplog.text
    assert target.tokenizer is None
    assert target.spec.tokenizer_hash is None
    assert target.decode([1, 2]) == ""
    assert target.encode([1, 2]) == [1, 2]
    direct = load_target(model)
    assert target.spec.weights_hash == direct.spec.weights_hash
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(target.read(tokens)[0], direct.read(tokens)[0])


def test_the_spec_says_what_the_model_is(target):
    """Catches a limit that is read from the wrong field."""
    spec = target.spec
    assert (spec.layers, spec.hidden, spec.vocabulary, spec.context, spec.dtype) == (4, 32, 64, 256, "float64")
    assert target.ends == frozenset()
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not target.model.training


@pytest.mark.parametrize(("eos", "ends"), [(None, set()), (5, {5}), ([5, 7], {5, 7})], ids=str)
def test_end_tokens_are_the_models(eos, ends):
    """Catches a family with two end tokens of which only one ends."""
    assert load_target(tiny_model(eos_token_id=eos)).ends == ends


def test_weights_that_differ_have_another_hash_and_dtypes_have_not():
    """Catches a checkpoint that is bound to how the target was loaded."""
    one = load_target(tiny_model()).spec.weights_hash
    assert load_target(tiny_model().float()).spec.weights_hash == one
    assert load_target(tiny_model(seed=1)).spec.weights_hash != one
