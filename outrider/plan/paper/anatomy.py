"""What a model's pass reads and computes, from its config alone.

Weights are counted on a model without values (device meta), so that biases, gates and shared experts need no formula.
A required field that is missing from config.json is an error: the library's default for it would be a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.utils import cached_file

from outrider.errors import TargetError, first_line
from outrider.hub import missing_path
from outrider.plan.paper import weights as formats
from outrider.storage.json_text import parse_json
from outrider.targets import catalog
from outrider.targets.gguf import load as gguf
from outrider.targets.gguf.files import locate
from outrider.targets.sketch import TIED, Sketch, of_config, unreadable

NEEDED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size", "moe_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts",
    "num_experts_per_tok", "kv_lora_rank", "qk_rope_head_dim",
)  # fmt: skip
"""Fields that must be in the file even if the family has a default for them."""
NESTED = ("text_config", "llm_config")
"""Where the config of a multimodal model stores its language model."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


class Attention(NamedTuple):
    """Layers with the same attention window."""

    layers: int
    window: int | None
    """Tokens that they attend to; None for all."""
    cache_bytes: float
    """Bytes of one token, in all of these layers."""
    flops: float
    """Operations of one row per token that it attends to, in all of these layers."""

    def attended(self, context: float) -> float:
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Anatomy:
    """The sizes of a model on which the time and memory of its passes depend."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    context: int
    parameters: int
    read: int
    """Weights of layers that every pass reads, without experts."""
    head: int
    """Weights of the output layer."""
    expert: int
    """Weights of one expert, over all layers with experts."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int
    attention: tuple[Attention, ...]
    weight: formats.Weight
    """Storage format of the layers' matrices."""
    expert_weight: formats.Weight
    head_bytes: float = 2.0
    """Bytes of a weight of the output layer."""

    @property
    def active(self) -> int:
        """Weights used for one token."""
        return self.read + self.head + self.experts_per_token * self.expert

    @property
    def weight_bytes(self) -> float:
        """Memory of all weights."""
        others = self.parameters - self.read - self.expert * self.experts
        layers = self.read * self.weight.bytes + self.expert * self.experts * self.expert_weight.bytes
        return layers + others * self.head_bytes

    def cache_bytes(self, context: float) -> float:
        """Bytes of keys and values of one text of `context` tokens."""
        return sum(layers.cache_bytes * layers.attended(context) for layers in self.attention)


def anatomy(name: str, weight: str | None = None) -> Anatomy:
    """The anatomy of `demo`, of a folder with config.json, or of a Hugging Face id.  Raises TargetError, ConfigError.

    weight: how its matrices will be stored, such as int4; default as in its config.
    """
    return of_fields(read(name), name, weight)


def read(name: str) -> dict[str, Any]:
    """The fields of config.json, or of a GGUF file in its place.  Raises TargetError if it can't be fetched or read."""
    path = catalog.checkpoint(name)
    if (files := locate(path)) is not None:
        config, parts = gguf.described(name, files)
        return {**config.to_dict(), "quantization_config": formats.in_blocks(parts.tensors)}
    try:
        if (problem := missing_path(path)) is not None:
            raise OSError(problem)
        config_path = cached_file(path, "config.json")
        fields = parse_json(Path(config_path).read_text(encoding="utf-8")) if config_path else None
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from None
    if not isinstance(fields, dict):
        raise TargetError(f"the config.json of {name} must be an object with the model's sizes; restore it")
    return fields


def sketched(fields: Mapping[str, Any], name: str) -> Sketch:
    """A model without values.  Raises TargetError naming each field that is missing or not a valid size."""
    kind, text = str(fields.get("model_type")), fields
    if kind not in CONFIG_MAPPING:
        what = (
            "has no model_type"
            if "model_type" not in fields
            else f"has model_type {kind!r}, which the installed transformers lacks"
        )
        raise TargetError(f"the config.json of {name} {what}; name a model that transformers can build")
    family: Any = CONFIG_MAPPING[kind]
    nested = next((part for part in NESTED if isinstance(fields.get(part), Mapping)), None)
    if nested is not None:
        tied = {key: fields[key] for key in (TIED,) if key in fields}
        text = tied | fields[nested]
        inner = (getattr(family, "sub_configs", None) or {}).get(nested)
        kind = text.get("model_type")
        family = CONFIG_MAPPING[str(kind)] if kind in CONFIG_MAPPING else inner or family
    _refuse_gaps(text, family, name)
    try:
        return of_config(family(**{key: value for key, value in text.items() if key != "quantization_config"}), name)
    except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        # when transformers checks sizes against each other, the reason is in the cause
        why = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise TargetError(f"the config.json of {name} is not a valid model: {first_line(why)}; correct it") from error


