"""DFlash 2 in the formats of other programs: its authors' folders, which vLLM and SGLang also read; speculators; GGUF.

The authors' folders have `block_size` and the window of the layers within `dflash_config`.  There, a layer with a
window is causal within its block unless `is_causal` is false, which would lose most of the acceptance; so a folder
without `is_causal` is refused.  Codebooks have no `.weight`.

A selector that does not help is written with a codebook of zeros, so that every row's own choice is drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from outrider.drafters.dflash2 import METHOD
from outrider.errors import ExportError
from outrider.formats import released, sglang, speculators
from outrider.formats.gguf import drafters, layouts, refusals
from outrider.formats.layout import Answer, Config, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget

KIND, ARCHITECTURE = "dflash2", "DFlash2DraftModel"
SIZES = {
    "conv_kernel_size": "conv_taps", "conv_group_size": "conv_group", "selector_rank": "rank",
    "selector_top_k": "candidates",
}  # fmt: skip
"""Keys of the formats to Outrider's settings."""
PLAIN = {"output_multiplier": 1.0, "final_logit_softcapping": 0.0, "input_embedding_scale": 1.0}
"""Values that these keys must have, where a config has them."""
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
NAMES = [*released.BLOCK, *((name, name) for name in (f"candidate_selector.{part}" for part in SELECTOR))]
CONVOLUTIONS = {
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}  # fmt: skip
GGUF = [
    *((f"backbone.layers.*.{name}", f"blk.*.{gguf_name}") for name, gguf_name in CONVOLUTIONS.items()),
    *drafters.BLOCK,
    *(
        (f"candidate_selector.{name}", f"selector_{gguf_name}.weight")
        for name, gguf_name in zip(SELECTOR, ("predecessor", "successor", "hidden"), strict=True)
    ),
]


# ── written ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sizes(source: Source) -> dict[str, int]:
    return {key: getattr(source.settings, setting) for key, setting in SIZES.items()}


def windowed(source: Source) -> dict[str, Any]:
    """The keys for the attention window in a layer config."""
    window, layers = source.settings.window, source.settings.layers
    if window is None:
        return {"use_sliding_window": False}
    return {"layer_types": ["sliding_attention"] * layers, "sliding_window": window, "use_sliding_window": True}


def folder(source: Source) -> dict[str, Any]:
    """config.json in its authors' format."""
    backbone: Any = source.model.backbone
    dflash_config = {
        "block_size": backbone.width, "mask_token_id": source.mask_token, "target_layer_ids": list(source.model.taps),
        **sizes(source),
    }  # fmt: skip
    return released.whole(source, ARCHITECTURE, source.settings.layers, "qwen3") | windowed(source) | {
        "is_causal": False, "num_target_layers": source.target.spec.layers, "dflash_config": dflash_config,
    }  # fmt: skip


def to_speculators(source: Source) -> dict[str, Any]:
    config = speculators.block(source, KIND, ARCHITECTURE)
    return config | sizes(source) | {
        "transformer_layer_config": config["transformer_layer_config"] | windowed(source)
    }  # fmt: skip


def to_gguf(source: Source) -> dict[str, Any]:
    settings, keys = source.settings, drafters.block(source)
    keys |= {f"dflash.{key}": value for key, value in sizes(source).items()} | {"dflash.attention.causal": False}
    if settings.window is None:
        return keys
    return keys | {
        "dflash.attention.sliding_window": settings.window,
        "dflash.attention.sliding_window_pattern": [True] * settings.layers,
    }  # fmt: skip


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_folder(config: Config, target: TransformersTarget) -> dict[str, Any]:
    dflash_config = config["dflash_config"]
    window = _window(config)
    causal = config.get("is_causal", dflash_config.get("causal"))
    if causal or (causal is None and window is not None):
        problem = "is true" if causal else "is missing, so that layers with a window are causal within a block"
        raise ExportError(
            f"is_causal {problem}; in Outrider's blocks each slot also attends to later ones: use a draft with "
            "is_causal: false"
        )
    _check_plain({**config, **dflash_config})
    block = released.block(
        _without_window(config) | {"block_size": dflash_config["block_size"]}, "zlab", METHOD, target
    )
    return block | _sizes(dflash_config) | {"window": window}


