"""Architectures of GGUF files: the config of transformers' class, and the names of its weights.

Changes made by llama.cpp's converter are undone: it interleaves queries and keys of families that rotate adjacent
pairs, and adds 1 to the norms of Gemma.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.targets.gguf import rotary
from outrider.targets.gguf.keys import Keys, Refused
from outrider.targets.gguf.reader import Info, shown
from outrider.targets.gguf.rotary import Factors

Tensors = Mapping[str, Info]
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA = LAYER | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
FUSED = {name: path for name, path in LAYER.items() if name not in ("attn_q", "attn_k", "attn_v", "ffn_gate")} | {
    "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""For each architecture, the number of layers of the one model that scales its scores by hidden size / heads, not by
head_dim."""
WINDOW = "attention.sliding_window"
LOCAL_BASE = 10_000.0
"""Rotary base in Gemma 3's windows."""
GEMMA3_PERIOD = 6
"""Every sixth layer of a Gemma 3 has full attention."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its decoder layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True)
class Architecture:
    """How a model of an architecture is built, and the names of its weights."""

    model_type: str
    """transformers' name."""
    fields: Callable[[Keys, Sizes], dict[str, Any]] = lambda _keys, _sizes: {}
    """Additional fields of its config."""
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    """Names within a layer: llama.cpp's → transformers'."""
    rotates_pairs: bool = False
    """Whether rows of queries and keys are interleaved."""
    added_to_norms: float = 0.0

    def names(self, layers: int) -> dict[str, str]:
        """llama.cpp's names of weights, without suffix → transformers' modules."""
        in_layers = {
            f"blk.{i}.{name}": f"model.layers.{i}.{path}" for i in range(layers) for name, path in self.layer.items()
        }
        return WHOLE | in_layers


# ── configs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _llama(keys: Keys, sizes: Sizes) -> dict[str, Any]:
    return {"head_dim": sizes.head_dim}


def _whole_heads(_keys: Keys, sizes: Sizes) -> dict[str, Any]:
    if sizes.head_dim * sizes.heads != sizes.hidden:
        raise Refused(f"its heads of {sizes.head_dim} are not {sizes.hidden} / {sizes.heads} wide")
    return {}


def _granite(keys: Keys, sizes: Sizes) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    scales = {name: keys.number(key, 1.0) for name, key in names.items()}
    if not all(scales.values()):
        raise Refused(f"one of its scales is 0: {scales}")
    return _whole_heads(keys, sizes) | scales


def _gemma2(keys: Keys, sizes: Sizes) -> dict[str, Any]:
    # files don't say how scores are scaled; llama.cpp decides based on the number of layers
    is_largest = sizes.layers == LARGEST_GEMMAS[keys.architecture]
    caps = {name: keys.number(name, 0.0) or None for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {
        "head_dim": sizes.head_dim, "sliding_window": keys.count(WINDOW), **caps,
        "query_pre_attn_scalar": sizes.hidden // sizes.heads if is_largest else sizes.head_dim,
    }  # fmt: skip


def _gemma3(keys: Keys, sizes: Sizes) -> dict[str, Any]:
    period = keys.count("attention.sliding_window_pattern", GEMMA3_PERIOD)
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(sizes.layers)]
    return _gemma2(keys, sizes) | {"layer_types": kinds}


def _phi3(keys: Keys, sizes: Sizes) -> dict[str, Any]:
    window = keys.get(WINDOW)
    rope = {"original_max_position_embeddings": keys.count("rope.scaling.original_context_length", 4096)}
    return _whole_heads(keys, sizes) | rope | {"sliding_window": keys.count(WINDOW) if window else None}


ARCHITECTURES = {
    "llama": Architecture("llama", _llama, rotates_pairs=True),
    "qwen2": Architecture("qwen2", _whole_heads),
    "qwen3": Architecture("qwen3", _llama, LAYER | QK_NORMS),
    "gemma2": Architecture("gemma2", _gemma2, GEMMA, added_to_norms=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, GEMMA | QK_NORMS, added_to_norms=1.0),
    "phi3": Architecture("phi3", _phi3, FUSED),
    "smollm3": Architecture("smollm3", _whole_heads, rotates_pairs=True),
    "granite": Architecture("granite", _granite, rotates_pairs=True),
}


