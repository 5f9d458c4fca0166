"""A causal language model as GGUF: the target, or a small_model.

Tensor names come from llama.cpp's own library.  Differences from transformers: a tied head is not stored, and the rows
of queries and keys of a `llama` are interleaved, since llama.cpp rotates neighbouring pairs instead of halves.  Shapes
that llama.cpp would load but compute differently are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ExportError
from outrider.formats.gguf import file, reading
from outrider.formats.gguf import tokenizer as gguf_tokenizer
from outrider.formats.layout import Config
from outrider.storage.json_text import parse_json
from outrider.targets.gguf import rotary
from outrider.targets.protocol import LayerSizes
from outrider.targets.sizes import frequencies, layer_sizes

SCALING = {"linear": "linear", "default": None, "llama3": None}
"""Rotary scalings that a file can hold; llama3's is stored as one factor per frequency."""
FACTORS = rotary.DIVISORS
"""llama.cpp's name for these factors."""
STRETCH = "outrider.rope_scaling"
"""Our own key: the numbers that llama3's factors were computed from, as JSON."""
FAMILIES = ("qwen3", "llama")
"""Architectures that can be written; transformers and llama.cpp use the same names."""


# ── keys of the file ─────────────────────────────────────────────────────────────────────────────────────────────────


def header(lm: Any, tokenizer: Any, precision: str) -> dict[str, Any]:
    """The keys of a GGUF file of a causal language model.

    Raises ExportError with the reason that `refused` gives.
    """
    if reason := refused(lm, tokenizer):
        raise ExportError(f"it can't be written as GGUF: {reason}")
    config, sizes = lm.config, layer_sizes(lm.config)
    assert sizes is not None
    name = config.model_type
    shape = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "vocab_size": config.vocab_size, **layer(sizes),
    }  # fmt: skip
    return {
        **file.general(name, precision), **{f"{name}.{key}": value for key, value in shape.items()},
        **stretch(sizes), **gguf_tokenizer.keys(tokenizer, config.vocab_size, lm),
    }  # fmt: skip


def layer(sizes: LayerSizes) -> dict[str, Any]:
    """The keys of a decoder layer's sizes and rotary positions, without the architecture prefix."""
    scaling = sizes.rope_scaling or {}
    kind = SCALING[scaling.get("rope_type", "default")]
    linear = {} if kind is None else {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    return {
        "feed_forward_length": sizes.intermediate, "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads, "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim, "attention.layer_norm_rms_epsilon": float(sizes.rms_norm_eps),
        "rope.dimension_count": int(sizes.head_dim * sizes.partial_rotary_factor),
        "rope.freq_base": float(sizes.rope_theta), **linear,
    }  # fmt: skip


def stretch(sizes: LayerSizes) -> dict[str, Any]:
    """Our own key for the numbers that llama3's factors were computed from; empty for other rotations."""
    return {STRETCH: json.dumps(dict(sizes.rope_scaling or {}))} if is_llama3(sizes) else {}


def is_llama3(sizes: LayerSizes) -> bool:
    return (sizes.rope_scaling or {}).get("rope_type") == "llama3"


def refused(lm: Any, tokenizer: Any) -> str | None:
    """Why a language model can't be written as GGUF; None if it can."""
    config = lm.config
    name = config.model_type
    if name not in FAMILIES:
        return f"its architecture is {name}; known are qwen3 and llama, use llama.cpp's converter on --to transformers"
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            return f"{key} is true; that is known only without"
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.hidden_act != "silu" or layers != {"full_attention"}:
        return "its layers are not all full attention with SiLU"
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind not in SCALING or rope.get("partial_rotary_factor", 1) != 1 or (kind == "llama3" and name != "llama"):
        return f"its rotation is {rope}; known are default, linear, and llama3 for a llama"
    return gguf_tokenizer.refused(tokenizer)


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors(weights: Mapping[str, Tensor], keys: Config, lm: Any) -> dict[str, Tensor]:
    """Converts a language model's weights, by transformers' names, to the file's tensors.

    Raises ExportError for a weight that has no llama.cpp name.
    """
    names, sizes = names_of(keys, list(weights)), layer_sizes(lm.config)
    assert sizes is not None
    return {names[name]: reordered(name, weight, keys) for name, weight in weights.items()} | factors(sizes)


def factors(sizes: LayerSizes) -> dict[str, Tensor]:
    """The divisor of each frequency in llama3's rotation [head_dim / 2]; empty for other rotations."""
    if not is_llama3(sizes):
        return {}
    each = frequencies(sizes, torch.device("cpu"))[0].double()
    plain = sizes.rope_theta ** -(torch.arange(len(each), dtype=torch.float64) / len(each))
    return {FACTORS: (plain / each).float()}


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys of a GGUF file of a causal language model, and its weights by transformers' names."""
    keys, tensors = dict(reading.read_header(path).keys), reading.read_tensors(path)
    names = names_of(keys, _possible(keys[f"{keys['general.architecture']}.block_count"]))
    weights = {
        name: reordered(name, tensors.pop(theirs), keys, back=True) for name, theirs in names.items()
        if theirs in tensors
    }  # fmt: skip
    tensors.pop(FACTORS, None)
    return keys, {**weights, **tensors}


def names_of(keys: Config, names: list[str]) -> dict[str, str]:
    """Maps transformers' names to llama.cpp's.  Raises ExportError for a name that has no counterpart."""
    library, family = file.library(), keys["general.architecture"]
    if family not in FAMILIES:
        raise ExportError(f"the file is of architecture {family}; known are {', '.join(FAMILIES)}")
    arch = next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == family)
    layers = keys[f"{family}.block_count"]
    tensor_names = library.get_tensor_name_map(arch, layers)
    gguf_names = {name: tensor_names.get_name(name, try_suffixes=(".weight",)) for name in names}
    lost = [name for name, theirs in gguf_names.items() if theirs is None and name not in _possible(layers)]
    if lost:
        raise ExportError(
            f"llama.cpp has no name for the weights {', '.join(lost[:4])} of {family}, so they can't be written as GGUF"
        )
    return {name: theirs for name, theirs in gguf_names.items() if theirs is not None}


