"""What can't be decoded exactly is refused by name; what is refused says what to do."""

import logging

import pytest
import torch
from conftest import tiny_model

from outrider.errors import TargetError
from outrider.targets.load import load_target


def test_what_is_no_checkpoint_is_refused(tmp_path):
    """Catches a traceback of another library where a name was mistyped, or a JSON error without the target's name."""
    for name, config in (("nowhere", None), ("empty", ""), ("broken", "{"), ("odd", '{"model_type": "no_such_one"}')):
        if config is not None:
            (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(config)
        with pytest.raises(TargetError, match=name):
            load_target(tmp_path / name)


def test_a_dtype_that_is_none_is_refused(tmp_path):
    """Catches an attribute error of torch."""
    tiny_model().save_pretrained(path := tmp_path)
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
