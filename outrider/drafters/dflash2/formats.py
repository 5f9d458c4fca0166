"""DFlash 2 in the formats of others: the folders that its authors release, which vLLM and SGLang read too; speculators;
GGUF.

The released folders have `block_size` within `dflash_config`, and name their layers' window.  There a layer with a
window is causal within its block unless `is_causal` says otherwise, which costs most of what is accepted: a folder that
leaves that open is refused.  Codebooks have no `.weight`.

A selector that does not help is written with a codebook of zeros: then every row's own choice is drafted.
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
"""Their keys and our settings."""
PLAIN = {"output_multiplier": 1.0, "final_logit_softcapping": 0.0, "input_embedding_scale": 1.0}
"""Values that these keys must have, where a config has them."""
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
NAMES = [*released.BLOCK, *((name, name) for name in (f"candidate_selector.{part}" for part in SELECTOR))]
CONVOLUTIONS = {
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}  # fmt: skip
GGUF = [
    *((f"backbone.layers.*.{ours}", f"blk.*.{theirs}") for ours, theirs in CONVOLUTIONS.items()),
    *drafters.BLOCK,
    *(
        (f"candidate_selector.{ours}", f"selector_{theirs}.weight")
        for ours, theirs in zip(SELECTOR, ("predecessor", "successor", "hidden"), strict=True)
    ),
]


# ── written ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sizes(source: Source) -> dict[str, int]:
    return {theirs: getattr(source.settings, ours) for theirs, ours in SIZES.items()}


def windowed(source: Source) -> dict[str, Any]:
    """The keys of a layer config that say how far its layers see."""
    window, layers = source.settings.window, source.settings.layers
    if window is None:
        return {"use_sliding_window": False}
    return {"layer_types": ["sliding_attention"] * layers, "sliding_window": window, "use_sliding_window": True}


def folder(source: Source) -> dict[str, Any]:
    """config.json as its authors have it."""
    backbone: Any = source.model.backbone
    own = {
        "block_size": backbone.width, "mask_token_id": source.mask_token, "target_layer_ids": list(source.model.taps),
        **sizes(source),
    }  # fmt: skip
    return released.whole(source, ARCHITECTURE, source.settings.layers, "qwen3") | windowed(source) | {
        "is_causal": False, "num_target_layers": source.target.spec.layers, "dflash_config": own,
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
    own = config["dflash_config"]
    window = _window(config)
    causal = config.get("is_causal", own.get("causal"))
    if causal or (causal is None and window is not None):
        said = "is true" if causal else "is missing, so that layers with a window are causal within a block"
        raise ExportError(f"is_causal {said}; in Outrider's blocks each slot also attends to later ones: use a draft "
                          "with is_causal: false")  # fmt: skip
    _check_plain({**config, **own})
    block = released.block(_without_window(config) | {"block_size": own["block_size"]}, "zlab", METHOD, target)
    return block | _sizes(own) | {"window": window}


def read_speculators(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    window = _window(shape)
    if window is not None and not config.get("sliding_window_non_causal", True):
        raise ExportError(
            "sliding_window_non_causal is false, but in Outrider's blocks each slot also attends to later ones; use a "
            "draft with true"
        )
    if config.get("sample_from_anchor"):
        raise ExportError("sample_from_anchor is true, which a DFlash 2 has not; use a draft with false")
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
    own = {key.removeprefix("dflash."): value for key, value in config.items()}
    if lost := [key for key in SIZES if key not in own]:
        raise ExportError(f"dflash.{lost[0]} is missing, and the file has a selector; copy the file again")
    return drafters.read_block(plain, target, METHOD) | _sizes(own) | {"window": window}


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: config[theirs] for theirs, ours in SIZES.items()}


def _window(config: Config) -> int | None:
    """How far back the layers of a config see; None for all of the text.  Raises ExportError where they differ."""
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
        if (found := config.get(key)) not in (None, value):
            raise ExportError(f"{key} is {found!r}; Outrider's drafters need {value!r}; use a draft that has it")


# ── refused, or left out with a note ─────────────────────────────────────────────────────────────────────────────────


def lattice(source: Source) -> str | None:
    hidden, k = source.target.spec.hidden, source.settings.candidates
    if hidden >= k * (k + 1):
        return None
    fits = max(k for k in range(hidden + 1) if k * (k + 1) <= hidden)
    return (
        f"llama.cpp keeps the scores of {k} candidates in a row of the hidden size, {hidden}, which has room for "
        f"{fits} at most; train with candidates: {fits}"
    )


def tree(source: Source) -> str | None:
    nodes = source.settings.nodes
    return f"its tree of {nodes} nodes is left out: engines draft one path" if nodes else None


def is_off(source: Source) -> str | None:
    selector: Any = source.model.candidate_selector
    if bool(selector.successor_codebook.any()):
        return None
    return "its selector is off, a codebook of zeros: on held-out answers its walk was no longer than without"


IN_ANCHOR = "a DFlash 2 drafts nothing in the anchor's slot; train with anchor_predicts: no"
REFUSES: tuple[Answer, ...] = (released.learnt_mask, only("anchor_predicts", False, IN_ANCHOR))
NOTES: tuple[Answer, ...] = (tree, is_off)


def is_folder(config: Config, names: Collection[str]) -> bool:
    """Whether a config.json with a `dflash_config` has a selector."""
    own = config.get("dflash_config")
    return isinstance(own, dict) and "selector_rank" in own


def is_file(config: Config, names: Collection[str]) -> bool:
    """Whether a GGUF file has one."""
    return config.get("general.architecture") == "dflash" and drafters.SELECTOR in names


FORMATS = {
    "sglang": Layout(
        NAMES, folder, read_folder, refuses=(sglang.WHOLE_HEADS, *REFUSES), notes=NOTES, is_of=is_folder
    ),
    # the folder that its authors release; which of the two it is makes no difference
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