def _possible(layers: int) -> list[str]:
    """Weights that a model of these families can have, by transformers' names."""
    parts = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    whole = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return [*whole, *(f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts)]


def reordered(name: str, weight: Tensor, keys: Config, back: bool = False) -> Tensor:
    """Reorders queries and keys of a llama to llama.cpp's order, or back; other weights are returned unchanged."""
    family, part = keys["general.architecture"], name.split(".")[-2]
    count = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(part)
    if family != "llama" or count is None:
        return weight
    return interleaved(weight, keys[f"{family}.attention.{count}"], back)


def interleaved(weight: Tensor, heads: int, back: bool = False) -> Tensor:
    """Reorders rows [heads · head_dim, …] for a rotation of neighbouring pairs instead of halves, or back.

    Within each head, row i of half h becomes row h of pair i.
    """
    halves = weight.view(heads, *((-1, 2) if back else (2, -1)), weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


# ── read the same keys ──────────────────────────────────────────────────────────────────────────────────────────────


def architecture(config: Config) -> dict[str, Any]:
    """The settings of a small_model for the keys of a file."""
    name, sizes = config["general.architecture"], sizes_of(config)
    return {
        "architecture": {
            "model_type": name, "hidden_size": config[f"{name}.embedding_length"],
            "num_hidden_layers": config[f"{name}.block_count"], "intermediate_size": sizes.intermediate,
            "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
            "rms_norm_eps": sizes.rms_norm_eps, "max_position_embeddings": config[f"{name}.context_length"],
            "vocab_size": len(config["tokenizer.ggml.tokens"]),
            "tie_word_embeddings": "output.weight" not in config[reading.SHAPES],
            "rope_parameters": {**(sizes.rope_scaling or {"rope_type": "default"}), "rope_theta": sizes.rope_theta},
        }
    }  # fmt: skip


def sizes_of(config: Config) -> LayerSizes:
    """The sizes of a file's decoder layers.  Raises ExportError for an unsupported rotation."""
    name = config["general.architecture"]

    def number(key: str, default: Any = None) -> Any:
        value = config.get(f"{name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ExportError(f"{name}.{key} must be a number above 0, got {value!r}; use another file")
        return value

    heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // heads)
    return LayerSizes(
        heads, number("attention.head_count_kv", heads), head_dim, number("feed_forward_length"),
        _decimal(number("attention.layer_norm_rms_epsilon")), _decimal(number("rope.freq_base", 10_000.0)),
        _scaling(config, name), number("rope.dimension_count", head_dim) / head_dim,
    )  # fmt: skip


def _decimal(stored: float) -> float:
    """The decimal number that was rounded to 32 bits: 1e-06 instead of 9.999999974752427e-07."""
    return float(f"{stored:.7g}")


def _scaling(config: Config, name: str) -> dict[str, Any] | None:
    if STRETCH in config:
        return dict(parse_json(config[STRETCH]))
    kind = config.get(f"{name}.rope.scaling.type", "none")
    has_factors = FACTORS in config[reading.SHAPES]
    if has_factors or kind not in ("none", "linear"):
        what = FACTORS if has_factors else f"rope.scaling.type {kind}"
        raise ExportError(f"it has {what}, from which its rotation can't be read; use the folder it was made from")
    factor = config.get(f"{name}.rope.scaling.factor")
    return {"rope_type": "linear", "factor": float(factor)} if kind == "linear" and factor else None
