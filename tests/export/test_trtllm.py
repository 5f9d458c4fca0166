"""TensorRT-LLM's folders: the keys that its loaders look for, and the settings file beside them.  It can't be run
here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf_targets import fresh
from safetensors.torch import load_file

from outrider.errors import ExportError
from outrider.export import formats
from outrider.export.reading import import_folder
from outrider.export.writing import export_folder

LAYER = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {**LAYER, "taps": [0, 1, 3], "vocabulary": 40, "length": 5},
    "dflash": {**LAYER, "layers": 2, "block": 3, "taps": [0, 2], "mask_token": 5, "anchor_predicts": False},
    "small_model": {"new": {"layers": 1, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_dim": 8}},
}


@pytest.fixture
def made(target: Any, tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with random weights, of the settings above and others."""
    return lambda kind, **settings: fresh(kind, SETTINGS[kind] | settings, target, tmp_path / "mine")


ATTENTION = {f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
NORMED = ATTENTION | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
REST = {f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
REST |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
KEYS = {
    "eagle3": {f"midlayer.{name}" for name in ATTENTION | REST | {"hidden_norm.weight"}}
    | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"},
    "dflash": {f"layers.{i}.{name}" for i in (0, 1) for name in NORMED | REST}
    | {"fc.weight", "hidden_norm.weight", "norm.weight"},
    "small_model": {f"model.layers.0.{name}" for name in NORMED | REST}
    | {"model.embed_tokens.weight", "model.norm.weight"},
}
"""The names that its loaders look for, written out by hand."""
SPECULATION = {
    "eagle3": {"decoding_type": "Eagle3", "max_draft_len": 5, "eagle3_layers_to_capture": [0, 1, 3]},
    "dflash": {"decoding_type": "DFlash", "max_draft_len": 3, "mask_token_id": 5, "target_layer_ids": [0, 2]},
    "small_model": {"decoding_type": "Draft_Target", "max_draft_len": 4},
}
ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel", "small_model": "Qwen3ForCausalLM"}


@pytest.mark.parametrize("kind", KEYS)
def test_folders_hold_the_loaders_keys_and_the_settings_beside_them(kind, target, made, tmp_path):
    """Catches a prefix that its loader would skip, and a settings file that names the folder as it was while it was
    written."""
    export_folder(made(kind), "trtllm", tmp_path / "there", target)
    assert load_file(tmp_path / "there" / "model.safetensors").keys() == KEYS[kind]
    assert json.loads((tmp_path / "there" / "config.json").read_text())["architectures"] == [ARCHITECTURES[kind]]
    said = yaml.safe_load((tmp_path / "there" / "llm_api.yaml").read_text())
    rest = {"disable_overlap_scheduler": True} if kind == "small_model" else {}
    assert said == rest | {"speculative_config": SPECULATION[kind] | {"speculative_model": str(tmp_path / "there")}}


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("eagle3", {"qk_norm": True}, "train with qk_norm: no"),
        ("eagle3", {"taps": [1]}, "needs two taps or more"),
        ("dflash", {"anchor_predicts": True}, "anchor_predicts: no"),
    ],
)
def test_what_it_would_compute_otherwise_is_refused(kind, settings, said, target, made, tmp_path):
    with pytest.raises(ExportError, match=said):
        export_folder(made(kind, **settings), "trtllm", tmp_path / "there", target)


def test_a_folder_of_it_without_our_notes_is_read_as_sglangs(target, made, tmp_path):
    """Catches a folder that only one reader takes although it is the same: EAGLE-3's and DFlash's are SGLang's to the
    byte."""
    export_folder(made("eagle3"), "trtllm", tmp_path / "there", target)
    with pytest.raises(ExportError, match="trtllm, which Outrider writes but can't read"):
        import_folder(tmp_path / "there", tmp_path / "back", target)
    (tmp_path / "there" / "outrider.json").unlink()
    assert import_folder(tmp_path / "there", tmp_path / "back", target).taps == (0, 1, 3)


def test_what_is_written_in_another_type_is_not_kept(target, made, tmp_path, monkeypatch):
    """The planted fault: a writer that rounds is caught although the format can't be read back as a drafter."""
    real = formats.folders.write
    checkpoint = made("dflash")

    def careless(folder, config, weights):
        real(folder, config, {name: w.half() if name == "norm.weight" else w for name, w in weights.items()})

    monkeypatch.setattr(formats.folders, "write", careless)
    with pytest.raises(ExportError, match="reads back with different weights: backbone.norm.weight"):
        export_folder(checkpoint, "trtllm", tmp_path / "there", target)
    assert not (tmp_path / "there").exists()