def read_speculators(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    window = _window(shape)
    if window is not None and not config.get("sliding_window_non_causal", True):
        raise ExportError(
            "sliding_window_non_causal is false, but in Outrider's blocks each slot also attends to later ones; use a "
            "draft with true"
        )
    if config.get("sample_from_anchor"):
        raise ExportError("sample_from_anchor is true, which DFlash 2 does not support; use a draft with false")
    _check_plain(config)
    plain = {**config, "transformer_layer_config": _without_window(shape)}
    return speculators.read_block(plain, target, METHOD) | _sizes(config) | {"window": window}


def read_gguf(config: Config, target: TransformersTarget) -> dict[str, Any]:
    window = config.get("dflash.attention.sliding_window") or None
    pattern = config.get("dflash.attention.sliding_window_pattern") or []
    if window is not None and not all(pattern):
        raise ExportError("sliding_window_pattern has layers without a window; Outrider's drafts have one for all")
    if window is not None and config.get("dflash.attention.causal") is not False:
        raise ExportError("dflash.attention.causal is not false, so that layers with a window are causal in a block")
    plain = {key: value for key, value in config.items() if key != "dflash.attention.sliding_window"}
    keys = {key.removeprefix("dflash."): value for key, value in config.items()}
    if missing := [key for key in SIZES if key not in keys]:
        raise ExportError(f"dflash.{missing[0]} is missing, and the file has a selector; copy the file again")
    return drafters.read_block(plain, target, METHOD) | _sizes(keys) | {"window": window}


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {setting: config[key] for key, setting in SIZES.items()}


def _window(config: Config) -> int | None:
    """The attention window of a config's layers; None for no window.  Raises ExportError if they differ."""
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ExportError(
            f"layer_types {config['layer_types']} mix layers with a window and without; Outrider's drafts have one "
            "window for all layers"
        )
    size = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if size is not None and (type(size) is not int or size < 1):
        raise ExportError(f"sliding_window must be a whole number above 0, got {size!r}; correct config.json")
    return size


def _without_window(config: Config) -> dict[str, Any]:
    return {**config, "sliding_window": None, "layer_types": None}


def _check_plain(config: Config) -> None:
    for key, value in PLAIN.items():
        if (actual := config.get(key)) not in (None, value):
            raise ExportError(f"{key} is {actual!r}; Outrider's drafters need {value!r}; use a draft that has it")


# ── refused, or left out with a note ─────────────────────────────────────────────────────────────────────────────────


def lattice(source: Source) -> str | None:
    hidden, k = source.target.spec.hidden, source.settings.candidates
    if hidden >= k * (k + 1):
        return None
    fits = max(k for k in range(hidden + 1) if k * (k + 1) <= hidden)
    return (
        f"llama.cpp stores the scores of {k} candidates in a row of the hidden size, {hidden}, which fits {fits}; "
        f"train with candidates: {fits}"
    )


def tree(source: Source) -> str | None:
    nodes = source.settings.nodes
    return f"its tree of {nodes} nodes is left out: engines draft one path" if nodes else None


def is_off(source: Source) -> str | None:
    selector: Any = source.model.candidate_selector
    if bool(selector.successor_codebook.any()):
        return None
    return "its selector is off, a codebook of zeros, since it did not help on held-out answers"


IN_ANCHOR = "DFlash 2 drafts nothing in the anchor's slot; train with anchor_predicts: no"
REFUSES: tuple[Answer, ...] = (released.learnt_mask, only("anchor_predicts", False, IN_ANCHOR))
NOTES: tuple[Answer, ...] = (tree, is_off)


def is_folder(config: Config, names: Collection[str]) -> bool:
    """Whether a config.json with a `dflash_config` has a selector."""
    dflash_config = config.get("dflash_config")
    return isinstance(dflash_config, dict) and "selector_rank" in dflash_config


def is_file(config: Config, names: Collection[str]) -> bool:
    """Whether a GGUF file has one."""
    return config.get("general.architecture") == "dflash" and drafters.SELECTOR in names


FORMATS = {
    "sglang": Layout(
        NAMES, folder, read_folder, refuses=(sglang.WHOLE_HEADS, *REFUSES), notes=NOTES, is_of=is_folder
    ),
    # the authors' folder, which is the same
    "zlab": Layout(NAMES, None, read_folder),
    "speculators": Layout(
        NAMES, to_speculators, read_speculators, refuses=REFUSES, notes=NOTES, shift=speculators.SHIFT,
        is_of=speculators.is_of(KIND),
    ),
    "gguf": layouts.layout(
        GGUF, to_gguf, read_gguf, drafters.tensors, drafters.read, is_of=is_file,
        refuses=(*refusals.FIRST, *REFUSES, lattice), notes=NOTES, shift=drafters.SHIFT,
    ),
}  # fmt: skip