def context_of(fields: Mapping[str, Any]) -> int | None:
    """The context length in a config.json; None if it has none."""
    for part in (fields, *(each for name in NESTED if isinstance(each := fields.get(name), Mapping))):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if _is_size(part.get(name)) and isinstance(part[name], int):
                return int(part[name])
    return None


def _refuse_gaps(text: Mapping[str, Any], family: Any, name: str) -> None:
    """Raises TargetError for fields that are missing or not valid sizes."""
    other = {value: key for key, value in family.attribute_map.items()} | dict(family.attribute_map)
    # a default of None follows from other sizes; a number is the size of one particular model
    needed = [field for field in NEEDED if isinstance(getattr(family, field, None), int)]
    needed += [alias for field, alias in family.attribute_map.items() if field in NEEDED and not hasattr(family, field)]
    missing = [field for field in needed if text.get(field, text.get(other.get(field, ""))) is None]
    if missing:
        raise TargetError(
            f"the config.json of {name} lacks {', '.join(sorted(missing))}; the time of its passes depends on them, so "
            "add them"
        )
    wrong = [f"{field} {text[field]!r}" for field in needed if field in text and not _is_size(text[field])]
    if wrong:
        raise TargetError(f"the config.json of {name} has {', '.join(wrong)}; each must be a whole number above 0")


def _is_size(value: Any) -> bool:
    sizes = value if isinstance(value, list) else [value]
    return all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)


def of_fields(fields: Mapping[str, Any], name: str, weight: str | None = None) -> Anatomy:
    """The anatomy of the model with these fields of config.json.  Raises TargetError, ConfigError."""
    return of_sketch(sketched(fields, name), formats.stored(fields, weight, name))


def of_sketch(sketch: Sketch, stored: formats.Stored) -> Anatomy:
    """The anatomy of a model without values."""
    config, spec = sketch.config, sketch.spec
    counts = sketch.weights()
    of_experts = sum(size for name, size in counts.items() if ".experts." in name)
    embedding = spec.vocabulary * spec.hidden
    head = sum(size for name, size in counts.items() if name.endswith("lm_head.weight")) or embedding
    total = sum(counts.values())
    tables = sum(size for name, size in counts.items() if _is_table(name))
    is_tied = not any(name.endswith("lm_head.weight") for name in counts)
    experts = next((int(n) for field in EXPERTS if (n := getattr(config, field, None))), 0) if of_experts else 0
    per_token = int(getattr(config, "num_experts_per_tok", 0) or 0) if experts else 0
    if experts and not per_token:
        raise TargetError(f"the config.json of {spec.name} lacks num_experts_per_tok; add it")
    return Anatomy(
        name=spec.name, layers=spec.layers, hidden=spec.hidden, vocabulary=spec.vocabulary, context=spec.context,
        parameters=total, read=total - of_experts - tables - (0 if is_tied else head), head=head,
        expert=of_experts // experts if experts else 0, experts=experts, experts_per_token=per_token,
        attention=_attention(config), weight=stored.layers, expert_weight=stored.experts, head_bytes=stored.rest_bytes,
    )  # fmt: skip


def _is_table(name: str) -> bool:
    return any(
        part in name for part in ("embed_tokens", "wte.", "wpe.", "embed_in", "word_embeddings", "embed_positions")
    )


def _attention(config: Any) -> tuple[Attention, ...]:
    """Layers by attention window and head size; layers with a recurrent state in place of a cache are left out."""
    count = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    of_layers = getattr(config, "per_layer_config", None)  # for families whose layers have heads of different sizes
    each = [config] * count if of_layers is None else [of_layers[n] for n in range(count)]
    alike = Counter(
        (kind, _sizes(layer)) for kind, layer in zip(kinds, each, strict=True)
        if kind in ("full_attention", "sliding_attention") and getattr(layer, "num_attention_heads", None)
    )  # fmt: skip
    return tuple(
        Attention(many, window if kind == "sliding_attention" else None, many * cached, many * flops)
        for (kind, (window, cached, flops)), many in sorted(alike.items(), key=lambda item: item[0][0])
    )


def _sizes(layer: Any) -> tuple[int | None, int, int]:
    """A layer's window, the bytes of a token in its cache, and the operations of a row per token it attends to."""
    # bytes of a key or value: the type of the weights that are not quantised
    size, heads = 2 if "float32" not in str(layer.dtype) else 4, layer.num_attention_heads
    window, latent = getattr(layer, "sliding_window", None), getattr(layer, "kv_lora_rank", None)
    if latent:
        numbers, flops = latent + layer.qk_rope_head_dim, 2 * heads * (2 * latent + layer.qk_rope_head_dim)
    else:
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        shared = getattr(layer, "num_key_value_heads", None) or heads
        numbers, flops = 2 * shared * width, 4 * heads * width
    return window, numbers * size, flops
