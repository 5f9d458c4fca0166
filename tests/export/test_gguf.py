"""GGUF: what llama.cpp is told of a model, its weights and its tokenizer, as the library of llama.cpp reads it back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import scaled
from gguf_targets import PADDED, fresh, tokenizer
from tokenizers import normalizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from outrider.checkpoint import load_model, save
from outrider.errors import ConfigError, ExportError
from outrider.export import reading
from outrider.export.formats import find
from outrider.export.writing import export_folder
from outrider.formats.gguf import layouts
from outrider.formats.gguf import tokenizer as gguf_tokenizer
from outrider.weights import weights_of

library = pytest.importorskip("gguf")


def llama(vocabulary: int, rope: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rope_parameters=rope, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return scaled(LlamaForCausalLM(shape).eval(), 3.0)


SIZES = {"layers": 1, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "head_dim": 8}


@pytest.fixture(scope="module")
def checkpoint(bpe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with a head of its own."""
    path = tmp_path_factory.mktemp("checkpoint") / "small"
    return fresh("small_model", {"new": SIZES | {"tied": False}}, bpe, path)


PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
WHERE = {f"model.layers.0.{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in PARTS.items()}
WHERE |= {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
WHERE |= {"lm_head.weight": "output.weight"}
"""Our names and those that llama.cpp creates for a qwen3 of one layer, written out by hand."""


@pytest.mark.parametrize(("precision", "matrices"), [("f16", "F16"), ("bf16", "BF16"), (None, "F32")])
def test_a_file_holds_llama_cpps_names_and_no_others(precision, matrices, bpe, checkpoint, tmp_path):
    """Catches a weight that is skipped or stands under another's name (gate and up), a norm that is rounded, and bytes
    of bfloat16 in the wrong order."""
    export_folder(checkpoint, "gguf", tmp_path / "there", bpe, precision)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"model.gguf", "outrider.json"}
    found = {one.name: one for one in library.GGUFReader(tmp_path / "there" / "model.gguf").tensors}
    types = {name: "F32" if "norm" in name else matrices for name in WHERE.values()}
    assert {name: one.tensor_type.name for name, one in found.items()} == types
    own, back = weights_of(load_model(checkpoint, bpe)), find("gguf")["small_model"].reads(tmp_path / "there")
    assert {f"lm.{name}" for name in back} == own.keys()
    for name, weight in back.items():
        assert torch.equal(weight, own[f"lm.{name}"].to(weight.dtype)), name
        raw = weight.view(torch.uint8) if weight.dtype == torch.bfloat16 else weight
        assert (found[WHERE[name]].data == raw.numpy()).all(), name
    assert (
        found["blk.0.attn_k.weight"].shape.tolist() == list(back["model.layers.0.self_attn.k_proj.weight"].shape)[::-1]
    )


def test_what_a_file_says_of_the_shape(bpe, checkpoint, tmp_path):
    """Catches a key under a wrong name, which llama.cpp would replace by a default of its own, such as rotation by
    10000; a special token that it would spell out letter by letter, and a head with more rows than tokens."""
    export_folder(checkpoint, "gguf", tmp_path / "there", bpe, "f16")
    said, _ = layouts.read_file(tmp_path / "there" / "model.gguf")
    known, end = len(bpe.tokenizer), bpe.tokenizer.eos_token_id
    shape = {
        "block_count": 1, "context_length": 256, "embedding_length": 16, "feed_forward_length": 24,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 8,
        "attention.value_length": 8, "rope.dimension_count": 8, "rope.freq_base": 10_000.0,
        "vocab_size": known + PADDED,
    }  # fmt: skip
    words = {
        "general.architecture": "qwen3", "general.type": "model", "general.file_type": 1,
        "general.quantization_version": 2, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.padding_token_id": end,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False,
    }  # fmt: skip
    assert said.pop("qwen3.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    tokens, kinds, merges = (said.pop(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    assert said == {f"qwen3.{key}": value for key, value in shape.items()} | words
    assert tokens[:known] == bpe.tokenizer.convert_ids_to_tokens(list(range(known)))
    assert kinds == [1] * (known - 3) + [3, 3, 4] + [5] * PADDED
    assert merges[:2] == ["t h", "th e"]


def _neighbours(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotation as llama.cpp does it for `llama`: places 2i and 2i + 1 by angle i. states [heads, S, D], angles [S, D /
    2]."""
    pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def _scores(model: LlamaForCausalLM, weights: dict[str, torch.Tensor] | None, factors: torch.Tensor) -> torch.Tensor:
    """Dot products of rotated queries and keys of layer 0 [heads, S, S]: transformers' way, or llama.cpp's with
    `weights`."""
    shape, layer = model.config, model.model.layers[0].self_attn
    states = torch.randn(6, shape.hidden_size, generator=torch.Generator().manual_seed(2))
    places = torch.arange(0, 60, 10)

    def heads(weight: torch.Tensor, count: int) -> torch.Tensor:
        return (states @ weight.T).view(len(states), count, -1).transpose(0, 1)

    if weights is None:
        q, k = heads(layer.q_proj.weight, 4), heads(layer.k_proj.weight, 2)
        cos, sin = model.model.rotary_emb(states[None], places[None])
        q, k = (part[0] for part in apply_rotary_pos_emb(q[None], k[None], cos, sin))
    else:
        base = shape.rope_parameters["rope_theta"] ** -(torch.arange(8) / 8)
        angles = places[:, None] * base / factors
        q, k = (
            _neighbours(heads(weights[f"blk.0.attn_{name}.weight"], count), angles)
            for name, count in (("q", 4), ("k", 2))
        )
    return q @ k.repeat_interleave(2, 0).transpose(1, 2)


ROTATIONS = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("rotation", ROTATIONS)
@torch.no_grad()
def test_a_llama_attends_under_llama_cpps_rotation_as_under_transformers(rotation, tmp_path):
    """Catches rows left in transformers' order, the fault that yields fluent nonsense, and a rotation that is not
    stretched."""
    words = tokenizer()
    model = llama(len(words), ROTATIONS[rotation])
    keys = layouts.header(model, words, "f32")
    layouts.write_file(tmp_path / "model.gguf", keys, weights_of(model), model, "f32")
    stored = {
        one.name: torch.from_numpy(one.data.copy()) for one in library.GGUFReader(tmp_path / "model.gguf").tensors
    }
    factors = stored.get("rope_freqs.weight", torch.ones(8))
    theirs, ours = _scores(model, None, factors), _scores(model, stored, factors)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert (rotation == "llama3") == bool((factors > 1).any())
    unturned = dict(stored) | {"blk.0.attn_q.weight": model.model.layers[0].self_attn.q_proj.weight}
    assert not torch.allclose(
        _scores(model, unturned, factors), theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max())
    )
    back = layouts.read_file(tmp_path / "model.gguf")[1]
    assert all(torch.equal(back[name], weight) for name, weight in weights_of(model).items())
    assert "lm_head.weight" not in back, "a tied head is one matrix"


LLAMA3 = gguf_tokenizer.QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")


def test_how_words_are_split_has_llama_cpps_name():
    """Catches numbers that are split digit by digit where the model saw three at once."""
    assert gguf_tokenizer.split(tokenizer()) == ("qwen2", None)
    assert gguf_tokenizer.split(tokenizer(LLAMA3, whole=True)) == ("llama-bpe", None)
    assert gguf_tokenizer.split(tokenizer(None)) == ("gpt-2", None)
    assert gguf_tokenizer.split(tokenizer(normalizer=normalizers.NFC())) == ("qwen2", None)


STRANGE: dict[str, tuple[Callable[[], Any], str]] = {
    "a pattern of its own": (lambda: tokenizer(r"\w+|\W"), "a way that is not supported"),
    "llama's pattern, merged otherwise": (lambda: tokenizer(LLAMA3), "a way that is not supported"),
    "no merges": (lambda: tokenizer(merges=0), "no merges"),
    "lower case": (lambda: tokenizer(normalizer=normalizers.Lowercase()), "normalises texts by Lowercase"),
    "a space before all": (lambda: tokenizer(None, prefix=True), "splits texts by"),
    "none": (lambda: None, "has no tokenizer"),
}


def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(bpe, checkpoint, tmp_path, monkeypatch):
    """Catches a file that loads and tokenises otherwise: drafts are then of another text, and nothing says so."""
    for make, said in STRANGE.values():
        monkeypatch.setattr(bpe, "tokenizer", make())
        with pytest.raises(ExportError, match=said):
            export_folder(checkpoint, "gguf", tmp_path / "there", bpe)
        assert not list(tmp_path.iterdir())


def test_shapes_that_llama_cpp_would_compute_otherwise_are_refused():
    """Catches settings that GGUF has no key for and that would be left out in silence."""
    words = tokenizer()
    model = llama(len(words), ROTATIONS["default"])
    assert layouts.refused(model, words) is None
    changes = {"attention_bias": True, "hidden_act": "gelu", "model_type": "gemma",
               "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}  # fmt: skip
    for name, value in changes.items():
        changed = llama(len(words), ROTATIONS["default"])
        setattr(changed.config, name, value) if name != "model_type" else changed.config.__dict__.update({name: value})
        assert layouts.refused(changed, words) is not None, name


def test_a_weight_that_f16_cant_hold_is_refused_and_nothing_is_left(bpe, tmp_path):
    """Catches an infinity in the file, after which llama.cpp writes nothing but one token."""
    model = load_model(fresh("small_model", {"new": SIZES}, bpe, tmp_path / "mine"), bpe)
    with torch.no_grad():
        model.lm.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    save(tmp_path / "mine", model, {})
    with pytest.raises(ExportError, match=r"blk.0.ffn_up.weight has values that f16 can't hold; choose bf16 or f32"):
        export_folder(tmp_path / "mine", "gguf", tmp_path / "there", bpe, "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_precision_that_there_is_not_is_refused_by_name(bpe, checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="'q3_k'; choose one of f32, f16, bf16, q8_0, q4_0, q4_k"):
        export_folder(checkpoint, "gguf", tmp_path / "there", bpe, "q3_k")
    with pytest.raises(ConfigError, match="transformers can't be written in 'f16'; leave the precision out"):
        export_folder(checkpoint, "transformers", tmp_path / "there", bpe, "f16")


def test_a_small_model_comes_back_from_its_file(bpe, checkpoint, tmp_path):
    """Catches a size that is read from the wrong key, and a tied head that is made one of its own."""
    export_folder(checkpoint, "gguf", tmp_path / "there", bpe)
    (tmp_path / "there" / "outrider.json").unlink()
    reading.import_folder(tmp_path / "there" / "model.gguf", tmp_path / "back", bpe)
    own, back = weights_of(load_model(checkpoint, bpe)), weights_of(load_model(tmp_path / "back", bpe))
    assert own.keys() == back.keys()
    assert all(torch.equal(own[name], back[name]) for name in own)
