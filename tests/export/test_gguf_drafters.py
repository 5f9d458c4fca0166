"""Drafters as GGUF: names and keys, what comes back, what is left out and what is refused."""

import logging
import re
from typing import Any

import llama_graphs
import pytest
import torch
from gguf_targets import BLOCK, LAYER, SETTINGS, fresh, rewritten

from outrider.checkpoint import load_model, manifest_of, save
from outrider.errors import ExportError
from outrider.export.formats import find
from outrider.export.reading import import_folder
from outrider.export.writing import export_folder
from outrider.loading import load_drafter
from outrider.weights import weights_of

library = pytest.importorskip("gguf")


@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_written_reads_back_as_it_was(case, bpe, made, tmp_path):
    """Catches a lost key, a row that is turned or a layer number that is shifted one way only, and a reader that leans
    on outrider.json; the published files have neither it nor our keys."""
    import_folder(made.folder(case), tmp_path / "back", bpe)
    assert manifest_of(tmp_path / "back")["config"] == manifest_of(made.checkpoint(case))["config"]
    before, after = load_model(made.checkpoint(case), bpe), load_model(tmp_path / "back", bpe)
    old, new = weights_of(before), weights_of(after)
    assert before.taps == after.taps and old.keys() == new.keys()
    assert [name for name in old if not torch.equal(old[name], new[name])] == []
    kind, path = SETTINGS[case][0], tmp_path / "theirs.gguf"
    if kind == "mtp" or "stretched" in case or "slot" in case:  # what only ours has
        path.write_bytes(made.file(case).read_bytes())
    else:
        rewritten(made.file(case), path)
    after = import_folder(path, tmp_path / "theirs", bpe)
    new = weights_of(after)
    assert (before.taps, kind, old.keys()) == (after.taps, after.config.kind, new.keys())
    unmapped = {"confidence_head.temperatures", "confidence_head.shifts"}
    assert [name for name in old.keys() - unmapped if not torch.equal(old[name], new[name])] == []


@pytest.mark.parametrize(("precision", "case"), [("bf16", "eagle3, 40 tokens"), ("q8_0", "mtp"), ("q4_0", "mtp")])
def test_rounded_weights_come_back_as_they_were_rounded(precision, case, bpe, made, tmp_path):
    """Catches a scale of q8_0 that belongs to another block, and a file that is not what its name says."""
    export_folder(made.checkpoint(case), "gguf", tmp_path / "there", bpe, precision)
    after = weights_of(load_drafter(tmp_path / "there", bpe).model)
    before = weights_of(load_model(made.checkpoint(case), bpe))
    worst = {"bf16": 8e-3, "q8_0": 1e-2, "q4_0": 0.13}[precision]
    for name, weight in before.items():
        if weight.is_floating_point():
            assert (weight - after[name]).abs().max() <= worst * weight.abs().max().clamp(min=1e-9), name
    types = {one.name: one.tensor_type.name for one in library.GGUFReader(tmp_path / "there" / "model.gguf").tensors}
    wanted = precision.upper()
    assert types["blk.0.ffn_up.weight"] == wanted and types["output_norm.weight"] == "F32"
    assert wanted in set(types.values()) <= {wanted, "Q8_0", "F32", "F16", "I64"}


