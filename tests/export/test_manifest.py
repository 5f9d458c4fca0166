"""What a draft's folder says: checked before anything reads it, and read as `outrider import` reads it."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from outrider.drafters import method
from outrider.engines.commands import command, draft_of
from outrider.engines.engine import Wish
from outrider.errors import ConfigError, ExportError
from outrider.export import manifest as folder
from outrider.formats import keys

IDS = "eagle_aux_hidden_state_layer_ids"
SGLANG = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [3, 5, 9]}}
ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9]},
}
DOMINO = {"block_size": 8, "dflash_config": {"projector_type": "domino", "mask_token_id": 7, "target_layer_ids": [1]}}
OURS = {"version": 1, "kind": "eagle3", "format": "sglang", "config": {}, "target": {"name": "T"}, "taps": [1, 2]}


def lying(place: Path, config: Any, manifest: Any = None) -> Path:
    """A folder that says this."""
    (place / "config.json").write_text(json.dumps(config))
    if manifest is not None:
        (place / "outrider.json").write_text(json.dumps(manifest))
    return place


def test_a_manifest_without_a_kind_leaves_a_folder_to_those_who_know_it(tmp_path: Path) -> None:
    """Catches a folder of others that is taken for a checkpoint once `verify-export` wrote its finding beside it."""
    config = {"speculators_model_type": "dflash", "block_size": 16, "aux_hidden_state_layer_ids": [2, 10]}
    lying(tmp_path, config, {"verified": {"vllm 0.32.0": {"is_equal": True}}})
    found = draft_of(tmp_path, "T", "dflash", "speculators")
    assert (found.length, found.taps) == (15, (1, 9))
    assert draft_of(tmp_path, "T") == found
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="name its kind and format with --kind"):
        draft_of(tmp_path, "T")


def test_an_eagle_under_a_plain_name_is_told_by_its_weights(tmp_path: Path) -> None:
    """Catches an EAGLE deployed as a small model: its config.json says no more than a Llama's."""
    import torch
    from safetensors.torch import save_file

    lying(tmp_path, {"architectures": ["LlamaForCausalLM"]})
    save_file(
        {"fc.weight": torch.ones(1), "layers.0.self_attn.q_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    found = draft_of(str(tmp_path), "T", None, None)
    assert (found.kind, found.format) == ("eagle", "eagle")


MANIFESTS = [
        ({"kind": ["a"]}, "kind must be a text, got ['a']"),
        ({"format": 3}, "format must be a text, got 3"), ({"config": [1]}, "config must be a mapping, got [1]"),
        ({"target": "T"}, "target must be a mapping, got 'T'"),
        ({"target": {"name": 7}}, "target.name must be a text, got 7"), ({"taps": 3}, "taps must be a list"),
        ({"taps": ["1"]}, "taps must be a list of integers, one per layer, got ['1']"),
        ({"version": 99}, "version 99, but this Outrider reads 1"),
        ({"version": True}, "version True"),
]  # fmt: skip


def test_a_manifest_that_is_none_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Catches a traceback, and a newer manifest that is read as if it were of today."""
    for wrong, said in MANIFESTS:
        with pytest.raises(ExportError, match=r"outrider.json( is of|:) " + re.escape(said)):
            draft_of(lying(tmp_path, SGLANG, OURS | wrong))


UNREADABLE = [
        ({"eagle_config": [1]}, "eagle_config must be a mapping, got [1]"),
        ({"eagle_config": {IDS: "135"}}, f"eagle_config.{IDS} must be a list of integers"),
        ({IDS: [True]}, "[True]"),
        ({"dflash_config": [1], "block_size": 4}, "dflash_config must be a mapping, got [1]"),
        ({"dflash_config": {"mask_token_id": [7]}}, "dflash_config.mask_token_id must be a whole number, got [7]"),
        ({"block_size": 4.5}, "block_size must be a whole number, got 4.5"),
        ({"speculators_config": 1}, "speculators_config must be a mapping, got 1"),
        ({"medusa_num_heads": "3"}, "medusa_num_heads must be a whole number, got '3'"),
]  # fmt: skip


def test_a_config_that_no_draft_has_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Catches a traceback from a config.json of others, whatever it says."""
    for (config, said), kind in itertools.product(UNREADABLE, ("eagle3", "dflash")):
        with pytest.raises(ExportError, match=re.escape(said)):
            command("trtllm", draft_of(lying(tmp_path, config), "T", kind, "sglang"))


def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path) -> None:
    """Catches a traceback on a torn file, and on one that is nested without end."""
    for name in ("config.json", "outrider.json"):
        for text in ("[]", "{", "[" * 100_000, '"a"'):
            (tmp_path / name).write_text(text)
            with pytest.raises(ExportError, match=name):
                draft_of(tmp_path, "T", "eagle3", "sglang")
        (tmp_path / name).write_text("{}")


def test_layers_that_nobody_tells_are_not_left_to_a_guess(tmp_path: Path) -> None:
    """Catches a YAML without the layers of a folder from elsewhere: TensorRT-LLM reads layers of its own choice then,
    and nearly no draft is kept; without any, EAGLE-3 of its authors is guessed right."""
    for kind, format, config, key, taps in (
        ("eagle3", "sglang", SGLANG, "eagle3_layers_to_capture", [3, 5, 9]),
        ("eagle3", "eagle", {IDS: [2, 18, 33]}, "eagle3_layers_to_capture", [1, 17, 32]),
        ("dflash", "zlab", ZLAB, "target_layer_ids", [1, 9]),
    ):
        found = command("trtllm", draft_of(lying(tmp_path, config), "T", kind, format))
        assert yaml.safe_load(found.files["trtllm.yaml"])["speculative_config"][key] == taps
    with pytest.raises(ConfigError, match=r"does not say which layers .* dflash_config.target_layer_ids"):
        command("trtllm", draft_of(lying(tmp_path, {"block_size": 16}), "T", "dflash", "zlab"))
    found = command("trtllm", draft_of(lying(tmp_path, {}), "T", "eagle3", "eagle"))
    assert "eagle3_layers_to_capture" not in found.files["trtllm.yaml"]


def test_medusa_is_asked_for_as_many_tokens_as_it_has_heads(tmp_path: Path) -> None:
    """Catches vLLM told to draft more than there are heads."""
    for name in ("num_heads", "medusa_num_heads"):
        medusa = draft_of(lying(tmp_path, {name: 3}), "T", "medusa", "medusa")
        assert command("vllm", medusa, None, "0.32.0").settings["num_speculative_tokens"] == 3
        with pytest.raises(ConfigError, match="this medusa has 3 heads"):
            command("vllm", medusa, Wish(tokens=4), "0.32.0")


def test_a_block_is_not_asked_for_the_slot_of_its_anchor(tmp_path: Path) -> None:
    """Catches a Domino of 8 slots asked for 8 tokens although the first slot is the anchor's."""
    domino = draft_of(lying(tmp_path, DOMINO), "T", "domino", "sglang")
    with pytest.raises(ConfigError, match="one block of 7"):
        command("sglang", domino, Wish(tokens=8))
    shifted = DOMINO | {"dflash_config": DOMINO["dflash_config"] | {"shift_label": True}}
    assert draft_of(lying(tmp_path, shifted), "T", "domino", "sglang").length == 8


def everything(kind: str, **more: Any) -> dict[str, Any]:
    """A config.json that every format finds its own keys in."""
    layer = {
        "hidden_size": 16,
        "vocab_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    heads = {"emb_dim": 4, "gru_hidden_dim": 4, "pure_draft_prefix_len": 1, "block_size": 8}
    pairs = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 4}
    architecture = {"eagle3": "eagle3", "mtp": "glm4moe"}.get(kind, "dflash")
    sizes = {
        "embedding_length": 16, "block_count": 1, "attention.head_count": 2, "feed_forward_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6, "expert_shared_count": 32, "target_layers": [1, 2, 4],
        "block_size": 8, **pairs, **more,
    }  # fmt: skip
    gguf = {
        "general.architecture": architecture, "outrider.kind": kind, "tokenizer.ggml.tokens": ["a"] * 64,
        "tokenizer.ggml.mask_token_id": 5, "outrider.shapes": {"markov_w1.weight": (64, 4)},
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
    }  # fmt: skip
    return {
        **layer, "transformer_layer_config": {**layer, "model_type": "qwen3"}, "speculators_model_type": kind,
        "markov_rank": 4, "mask_token_id": 5,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}, "block_size": 8, "num_heads": 3,
        IDS: [1, 3, 5], "aux_hidden_state_layer_ids": [1, 4], "target_layer_ids": [0, 2], "eagle_config": {IDS: [0, 1,
        3]},
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 2], **heads, **pairs, **more},
        **pairs, **gguf, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    "more", [{}, {"sample_from_anchor": True}, {"sample_from_anchor": False}, {"shift_label": True}]
)
def test_layers_and_lengths_are_read_as_import_reads_them(more: dict[str, Any]) -> None:
    """Catches a rule that changes on one side alone: an engine would draft from other layers than we do, or past the
    block."""
    from outrider import checkpoint
    from outrider.export import formats

    target: Any = SimpleNamespace(spec=SimpleNamespace(hidden=16, vocabulary=64, layers=6, name="T"))
    held = 0
    for name in formats.names():
        for kind, layout in formats.find(name).items():
            # a small model reads no layers and says no length; no engine runs lilicorr
            if layout.settings is None or kind in ("small_model", "lilicorr"):
                continue
            config = everything(kind, **more)
            if (kind, name) == ("dflash2", "speculators") and more.get("sample_from_anchor"):
                with pytest.raises(ExportError, match="sample_from_anchor is true, which DFlash 2 does not support"):
                    layout.settings(config, target)
                continue
            ours = layout.settings(config, target)
            assert keys.layers(method(kind), name, config) == tuple(ours.get("taps", ())), (name, kind)
            key = method(kind).length
            if key in ours:
                assert keys.length(method(kind), name, {}, config) == ours[key], (name, kind)
                held += 1
    assert held > 8
    assert all(method(kind).layers["trtllm"] == method(kind).layers["sglang"] for kind in ("eagle3", "dflash"))
    assert checkpoint.VERSION == folder.VERSION
