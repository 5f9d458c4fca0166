"""What a drafter's GGUF file says of it, in our settings: kinds, sizes, taps; and what our drafters don't compute.

A key that is missing means what llama.cpp takes it for: a DSpark drafts in the anchor's slot, a DFlash does not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.errors import ExportError
from outrider.export import gguf_model, manifest, released
from outrider.export.gguf_drafters import KIND, MARKOV
from outrider.export.gguf_read import SHAPES
from outrider.export.layout import Config
from outrider.targets.hf.transformers import TransformersTarget

PLAIN = {
    "attention.sliding_window": 0, "embedding_scale": 0.0, "attention.scale": 0.0, "attention.value_scale": 0.0,
    "logit_scale": 0.0, "final_logit_softcapping": 0.0, "hidden_act": "silu", "attention.causal": False,
    "norm_before_fc": False,
}  # fmt: skip
"""Values that these keys must have, where a file has them."""
BLOCK_KINDS = ("dflash", "dspark")
BLOCK_SIZE = 16
"""Slots of a block whose file does not say."""


def kind_of(config: Config, names: Collection[str]) -> str | None:
    """Our kind for the keys of a file.  Raises ExportError for a drafter that is not known here."""
    architecture = config.get("general.architecture")
    if architecture == "eagle3":
        return "eagle3"
    if architecture in gguf_model.FAMILIES:
        return "small_model"
    if architecture == "glm4moe":
        return "mtp"
    if architecture != "dflash":
        return None
    if "selector_hidden.weight" in names or config.get("dflash.hyper_connection.count"):
        named = "a DFlash 2" if "selector_hidden.weight" in names else "a DSpark of DeepSeek-V4's layers"
        raise ExportError(f"it is {named}, which Outrider has no drafter for; use a DFlash or DSpark of plain layers")
    own = config.get(KIND)
    return own if own in BLOCK_KINDS else "dspark" if MARKOV[0] in names else "dflash"


def small_model(config: Config, target: TransformersTarget) -> dict[str, Any]:
    _check_vocabulary(config, target)
    return gguf_model.architecture(config)


def dflash(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return _block(config, target, "dflash")


def dspark(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shapes = config[SHAPES]
    return _block(config, target, "dspark") | {
        "rank": shapes[MARKOV[0]][-1], "markov": "vanilla", "confidence": "conf_proj.weight" in shapes,
    }  # fmt: skip


def _block(config: Config, target: TransformersTarget, kind: str) -> dict[str, Any]:
    check(config, target)
    if "d2t" in config[SHAPES]:
        raise ExportError("it has d2t, but Outrider drafts blocks from the whole vocabulary; use a draft without")
    return {
        **_layer(config), "layers": config["dflash.block_count"],
        "anchor_predicts": manifest.anchor_predicts(kind, "gguf", config),
        "block": manifest.length(kind, "gguf", {}, {"dflash.block_size": BLOCK_SIZE, **config}),
        "taps": released.taps(config, "gguf", kind), "init_from_layers": None,
        "mask_token": released.mask(config, "tokenizer.ggml.mask_token_id", target),
    }  # fmt: skip


def eagle3(config: Config, target: TransformersTarget) -> dict[str, Any]:
    check(config, target)
    if config["eagle3.block_count"] != 1:
        raise ExportError(f"eagle3.block_count is {config['eagle3.block_count']}; Outrider's EAGLE-3 has one layer")
    reduced = config[SHAPES].get("d2t")
    return {
        **_layer(config), "taps": released.taps(config, "gguf", "eagle3"), "qk_norm": False, "fc_norm": False,
        "vocabulary": None if reduced is None else reduced[0], "norm_output": False,
        "norm_before_residual": bool(config.get("eagle3.norm_before_residual")),
    }  # fmt: skip


def _layer(config: Config) -> dict[str, Any]:
    """The settings of a file's decoder layers."""
    sizes = gguf_model.sizes_of(config)
    return {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
        "intermediate": sizes.intermediate, "rms_norm_eps": sizes.rms_norm_eps, "rope_theta": sizes.rope_theta,
        "rope_scaling": sizes.rope_scaling, "partial_rotary_factor": sizes.partial_rotary_factor,
    }  # fmt: skip


def check(config: Config, target: TransformersTarget) -> None:
    """Raises ExportError for a file that was made for another target, or computes what our drafters don't."""
    name, spec = config["general.architecture"], target.spec
    for key in ("embedding_length", "target_hidden_size"):
        if (found := config.get(f"{name}.{key}")) not in (None, spec.hidden):
            raise ExportError(f"{key} is {found}, {spec.name} has {spec.hidden}; load the target it was trained for")
    _check_vocabulary(config, target)
    for key, value in PLAIN.items():
        if (found := config.get(f"{name}.{key}", value)) != value:
            raise ExportError(f"{key} is {found!r}; Outrider's drafters need {value!r}; use a draft that has it")
    if any((config.get(f"{name}.rope.dimension_sections") or [0])[1:]):
        raise ExportError("rope.dimension_sections has several parts; Outrider's drafters rotate by one position")


def _check_vocabulary(config: Config, target: TransformersTarget) -> None:
    tokens = config.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens) != target.spec.vocabulary:
        found = "no tokens" if tokens is None else f"{len(tokens)} tokens"
        raise ExportError(
            f"the file has {found}, {target.spec.name} has {target.spec.vocabulary}; load the target it was trained for"
        )