ATTENTION = {"attn_q", "attn_k", "attn_v", "attn_output"}
REST = {"attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}
NORMS = {"attn_q_norm", "attn_k_norm"}
FUSED = {f"blk.{i}.{name}.weight" for i in (0, 1) for name in ATTENTION | REST | NORMS}
FUSED |= {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}
MARKOV = {"markov_w1.weight", "markov_w2.weight"}
EAGLE3 = {f"blk.0.{name}.weight" for name in ATTENTION | REST | {"attn_norm_2"}} | {"fc.weight", "output_norm.weight"}
DENSE = {f"blk.{i}.{name}.weight" for i in range(4) for name in ATTENTION | NORMS | REST - {"ffn_norm"}}
DENSE |= {f"blk.{i}.post_attention_norm.weight" for i in range(5)}
DENSE |= {"token_embd.weight", "output_norm.weight", "output.weight"}
MODULE = {f"blk.4.{name}.weight" for name in ATTENTION | {"attn_norm", "ffn_gate_inp"}} | {"blk.4.exp_probs_b.bias"}
MODULE |= {f"blk.4.ffn_{part}_{whose}.weight" for part in ("gate", "up", "down") for whose in ("exps", "shexp")}
MODULE |= {f"blk.4.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
NAMES = {
    "dspark": FUSED | MARKOV | {"conf_proj.weight", "conf_proj.bias"}, "dspark, no confidence": FUSED | MARKOV,
    "dflash": FUSED, "dflash, in the anchor's slot": FUSED | MARKOV,
    "dflash, stretched": FUSED | MARKOV | {"rope_freqs.weight"}, "eagle3": EAGLE3,
    "eagle3, 40 tokens": EAGLE3 | {"output.weight", "d2t"}, "mtp": DENSE | MODULE,
}  # fmt: skip
"""What llama.cpp creates tensors for, written out by hand."""


def test_a_file_holds_llama_cpps_names_and_no_others(made):
    """Catches a weight that is skipped, of which llama.cpp says nothing where it is optional."""
    for case, names in NAMES.items():
        assert {one.name for one in library.GGUFReader(made.file(case)).tensors} == names, case


def keys_of(file: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in library.GGUFReader(file).fields.items()}


def test_what_a_block_drafters_file_says(bpe, made):
    """Catches taps that are one off, a block without its anchor, and a mask of another token."""
    said = keys_of(made.file("dspark"))
    wanted = {
        "general.architecture": "dflash", "dflash.block_count": 2, "dflash.block_size": 3,
        "dflash.target_layers": [1, 3], "dflash.sample_from_anchor": True, "dflash.has_confidence_head": True,
        "dflash.embedding_length": 32, "dflash.feed_forward_length": 32, "dflash.attention.head_count": 2,
        "dflash.attention.head_count_kv": 1, "dflash.attention.key_length": 8, "dflash.rope.freq_base": 10_000.0,
        "dflash.rope.dimension_count": 8, "dflash.context_length": 256, "tokenizer.ggml.mask_token_id": 5,
        "tokenizer.ggml.pre": "qwen2",
    }  # fmt: skip
    assert {name: said[name] for name in wanted} == wanted
    assert len(said["tokenizer.ggml.tokens"]) == bpe.spec.vocabulary
    assert "dflash.attention.causal" not in said, "llama.cpp's blocks attend both ways unless the key is there"


def test_a_block_with_a_bonus_anchor_is_one_slot_longer(made):
    """Catches a draft that is one token too short: llama.cpp counts the anchor's slot."""
    assert keys_of(made.file("dspark, a bonus anchor"))["dflash.block_size"] == 4
    plain = keys_of(made.file("dflash"))
    assert plain["dflash.block_size"] == 4 and "dflash.sample_from_anchor" not in plain
    slot = keys_of(made.file("dflash, in the anchor's slot"))
    assert slot["dflash.block_size"] == 3 and slot["dflash.sample_from_anchor"] is True
    assert slot["dflash.rope.dimension_count"] == 4


def test_what_an_eagle3s_file_says(bpe, made):
    """Catches offsets, as safetensors have them, where llama.cpp wants ids: it would scatter over the first tokens."""
    said = keys_of(made.file("eagle3, 40 tokens"))
    wanted = {
        "general.architecture": "eagle3", "eagle3.block_count": 1, "eagle3.target_layers": [1, 2, 3],
        "eagle3.target_hidden_size": 32, "eagle3.norm_before_residual": True, "eagle3.norm_before_fc": False,
        "eagle3.rope.scaling.type": "linear", "eagle3.rope.scaling.factor": 2.0,
    }  # fmt: skip
    assert {name: said[name] for name in wanted} == wanted
    stored = llama_graphs.File(made.file("eagle3, 40 tokens")).tensors["d2t"]
    assert stored.tolist() == load_model(made.checkpoint("eagle3, 40 tokens"), bpe).head.ids.tolist()


LEFT_OUT = {
    "siblings": ("dspark", {**BLOCK, "rank": 8, "siblings": [2, 1]}, r"siblings \[2, 1\] are left out.*2.50 tokens"),
    "a tree": ("eagle3", {**LAYER, "taps": [0, 1, 2], "width": 2}, "its tree of width 2 is left out.*2.50 tokens"),
    "a zero head": ("dflash", BLOCK, "runs it as a draft-dspark with a Markov head of zeros"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_llama_cpp_cant_do_is_left_out_with_what_it_brought(case, bpe, tmp_path, caplog):
    """Catches a tree that goes in silence: the engine then drafts less than the report says."""
    kind, settings, said = LEFT_OUT[case]
    with caplog.at_level(logging.WARNING):
        export_folder(fresh(kind, settings, bpe, tmp_path / "mine"), "gguf", tmp_path / "there", bpe)
    assert any(re.search(said, line) for line in caplog.messages), caplog.messages


def test_a_calibration_is_left_out_and_comes_back(bpe, made, tmp_path, caplog):
    """Catches temperatures that are lost: outrider.json has them."""
    model = load_model(made.checkpoint("dspark"), bpe)
    model.confidence_head.temperatures.fill_(2.0)
    save(tmp_path / "mine", model, {})
    with caplog.at_level(logging.WARNING):
        export_folder(tmp_path / "mine", "gguf", tmp_path / "there", bpe)
    assert any("calibration of its confidences is left out" in line for line in caplog.messages)
    assert load_drafter(tmp_path / "there", bpe).model.confidence_head.temperatures.tolist() == [2.0] * 3


REFUSED = {
    "a learnt mask": ("dspark", {**BLOCK, "rank": 8, "mask_token": "learnt"}, "mask is a trained vector"),
    "a gated head": ("dspark", {**BLOCK, "rank": 8, "markov": "gated"}, "no gated Markov head"),
    "the last layer": ("dflash", {**BLOCK, "taps": [0, 3]}, "what comes out of the last layer, 3"),
    "two taps": ("eagle3", {**LAYER, "taps": [0, 1]}, "reads three layers, but this one reads 2"),
    "query norms": ("eagle3", {**LAYER, "taps": [0, 1, 2], "qk_norm": True}, "no norms of queries and keys"),
    "norms of taps": ("eagle3", {**LAYER, "taps": [0, 1, 2], "fc_norm": True}, "no norm of each tap"),
    "the norm fed back": ("eagle3", {**LAYER, "taps": [0, 1, 2], "norm_output": True}, "feeds back"),
    "a gate": ("eagle3", {**LAYER, "taps": [0, 1, 2], "gated": True}, "gated attention has no key"),
    "a part rotated": ("eagle3", {**LAYER, "taps": [0, 1, 2], "partial_rotary_factor": 0.5}, "rotates a part"),
    "yarn": ("dflash", {**BLOCK, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                  "original_max_position_embeddings": 64}}, "scaled by yarn"),
    "two modules": ("mtp", {"native": False, "modules": 2}, "it has 2 modules, llama.cpp only one"),
    "other heads": ("mtp", {"native": False, "heads": 2, "kv_heads": 2}, "its heads is 2, its target's 4"),
}  # fmt: skip


def test_what_llama_cpp_would_compute_otherwise_is_refused(bpe, tmp_path):
    """Catches a setting without a key that would be left out in silence."""
    for case, (kind, settings, said) in REFUSED.items():
        with pytest.raises(ExportError, match=said):
            export_folder(fresh(kind, settings, bpe, tmp_path / case), "gguf", tmp_path / "there", bpe)
        assert not (tmp_path / "there").exists() and not list(tmp_path.glob("*.part"))


def test_every_kind_goes_both_ways():
    assert {kind for kind, layout in find("gguf").items() if layout.config and layout.settings} == {
        "small_model", "dflash", "dflash2", "dspark", "eagle3", "mtp",
    }  # fmt: skip
