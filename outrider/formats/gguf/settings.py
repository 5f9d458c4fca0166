"""Translate the layer keys of a drafter's GGUF file to our settings, and refuse what our drafters don't compute.

A missing key has llama.cpp's default: a DSpark drafts in the anchor's slot, a DFlash does not.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import ExportError
from outrider.formats.gguf import model
from outrider.formats.layout import Config
from outrider.targets.hf.transformers import TransformersTarget

PLAIN = {
    "attention.sliding_window": 0, "embedding_scale": 0.0, "attention.scale": 0.0, "attention.value_scale": 0.0,
    "logit_scale": 0.0, "final_logit_softcapping": 0.0, "hidden_act": "silu", "attention.causal": False,
    "norm_before_fc": False,
}  # fmt: skip
"""Values that these keys must have, if present."""


def layer(config: Config) -> dict[str, Any]:
    """The settings of a file's decoder layers."""
    sizes = model.sizes_of(config)
    return {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
        "intermediate": sizes.intermediate, "rms_norm_eps": sizes.rms_norm_eps, "rope_theta": sizes.rope_theta,
        "rope_scaling": sizes.rope_scaling, "partial_rotary_factor": sizes.partial_rotary_factor,
    }  # fmt: skip


def check(config: Config, target: TransformersTarget) -> None:
    """Raises ExportError for a file that was made for another target, or uses features that our drafters lack."""
    name, spec = config["general.architecture"], target.spec
    for key in ("embedding_length", "target_hidden_size"):
        if (stored := config.get(f"{name}.{key}")) not in (None, spec.hidden):
            raise ExportError(f"{key} is {stored}, {spec.name} has {spec.hidden}; load the target it was trained for")
    check_vocabulary(config, target)
    for key, value in PLAIN.items():
        if (stored := config.get(f"{name}.{key}", value)) != value:
            raise ExportError(f"{key} is {stored!r}; Outrider's drafters need {value!r}; use a draft that has it")
    if any((config.get(f"{name}.rope.dimension_sections") or [0])[1:]):
        raise ExportError("rope.dimension_sections has several parts; Outrider's drafters rotate by one position")


def check_vocabulary(config: Config, target: TransformersTarget) -> None:
    tokens = config.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens) != target.spec.vocabulary:
        size = "no tokens" if tokens is None else f"{len(tokens)} tokens"
        raise ExportError(
            f"the file has {size}, {target.spec.name} has {target.spec.vocabulary}; load the target it was trained for"
        )
