"""A drafter's layers are as large as the target's, read from its config alone."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from tiny import make_folder

from outrider.checkpoint import load_model, save
from outrider.drafters import find
from outrider.errors import DrafterError
from outrider.nn.draft_model import DraftModel
from outrider.nn.shape import SIZES, LayerConfig, resolved
from outrider.runs.file import RunConfig
from outrider.runs.forecast.sizes import on_paper
from outrider.targets.load import load_target
from outrider.targets.sizes import unused_row
from outrider.targets.sketch import Sketch, sketch

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LINEAR = {"factor": 8.0, "rope_type": "linear"}


# config.json; heads, kv heads, head size, MLP, epsilon, base, stretch, share; taps of five and of three
REAL: dict[str, tuple[dict[str, Any], tuple[Any, ...], tuple[int, ...], tuple[int, ...]]] = {
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
            "num_hidden_layers": 28, "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 1000000,
            "rope_scaling": None, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
        },
        (16, 8, 128, 3072, 1e-6, 1e6, None, 1.0), (1, 7, 13, 19, 25), (1, 13, 24),
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "rope_scaling": LLAMA3, "vocab_size": 128256, "max_position_embeddings": 131072,
        },
        (32, 8, 128, 14336, 1e-5, 5e5, LLAMA3, 1.0), (1, 8, 15, 22, 29), (1, 15, 28),
    ),
    "gemma-3-12b": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
                "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": LINEAR, "sliding_window": 1024,
            },
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
        },
        (16, 8, 256, 15360, 1e-6, 1e6, LINEAR, 1.0), (1, 12, 23, 34, 45), (1, 23, 44),
    ),
    "Phi-4-mini": (
        {
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75, "vocab_size": 200064, "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
        },
        (24, 8, 128, 8192, 1e-5, 1e4, None, 0.75), (1, 8, 15, 22, 29), (1, 15, 28),
    ),
}  # fmt: skip
KINDS = ("dflash", "dspark", "domino", "deer", "eagle", "eagle3", "peagle", "specblock", "mtp")
"""Those with decoder layers."""


def folder_of(path: Path, config: dict[str, Any]) -> str:
    """A folder with a config.json and nothing else."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def on_meta(kind: str, target: Sketch, **settings: Any) -> DraftModel:
    module = find(kind)
    with torch.device("meta"):
        return module.Model(module.Config(**settings), target)


@pytest.mark.parametrize("name", REAL)
def test_sizes_and_taps_are_those_of_the_real_target(name, tmp_path):
    """Catches the demo's sizes beside a real target: a toy trained for days."""
    config, wanted, five, three = REAL[name]
    target = sketch(folder_of(tmp_path, config))
    full, sizes = resolved(LayerConfig(), target.spec)
    assert tuple(getattr(sizes, key) for key in SIZES) == wanted
    assert tuple(getattr(full, key) for key in SIZES) == wanted
    assert (on_meta("dspark", target).taps, on_meta("eagle3", target).taps) == (five, three)


def test_the_mask_is_a_token_that_no_text_has(tmp_path):
    """Catches a learnt vector beside Qwen3, whose released drafts take the first unused row and engines want a
    token."""
    folder = make_folder(tmp_path / "padded", vocab_size=280)
    padded = load_target(folder)
    count = len(padded.tokenizer)
    assert padded.spec.unused == sketch(str(folder)).spec.unused == count < 280
    assert unused_row(padded.tokenizer, count) is None is unused_row(None, count)
    for kind in ("dflash", "dspark", "domino", "deer", "peagle"):
        module, small = find(kind), {"layers": 1, "block": 2} if kind != "peagle" else {"layers": 1, "length": 2}
        small |= {"gru": 4, "pure_prefix": 1} if kind == "domino" else {}
        model = module.Model(module.Config(**small), padded)
        assert (model.config.mask_token, getattr(model, "backbone", model).mask_token) == (count, count), kind
        model = module.Model(module.Config(mask_token="learnt", **small), padded)
        assert (model.config.mask_token, getattr(model, "backbone", model).mask_token) == ("learnt", None), kind


