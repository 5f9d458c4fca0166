"""Sizes and rotary positions of a model's decoder layers, from its config.

If layers differ, the sizes are those of the last layer with full attention, since a drafter's layers have full
attention.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.targets.protocol import LayerSizes

WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
"""Names of the MLP's width; if there is none, it is four times the hidden size."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""Names of the epsilon of a norm."""
OF_THEIR_OWN = ("rope_theta", "partial_rotary_factor", "type")
"""Keys of rope_parameters that are not part of the scaling."""


def layer_sizes(config: Any) -> LayerSizes | None:
    """Sizes of a transformers config's decoder layers; None if it has no heads, as for some recurrent models.

    For experts, it is also the config's `intermediate_size`.
    """
    text = config.get_text_config(decoder=True)
    layer = _whole_text_layer(text)
    heads = _first(layer, ("num_attention_heads",))
    if not isinstance(heads, int):
        return None
    kv_heads = _first(layer, ("num_key_value_heads", "num_kv_heads")) or heads
    # with a compressed cache (MLA) head_dim is that of the rotated part only
    head_dim = _first(layer, ("v_head_dim", "head_dim")) or text.hidden_size // heads
    widths = _first(layer, WIDTHS)
    width = widths[-1] if isinstance(widths, list | tuple) else widths  # the last layer's, if each has its own
    theta, scaling, share = _rotation(text)
    return LayerSizes(
        heads, kv_heads, head_dim, width or 4 * text.hidden_size,
        float(_first(layer, EPSILONS) or 1e-6), theta, scaling, share,
    )  # fmt: skip


def unused_row(tokenizer: Any, rows: int) -> int | None:
    """First row of an embedding without a token in the tokenizer; None if all rows have one, or without a tokenizer."""
    return None if tokenizer is None or len(tokenizer) >= rows else len(tokenizer)


def _whole_text_layer(text: Any) -> Any:
    """The config of the last layer with full attention, in families with a config per layer."""
    layers = getattr(text, "per_layer_config", None)
    if not layers:
        return text
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    last = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=len(kinds) - 1)
    return layers[last]


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _rotation(text: Any) -> tuple[float, dict[str, Any] | None, float]:
    """Base, scaling and the rotated fraction of a head, for layers with full attention."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    by_kind = [value for value in rope.values() if isinstance(value, Mapping)]
    if by_kind:
        rope = rope.get("full_attention") or by_kind[-1]  # kinds without rotation map to None
    scaling = {key: value for key, value in rope.items() if key not in OF_THEIR_OWN}
    kind = scaling.get("rope_type", "default")
    if "factor" in scaling:
        scaling["factor"] = float(scaling["factor"])
    if kind in ("yarn", "llama3") and scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = text.max_position_embeddings  # transformers' default
    # in proportional scaling it is a fraction of the frequencies, while the whole head is rotated
    share = 1.0 if kind == "proportional" else rope.get("partial_rotary_factor", 1.0)
    return float(rope.get("rope_theta", 10_000.0)), None if kind == "default" else scaling, float(share)


def frequencies(shape: LayerSizes, device: torch.device) -> tuple[Tensor, float]:
    """Rotary frequencies of a head, float32 [rotated / 2], and the factor on cos and sin."""
    scaling = json.dumps(shape.rope_scaling, sort_keys=True)
    return _frequencies(shape.head_dim, shape.partial_rotary_factor, shape.rope_theta, scaling, device)


@functools.cache
def _frequencies(head_dim: int, share: float, theta: float, scaling: str, device: torch.device) -> tuple[Tensor, float]:
    # not a buffer: moving the model to bf16 would also convert it, and distant positions would get wrong angles
    parameters = json.loads(scaling)
    rotated = int(head_dim * share)
    if parameters is None:
        return theta ** -(torch.arange(0, rotated, 2, device=device, dtype=torch.float32) / rotated), 1.0
    parameters |= {"rope_theta": theta, "partial_rotary_factor": share}
    config = Qwen3Config(head_dim=head_dim, rope_parameters=parameters)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)
    return inv_freq.float(), float(scale)
