"""DFlash 2 in the formats of others: what is written reads back, published folders are read bit for bit."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import randomise

from outrider.checkpoint import load_model, save
from outrider.drafters import dflash2
from outrider.errors import ExportError
from outrider.export.formats import identify
from outrider.export.reading import import_folder, imported
from outrider.export.writing import export_folder
from outrider.generation import generate
from outrider.loading import load_drafter
from outrider.weights import weights_of

SIZES = {
    "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 3, "rank": 8, "candidates": 5,
    "conv_group": 4, "taps": (0, 2), "mask_token": 3,
}  # fmt: skip


def checkpoint_of(target, folder: Path, share: float = 1.0, **choices: Any) -> Path:
    torch.manual_seed(0)
    model = randomise(dflash2.Model(dflash2.Config(**(SIZES | choices)), target))
    model.candidate_selector.share.fill_(share)
    save(folder, model.to(getattr(torch, target.spec.dtype)))
    return folder


@pytest.mark.parametrize("format", ["sglang", "speculators", "gguf"])
@pytest.mark.parametrize("window", [None, 9])
def test_what_is_written_reads_back_as_it_was_without_our_own_file(format, window, bpe, tmp_path) -> None:
    """Catches a lost key, a kernel whose axes change places, and a reader that leans on outrider.json."""
    if format == "gguf":
        pytest.importorskip("gguf")
    checkpoint = checkpoint_of(bpe, tmp_path / "checkpoint", window=window)
    out = export_folder(checkpoint, format, tmp_path / "out", bpe)
    before = load_model(checkpoint, bpe)
    for file in ("outrider.json", None):
        if file is not None:
            assert identify(out) == (format, "dflash2")
            (out / file).unlink()
        found = imported(out, bpe)
        assert identify(out) == (format, "dflash2")
        old, new = weights_of(before), weights_of(found)
        assert [name for name in old if not torch.equal(old[name], new[name])] == []
        assert found.taps == before.taps and found.config.window == window
        for key in (
            "block",
            "candidates",
            "rank",
            "conv_taps",
            "conv_group",
            "layers",
            "mask_token",
            "anchor_predicts",
        ):
            assert getattr(found.config, key) == getattr(before.config, key), key


def test_a_reduced_vocabulary_and_a_selector_that_is_off_are_written_for_all_tokens(target, tmp_path, caplog) -> None:
    """Catches a selector that engines would still use where held-out answers were drafted better without it."""
    checkpoint = checkpoint_of(target, tmp_path / "checkpoint", share=0.0, nodes=6)
    with caplog.at_level(logging.WARNING):
        out = export_folder(checkpoint, "sglang", tmp_path / "out", target)
    assert "its selector is off" in caplog.text and "its tree of 6 nodes is left out" in caplog.text
    assert not load_file(out / "model.safetensors")["candidate_selector.successor_codebook"].any()
    assert float(load_model(checkpoint, target).candidate_selector.successor_codebook.abs().max()) > 0
    reduced = checkpoint_of(target, tmp_path / "reduced", vocabulary=40)
    whole = imported(export_folder(reduced, "sglang", tmp_path / "whole", target), target)
    assert torch.equal(
        whole.candidate_selector.successor_codebook, load_model(reduced, target).candidate_selector.successor_codebook
    )


# ── folders as they are published ────────────────────────────────────────────────────────────────────────────────────


def published(target, folder: Path, **changes: Any) -> Path:
    """A folder as its authors release it, from what their config.json and the heads of their files hold."""
    hidden, layers, taps, vocabulary = target.spec.hidden, 2, [0, 2], target.spec.vocabulary
    config = {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 24, "rms_norm_eps": 1e-6, "vocab_size": vocabulary, "max_position_embeddings": 256,
        "layer_types": ["sliding_attention"] * layers, "sliding_window": 16, "use_sliding_window": True,
        "num_target_layers": target.spec.layers, "tie_word_embeddings": False, "attention_bias": False,
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "dflash_config": {
            "block_size": 8, "mask_token_id": 5, "target_layer_ids": taps, "conv_kernel_size": 2, "conv_group_size": 8,
            "selector_rank": 6, "selector_top_k": 4,
        },
    }  # fmt: skip
    noise = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(taps)), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": (vocabulary, 6),
        "candidate_selector.successor_codebook": (vocabulary, 6),
        "candidate_selector.hidden_projection.weight": (6, hidden),
    }  # fmt: skip
    for n in range(layers):
        shapes |= {
            f"layers.{n}.{name}": shape
            for name, shape in {
                "self_attn.q_proj.weight": (16, hidden), "self_attn.k_proj.weight": (8, hidden),
                "self_attn.v_proj.weight": (8, hidden), "self_attn.o_proj.weight": (hidden, 16),
                "self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,),
                "mlp.gate_proj.weight": (24, hidden), "mlp.up_proj.weight": (24, hidden),
                "mlp.down_proj.weight": (hidden, 24), "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,), "attention_conv.base_kernel": (2, 2, hidden),
                "attention_conv.kernel_projection.weight": (2 * 2 * hidden // 8, hidden),
                "mlp_conv.base_kernel": (2, 2, hidden),
                "mlp_conv.kernel_projection.weight": (2 * 2 * hidden // 8, hidden),
            }.items()
        }  # fmt: skip
    folder.mkdir(parents=True)
    for key, value in changes.items():
        place = config if key in config or key.startswith("is_") else config["dflash_config"]
        place[key] = value  # type: ignore[index]
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(
        {name: torch.randn(shape, generator=noise) * 0.1 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


def test_a_published_folder_is_read_bit_for_bit_and_drafts(target, tmp_path) -> None:
    """Catches a name, a layer number or a block that is read otherwise than its authors write it."""
    folder = published(target, tmp_path / "theirs")
    assert identify(folder) == ("sglang", "dflash2")
    model = imported(folder, target)
    config = model.config
    assert (config.block, config.anchor_predicts, config.window, config.candidates) == (7, False, 16, 4)
    assert (config.rank, config.conv_taps, config.conv_group, config.mask_token) == (6, 2, 8, 5)
    assert model.taps == (0, 2)
    theirs, own = load_file(folder / "model.safetensors"), weights_of(model)
    assert len(theirs) == 2 * 15 + 6
    for name, weight in theirs.items():
        ours = name if name.startswith("candidate_selector") else f"backbone.{name}"
        assert torch.equal(own[ours], weight.to(own[ours].dtype)), name
    prompt = target.encode("ab ab ab")
    [text] = generate(target, [prompt], load_drafter(folder, target), max_new_tokens=12)
    [plain] = generate(target, [prompt], max_new_tokens=12)
    assert text.tokens == plain.tokens
    back = export_folder(folder, "sglang", tmp_path / "back", target)
    mine, wanted = (json.loads((place / "config.json").read_text()) for place in (back, folder))
    assert {key: mine.get(key) for key in wanted if key != "rope_parameters"} == {
        key: value for key, value in wanted.items() if key != "rope_parameters"
    }
    found = load_file(back / "model.safetensors")
    assert found.keys() == theirs.keys() and all(torch.equal(found[name].float(), theirs[name]) for name in theirs)


REFUSED = {
    "causal by default": ({"is_causal": None}, "is_causal is missing, so that layers with a window are causal"),
    "causal": ({"is_causal": True}, "is_causal is true"),
    "two kinds of layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "mix layers with a window"),
    "a multiplier": ({"output_multiplier": 0.5}, "output_multiplier is 0.5"),
    "a cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "a window that is none": ({"sliding_window": "wide"}, "sliding_window must be a whole number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_published_folder_that_computes_something_else_is_refused(case, target, tmp_path) -> None:
    """Catches a draft that loads and of which little is accepted: with a window, no key means causal."""
    changes, said = REFUSED[case]
    with pytest.raises(ExportError, match=said):
        imported(published(target, tmp_path / "theirs", **changes), target)


def test_a_folder_without_windows_may_leave_causality_open(target, tmp_path) -> None:
    """Catches older folders, of full attention, that are refused with the others."""
    folder = published(
        target, tmp_path / "theirs", is_causal=None, layer_types=["full_attention"] * 2, use_sliding_window=False
    )
    assert imported(folder, target).config.window is None


def test_names_and_keys_of_a_gguf_file_are_llama_cpps(bpe, tmp_path) -> None:
    """Catches a file that llama.cpp does not load; what it asks for is read off its source."""
    library = pytest.importorskip("gguf")
    checkpoint = checkpoint_of(bpe, tmp_path / "checkpoint", window=9)
    reader = library.GGUFReader(export_folder(checkpoint, "gguf", tmp_path / "out", bpe) / "model.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "dflash", "dflash.block_size": 4, "dflash.conv_kernel_size": 2,
        "dflash.conv_group_size": 4, "dflash.selector_rank": 8, "dflash.selector_top_k": 5,
        "dflash.target_layers": [1, 3], "dflash.attention.causal": False, "dflash.attention.sliding_window": 9,
        "dflash.attention.sliding_window_pattern": [True, True], "tokenizer.ggml.mask_token_id": 3,
    }  # fmt: skip
    assert {key: keys[key] for key in expected} == expected
    # as ggml has them: the innermost first
    shapes = {one.name: (one.tensor_type.name, [int(size) for size in one.shape]) for one in reader.tensors}
    hidden, vocabulary = bpe.spec.hidden, bpe.spec.vocabulary
    for part in ("attn", "ffn"):
        assert shapes[f"blk.1.{part}_conv_base"] == ("F32", [hidden, 2, 2])
        assert shapes[f"blk.1.{part}_conv_proj.weight"][1] == [hidden, 2 * 2 * hidden // 4]
    assert shapes["selector_predecessor.weight"][1] == shapes["selector_successor.weight"][1] == [8, vocabulary]
    assert shapes["selector_hidden.weight"][1] == [hidden, 8]


def test_what_an_engine_can_not_draft_is_not_written(bpe, tmp_path) -> None:
    """Catches a file that llama.cpp refuses when it is loaded, and a block whose first row engines do not read."""
    wide = checkpoint_of(bpe, tmp_path / "wide", candidates=6)
    with pytest.raises(ExportError, match="which fits 5; train with candidates: 5"):
        export_folder(wide, "gguf", tmp_path / "out", bpe)
    anchored = checkpoint_of(bpe, tmp_path / "anchored", anchor_predicts=True)
    for format in ("sglang", "speculators", "gguf"):
        with pytest.raises(ExportError, match="train with anchor_predicts: no"):
            export_folder(anchored, format, tmp_path / format, bpe)


def test_an_imported_folder_is_a_checkpoint(target, tmp_path) -> None:
    """Catches a selector of others that lacks what ours stores besides."""
    import_folder(published(target, tmp_path / "theirs"), tmp_path / "ours", target)
    assert float(load_model(tmp_path / "ours", target).candidate_selector.share) == 1.0