def architecture(keys: Keys) -> Architecture:
    """Raises Refused if it is not supported."""
    supported = ARCHITECTURES.get(keys.architecture)
    if supported is None:
        raise Refused(
            f"its architecture {shown(keys.architecture)} is not supported as GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}; use the model's safetensors checkpoint"
        )
    return supported


def config(keys: Keys, tensors: Tensors, factors: Factors) -> dict[str, Any]:
    """Fields of the model's config, with sizes checked against its weights.

    Raises Refused if something is missing, does not match the weights, or is not supported.
    """
    arch, sizes = architecture(keys), _sizes(keys, tensors)
    rope = rotary.parameters(keys, sizes.head_dim, factors)
    rotated = keys.count("rope.dimension_count", sizes.head_dim)
    if arch.model_type == "phi3":
        rope["partial_rotary_factor"] = rotated / sizes.head_dim
    elif rotated != sizes.head_dim:
        raise Refused(f"it rotates {rotated} of {sizes.head_dim} dimensions of a head, which is not supported")
    if arch.model_type == "gemma3_text":
        local = keys.number("rope.freq_base_swa", LOCAL_BASE)
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    fields = {
        "model_type": arch.model_type, "num_hidden_layers": sizes.layers, "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.intermediate, "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"), "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors, **_biases(arch, tensors), **arch.fields(keys, sizes),
    }  # fmt: skip
    keys.refuse_ignored()
    return fields


def _biases(arch: Architecture, tensors: Tensors) -> dict[str, bool]:
    """Fields for the biases of its layers, in families whose configs have them."""
    biases = {"attention_bias": "blk.0.attn_output.bias" in tensors, "mlp_bias": "blk.0.ffn_down.bias" in tensors}
    return {name: True for name, is_there in biases.items() if is_there and arch.model_type in ("llama", "granite")}


def _sizes(keys: Keys, tensors: Tensors) -> Sizes:
    """Sizes from the keys, checked against the weights, so that none is larger than the file."""
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", max(1, hidden // heads))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise Refused("its key heads and value heads differ in width, which is not supported")
    sizes = Sizes(
        keys.count("block_count"), hidden, heads, keys.count("attention.head_count_kv", heads), head_dim,
        keys.count("feed_forward_length"),
    )  # fmt: skip
    if sizes.heads % sizes.kv_heads or head_dim % 2:
        raise Refused(f"{heads} heads of {head_dim} can't share {sizes.kv_heads} heads of keys and values")
    arch = architecture(keys)
    rows = {"attn_q": heads, "attn_k": sizes.kv_heads, "attn_v": sizes.kv_heads, "attn_qkv": heads + 2 * sizes.kv_heads}
    parts = 2 if arch.layer["ffn_up"] == "mlp.gate_up_proj" else 1
    expected: dict[str, tuple[int, ...]] = {
        **{f"blk.0.{name}.weight": (count * head_dim, hidden) for name, count in rows.items() if name in arch.layer},
        "blk.0.attn_norm.weight": (hidden,), "blk.0.ffn_up.weight": (parts * sizes.intermediate, hidden),
    }  # fmt: skip
    for name, shape in expected.items():
        if name not in tensors or tensors[name].shape != shape:
            problem = "which is missing" if name not in tensors else f"but its shape is {tensors[name].shape}"
            raise Refused(f"its keys require {name} {shape}, {problem}")
    _check_layers(sizes.layers, tensors)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise Refused(f"it has no token_embd.weight with rows of {hidden} values")
    return sizes


def _check_layers(count: int, tensors: Tensors) -> None:
    """Raises Refused unless there are `count` layers, all with the same tensors."""
    layers: dict[str, set[str]] = {}
    for name in tensors:
        if name.startswith("blk."):
            _, number, rest = [*name.split(".", 2), ""][:3]
            layers.setdefault(number, set()).add(rest)
    if len(layers) != count:
        raise Refused(f"its key block_count is {count}, but it has weights of {len(layers)} layers")
    first = layers.get("0", set())
    for number in map(str, range(count)):
        if lost := first ^ layers.get(number, set()):
            raise Refused(f"layers 0 and {number} do not both have {shown(min(lost))}")
