"""SGLang and SpecForge: eagle3, dflash, dspark, domino, in the folders that `sglang.launch_server` takes as a draft model.

EAGLE-3's layer is called `midlayer` there and its taps stand in `eagle_config`; block drafters have theirs in `dflash_config`,
where `projector_type` tells the methods apart.  Layers are counted from 0, as here: vLLM reads the same key one higher.
Embedding and head are taken from the target, but for EAGLE-3's head.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.errors import ExportError
from outrider.export import released
from outrider.export.layout import Config, Format, Layout, Source
from outrider.targets.transformers import TransformersTarget

ARCHITECTURES = {"dflash": "DFlashDraftModel", "domino": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}


def eagle3(source: Source) -> dict[str, Any]:
    settings, spec = source.settings, source.target.spec
    return {
        **released.written(settings, 1, spec, "llama"),
        "architectures": ["LlamaForCausalLMEagle3"],
        "dtype": spec.dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": settings.vocabulary or spec.vocabulary,
        "target_hidden_size": spec.hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(source.model.taps), "use_aux_hidden_state": True},
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
    }


def block(source: Source) -> dict[str, Any]:
    """What every block drafter's config says."""
    settings, backbone, spec = source.settings, source.backbone, source.target.spec
    return {
        **released.written(settings, settings.layers, spec, "qwen3"),
        "architectures": [ARCHITECTURES[settings.kind]],
        "dtype": spec.dtype,
        "tie_word_embeddings": False,
        "block_size": backbone.width,
        "num_target_layers": spec.layers,
        "dflash_config": {"mask_token_id": backbone.mask_token, "target_layer_ids": list(source.model.taps)},
    }


def domino(source: Source) -> dict[str, Any]:
    settings, config = source.settings, block(source)
    config["dflash_config"] |= {
        "projector_type": "domino",
        "emb_dim": settings.rank,
        "gru_hidden_dim": settings.gru,
        "pure_draft_prefix_len": settings.pure_prefix,
        "shift_label": settings.anchor_predicts,
    }
    return config


def dspark(source: Source) -> dict[str, Any]:
    config, heads = block(source), released.markov_written(source.settings)
    config["dflash_config"] |= {"projector_type": "dspark", **heads}
    # SGLang reads the heads' keys at the top, SpecForge in dflash_config
    return config | heads | {"target_layer_ids": list(source.model.taps), "mask_token_id": source.backbone.mask_token}


def read_eagle3(config: Config, target: TransformersTarget) -> dict[str, Any]:
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    size = config.get("draft_vocab_size") or target.spec.vocabulary
    return {
        **released.read(config, target.spec),
        "taps": released.taps(ids, "eagle_config.eagle_aux_hidden_state_layer_ids"),
        "vocabulary": None if size == target.spec.vocabulary else size,
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "qk_norm": False,
    }


def read_dflash(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return _read_block(config, target, anchor_predicts=False)


def read_domino(config: Config, target: TransformersTarget) -> dict[str, Any]:
    own = config["dflash_config"]
    sizes = {"rank": own["emb_dim"], "gru": own["gru_hidden_dim"], "pure_prefix": own["pure_draft_prefix_len"]}
    return _read_block(config, target, bool(own.get("shift_label"))) | sizes


def read_dspark(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return _read_block(config, target, anchor_predicts=True) | released.markov({**config["dflash_config"], **config})


def _read_block(config: Config, target: TransformersTarget, anchor_predicts: bool) -> dict[str, Any]:
    own = config["dflash_config"]
    if own.get("causal") or config.get("is_causal"):
        raise ExportError("causal is true: the slots of its blocks don't see those behind them, and here they do")
    if own.get("use_swa"):
        raise ExportError("use_swa is true: its layers see a window, and a draft here sees all")
    return {
        **released.read(config, target.spec),
        "layers": config["num_hidden_layers"],
        "block": config["block_size"] - (not anchor_predicts),
        "anchor_predicts": anchor_predicts,
        "taps": released.taps(own.get("target_layer_ids"), "dflash_config.target_layer_ids"),
        "mask_token": released.mask(own.get("mask_token_id"), "dflash_config.mask_token_id", target),
        "copies": None,
    }


def whole_heads(source: Source) -> str | None:
    """SGLang 0.5.23 takes the share of a head that turns from a place where transformers leaves none."""
    if source.settings.partial_rotary_factor != 1:
        return "it turns whole heads of a draft; train with partial_rotary_factor: 1"
    return None


def not_eagle3(source: Source) -> str | None:
    settings = source.settings
    if settings.qk_norm or settings.norm_before_residual:
        return "its EAGLE-3 is Llama's, without query norms and with the feature itself as residual; train with qk_norm: no"
    return whole_heads(source) or released.not_eagle3(source)


def not_dflash(source: Source) -> str | None:
    return whole_heads(source) or released.not_dflash(source)


def not_domino(source: Source) -> str | None:
    if source.settings.pure_prefix != 1:
        return "it corrects a block from its second slot on; train with pure_prefix: 1"
    return whole_heads(source) or released.learnt_mask(source)


def not_dspark(source: Source) -> str | None:
    settings = source.settings
    if not settings.anchor_predicts:
        return "its DSpark drafts the first token in the anchor's slot; train with anchor_predicts: yes"
    return whole_heads(source) or released.learnt_mask(source)


def _kind(config: Config, names: Collection[str]) -> str | None:
    architectures, own = config.get("architectures") or [""], config.get("dflash_config")
    if architectures[0] == "LlamaForCausalLMEagle3" and isinstance(config.get("eagle_config"), dict):
        return "eagle3"
    if not isinstance(own, dict):
        return None
    kind = own.get("projector_type", "dflash")
    return kind if kind in LAYOUTS else None


LAYOUTS = {
    "eagle3": Layout(released.MIDLAYER, eagle3, read_eagle3, copies=released.head_copy, refuses=not_eagle3),
    "dflash": Layout(released.DFLASH, block, read_dflash, refuses=not_dflash),
    "dspark": Layout(released.DSPARK, dspark, read_dspark, refuses=not_dspark),
    "domino": Layout(released.DOMINO, domino, read_domino, refuses=not_domino),
}
FORMAT = Format(LAYOUTS, _kind)