def test_an_older_checkpoint_keeps_what_it_did_not_name(tmp_path):
    """Catches a learnt vector without a place in the model, and a rotation that is the target's all of a sudden."""
    turns = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    padded = load_target(make_folder(tmp_path / "padded", vocab_size=280, rope_parameters=turns))
    assert padded.spec.sizes.partial_rotary_factor == 0.5
    settings = {"layers": 1, "block": 2, "mask_token": "learnt", "partial_rotary_factor": 1.0}
    model = find("deer").Model(find("deer").Config(**settings), padded)
    save(tmp_path / "old", model)
    manifest = json.loads((tmp_path / "old" / "outrider.json").read_text())
    manifest["config"]["mask_token"] = None
    del manifest["config"]["partial_rotary_factor"]
    (tmp_path / "old" / "outrider.json").write_text(json.dumps(manifest))
    found = load_model(tmp_path / "old", padded)
    assert torch.equal(found.mask, model.mask)
    assert found.config == model.config


def test_every_method_takes_its_sizes_from_the_target(tmp_path):
    """Catches a method with sizes of its own, and a checkpoint whose config would leave them open."""
    target = sketch(folder_of(tmp_path, REAL["Llama-3.1-8B"][0]))
    for kind in KINDS:
        model = on_meta(kind, target)
        assert tuple(getattr(model.config, key) for key in SIZES) == REAL["Llama-3.1-8B"][1], kind
        weights = {tuple(weight.shape) for name, weight in model.named_parameters() if "mlp.gate_proj" in name}
        assert weights == {(14336, 4096)}, kind


def test_a_size_that_is_named_is_kept_and_a_stretch_goes_with_its_base():
    """Catches a target that overrules a config, and Llama's stretch of a base that is not Llama's."""
    target = load_target(tiny_model(rope_parameters={"rope_theta": 5e5, **LLAMA3}))
    _, sizes = resolved(LayerConfig(heads=2, kv_heads=1, intermediate=7), target.spec)
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate) == (2, 1, 8, 7)
    assert (sizes.rope_theta, sizes.rope_scaling) == (5e5, LLAMA3)
    assert resolved(LayerConfig(rope_theta=5e5), target.spec)[1].rope_scaling is None
    assert resolved(LayerConfig(rope_scaling=LINEAR), target.spec)[1].rope_scaling == LINEAR
    full, sizes = resolved(LayerConfig(rope_scaling={"rope_type": "default"}), target.spec)
    assert (sizes.rope_theta, sizes.rope_scaling) == (5e5, None)
    assert resolved(full, target.spec) == (full, sizes)
    # a config that names all needs no target that does
    ends = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    named = LayerConfig(heads=4, kv_heads=4, head_dim=64, intermediate=704, **ends)
    silent = dataclasses.replace(target.spec, sizes=None)
    assert resolved(named, silent)[0] == named == resolved(named, target.spec)[0]
    with pytest.raises(DrafterError, match="heads, kv_heads, .* are not set, and the config of Qwen3ForCausalLM does"):
        resolved(LayerConfig(), silent)


def test_the_count_on_paper_is_the_models(target, tmp_path):
    """Catches a count of shapes that are not those of the model which is trained."""
    target.model.save_pretrained(tmp_path)
    for kind in (*KINDS, "medusa"):
        settings = (
            {"kind": kind, "layers": 1, "init_from_layers": [2]} if kind in ("dflash", "deer") else {"kind": kind}
        )
        module = find(kind)
        model = module.Model(module.Config(**settings), target)
        found = on_paper(RunConfig(name="x", target={"name": str(tmp_path)}, drafter=settings))
        assert found.parameters == sum(weight.numel() for weight in model.parameters()), kind
