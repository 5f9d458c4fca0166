"""Tiny models of every architecture that a GGUF target may have, in files written with llama.cpp's own library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import gguf_targets
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.formats.gguf import tokenizer as gguf_tokenizer
from outrider.kernels import blocks, quantized

SIZES = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""Rows that are whole numbers of blocks of every kind."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e3,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, "attention_factor": 1.25,
        "short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [2.0 + i for i in range(12)],
        "partial_rotary_factor": 0.75}  # fmt: skip
WINDOWS = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
           "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    "llama, stretched, untied": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "llama, biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8,
               "num_hidden_layers": 7, "rope_parameters": WINDOWS},
    "phi3": {"model_type": "phi3", "rope_parameters": LONG, "sliding_window": 8,
             "original_max_position_embeddings": 128},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "rope_parameters": {"rope_type": "default",
                                                                                      "rope_theta": 2e6}},
    "granite": {"model_type": "granite", "attention_multiplier": 0.2, "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22, "logits_scaling": 8.0},
}  # fmt: skip
KINDS = tuple(blocks.BLOCKS)


def model_of(case: str) -> Any:
    """A random model of transformers' class, float32; equal case, equal weights."""
    words = gguf_targets.tokenizer()
    fields = {**SIZES, "tie_word_embeddings": True, "vocab_size": len(words) + gguf_targets.PADDED, **CASES[case]}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms and biases that change something
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def keys_of(model: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a config."""
    config, name = model.config, architecture(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    own = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": rope["rope_theta"],
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    if rope["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if "attention_factor" in rope:
        own["rope.scaling.attn_factor"] = rope["attention_factor"]
    others = {
        "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping", "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }  # fmt: skip
    own |= {key: value for key, field in others.items() if (value := getattr(config, field, None)) is not None}
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in own.items()}}


def architecture(model: Any) -> str:
    return str(model.config.model_type.removesuffix("_text"))


# ── tensors as llama.cpp's converter has them ────────────────────────────────────────────────────────────────────────


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Weights by llama.cpp's names, which its library knows."""
    name, config = architecture(model), model.config
    arch = next(number for number, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for theirs, weight in model.named_parameters():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert ours is not None, theirs
        found[ours] = _converted(name, theirs, weight.detach(), config)
    return found | _factors(config)


def _converted(name: str, theirs: str, weight: Tensor, config: Any) -> Tensor:
    if name in ("gemma2", "gemma3") and theirs.endswith("norm.weight"):
        return weight + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(theirs.split(".")[-2])
    if name in ("llama", "smollm3", "granite") and heads is not None:
        size = weight.shape[0] // heads
        return weight.view(heads, 2, size // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    return weight


def _factors(config: Any) -> dict[str, Tensor]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{which}.weight": torch.tensor(rope[f"{which}_factor"]) for which in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    size = config.head_dim
    waves = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((rope["original_max_position_embeddings"] / waves - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).float()}


def blocks_of(weight: Tensor, kind: str) -> np.ndarray:
    """A matrix as rows of blocks, uint8; of types that llama.cpp's library can't quantise, random blocks."""
    types = gguf.GGMLQuantizationType
    if kind == "F32":
        return weight.contiguous().numpy().view(np.uint8)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16", "BF16"):
        made: np.ndarray = gguf.quants.quantize(weight.contiguous().numpy(), types[kind])
        return made.view(np.uint8)
    rows, columns = weight.shape
    raw = quantized.example(kind, rows, columns, torch.Generator().manual_seed(weight.numel() % 997))
    each = raw.view(-1, blocks.BLOCKS[kind].bytes)
    for at in quantized.HALVES[kind]:
        each[:, at : at + 2] = (each[:, at : at + 2].contiguous().view(torch.float16) * 0.03).view(torch.uint8)
    return raw.numpy()


def write(
    path: Path, model: Any, kind: str | Mapping[str, str] = "Q8_0", tokenizer: Any = None,
    change: Callable[[dict[str, Any], dict[str, Tensor]], None] = lambda keys, tensors: None, like: Any = None,
) -> Path:  # fmt: skip
    """A GGUF file of a model.  kind: of all matrices, or of each by its name.  like: a model that gets the values that
    the file stands for."""
    keys, tensors = keys_of(model), tensors_of(model)
    keys |= gguf_tokenizer.keys(tokenizer or gguf_targets.tokenizer(), model.config.vocab_size, model)
    change(keys, tensors)
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if key != "general.architecture":
            adds.get(type(value), writer.add_array)(key, value)
    values: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        own = kind if isinstance(kind, str) else kind.get(name, "F32")
        raw = gguf.GGMLQuantizationType["F32" if weight.dim() == 1 else own]
        made = blocks_of(weight, raw.name)
        writer.add_tensor(name, made, raw_dtype=raw) if weight.dim() > 1 else writer.add_tensor(name, weight.numpy())
        values[name] = weight if raw.name == "F32" else torch.from_numpy(gguf.quants.dequantize(made, raw).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if like is not None:
        _fill(like, values)
    return path


@torch.no_grad()
def _fill(model: Any, values: Mapping[str, Tensor]) -> None:
    """The model with these values, which are as llama.cpp's converter has them."""
    name, config = architecture(model), model.config
    arch = next(number for number, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for theirs, weight in model.named_parameters():
        value = values[names.get_name(theirs, try_suffixes=(".weight", ".bias"))]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(theirs.split(".")[-2])
        if name in ("llama", "smollm3", "granite") and heads is not None:
            size = value.shape[0] // heads
            value = value.view(heads, size // 2, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        weight.copy_(value - 1 if name.startswith("gemma") and theirs.endswith("norm.weight") else value)
