"""SGLang and SpecForge: eagle3, dflash, dspark, domino, in the folders that `sglang.launch_server` takes as a draft
model.

EAGLE-3's layer is called `midlayer` there and its taps are in `eagle_config`; block drafters have theirs in
`dflash_config`, where `projector_type` names the method.  Layers are counted from 0, as here: vLLM reads the same key
one higher. Embedding and head are taken from the target, but for EAGLE-3's head.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.errors import ExportError
from outrider.export import released
from outrider.export.layout import Config, Format, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget

ARCHITECTURES = {"dflash": "DFlashDraftModel", "domino": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}


def eagle3(source: Source) -> dict[str, Any]:
    settings, spec = source.settings, source.target.spec
    return released.whole(source, "LlamaForCausalLMEagle3", 1, "llama") | {
        "draft_vocab_size": settings.vocabulary or spec.vocabulary, "target_hidden_size": spec.hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(source.model.taps), "use_aux_hidden_state": True},
        "fc_norm": settings.fc_norm, "norm_output": settings.norm_output,
    }  # fmt: skip


def block(source: Source) -> dict[str, Any]:
    """The config that every block drafter has."""
    settings = source.settings
    backbone: Any = source.model.backbone
    return released.whole(source, ARCHITECTURES[settings.kind], settings.layers, "qwen3") | {
        "block_size": backbone.width,
        "num_target_layers": source.target.spec.layers,
        "dflash_config": {"mask_token_id": source.mask_token, "target_layer_ids": list(source.model.taps)},
    }


def domino(source: Source) -> dict[str, Any]:
    settings, config = source.settings, block(source)
    config["dflash_config"] |= {
        "projector_type": "domino", "emb_dim": settings.rank, "gru_hidden_dim": settings.gru,
        "pure_draft_prefix_len": settings.pure_prefix, "shift_label": settings.anchor_predicts,
    }  # fmt: skip
    return config


def dspark(source: Source) -> dict[str, Any]:
    config, heads = block(source), released.markov_written(source.settings)
    config["dflash_config"] |= {"projector_type": "dspark", **heads}
    # SGLang reads the heads' keys at the top, SpecForge in dflash_config
    return config | heads | {"target_layer_ids": list(source.model.taps), "mask_token_id": source.mask_token}


def read_eagle3(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return {**released.head(config, target), "taps": released.taps(config, "sglang", "eagle3"), "qk_norm": False}


def read_dflash(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return _read_block(config, target, "dflash")


def read_domino(config: Config, target: TransformersTarget) -> dict[str, Any]:
    own = config["dflash_config"]
    sizes = {"rank": own["emb_dim"], "gru": own["gru_hidden_dim"], "pure_prefix": own["pure_draft_prefix_len"]}
    return _read_block(config, target, "domino") | sizes


def read_dspark(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return _read_block(config, target, "dspark") | released.markov({**config["dflash_config"], **config})


def _read_block(config: Config, target: TransformersTarget, kind: str) -> dict[str, Any]:
    own = config["dflash_config"]
    if own.get("causal") or config.get("is_causal"):
        raise ExportError(
            "causal is true, but in Outrider's blocks each slot also attends to later ones; "
            "use a draft with causal: false"
        )
    if own.get("use_swa"):
        raise ExportError(
            "use_swa is true (sliding-window attention), but Outrider's drafts have full attention only; use a "
            "draft that has it"
        )
    return released.block(config, "sglang", kind, target)


# SGLang 0.5.23 reads the rotated share of a head from a key that transformers does not write
WHOLE_HEADS = only("partial_rotary_factor", 1, "it rotates whole heads of a draft; train with partial_rotary_factor: 1")
LLAMA = "its EAGLE-3 is Llama's, without query norms and with the feature itself as residual; train with qk_norm: no"
EAGLE3_REFUSES = (
    only("qk_norm", False, LLAMA), only("norm_before_residual", False, LLAMA), WHOLE_HEADS, *released.EAGLE3_REFUSES,
)  # fmt: skip
DFLASH_REFUSES = (WHOLE_HEADS, *released.DFLASH_REFUSES)
IN_ANCHOR = "its DSpark drafts the first token in the anchor's slot; train with anchor_predicts: yes"
DSPARK_REFUSES = (only("anchor_predicts", True, IN_ANCHOR), WHOLE_HEADS, released.learnt_mask)
SECOND_SLOT = "it corrects a block from its second slot on; train with pure_prefix: 1"
DOMINO_REFUSES = (only("pure_prefix", 1, SECOND_SLOT), WHOLE_HEADS, released.learnt_mask)


def _kind(config: Config, names: Collection[str]) -> str | None:
    architectures, own = config.get("architectures") or [""], config.get("dflash_config")
    if architectures[0] == "LlamaForCausalLMEagle3" and isinstance(config.get("eagle_config"), dict):
        return "eagle3"
    if not isinstance(own, dict):
        return None
    kind = own.get("projector_type", "dflash")
    return kind if kind in LAYOUTS else None


LAYOUTS = {
    "eagle3": Layout(released.MIDLAYER, eagle3, read_eagle3, released.head_copy, refuses=EAGLE3_REFUSES),
    "dflash": Layout(released.DFLASH, block, read_dflash, refuses=DFLASH_REFUSES),
    "dspark": Layout(released.DSPARK, dspark, read_dspark, refuses=DSPARK_REFUSES),
    "domino": Layout(released.DOMINO, domino, read_domino, refuses=DOMINO_REFUSES),
}
FORMAT = Format(LAYOUTS, _kind)
