"""DeepSpec, DeepSeek's published drafts: dspark, dflash, eagle3, as `deepseek-ai/{dspark,dflash,eagle3}_*` have them.

config.json is the target's own with the draft's sizes laid over it.  DFlash is a DSpark without its heads: rank 0 and
no confidence.  Weights have no prefix; embedding and head are stored although they are frozen copies of the target's.
 Layers are counted from 0, as here.  EAGLE-3 there norms queries and keys and drafts all tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.errors import ExportError
from outrider.export import released
from outrider.export.layout import Config, Format, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget

DSPARK, EAGLE3 = ("Qwen3DSparkModel",), ("Qwen3Eagle3Model", "Eagle3DraftModel")
PLAIN = "its EAGLE-3 norms queries and keys, drafts all tokens and knows no options; train with qk_norm: yes alone"
EAGLE3_REFUSES = (
    only("qk_norm", True, PLAIN), only("vocabulary", None, PLAIN), *(only(flag, False,
    PLAIN) for flag in released.FLAGS),
    *released.EAGLE3_REFUSES,
)  # fmt: skip
BLOCK_REFUSES = (
    only(
        "anchor_predicts",
        True,
        "its blocks draft the first token in the anchor's slot; train with anchor_predicts: yes",
    ),
    released.learnt_mask,
)


def common(source: Source, architecture: str, layers: int) -> dict[str, Any]:
    facts = {"num_target_layers": source.target.spec.layers, "target_layer_ids": list(source.model.taps)}
    return released.whole(source, architecture, layers, "qwen3") | facts


def eagle3(source: Source) -> dict[str, Any]:
    settings = source.settings
    return common(source, EAGLE3[0], 1) | {
        "target_model_name_or_path": source.target.spec.name, "ttt_length": settings.ttt,
        "step_loss_decay": settings.decay,
        "draft_num_hidden_layers": 1,
    }  # fmt: skip


def dflash(source: Source) -> dict[str, Any]:
    settings = source.settings
    return common(source, DSPARK[0], settings.layers) | {
        "block_size": settings.block, "mask_token_id": source.mask_token, "num_anchors": settings.anchors,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }  # fmt: skip


def dspark(source: Source) -> dict[str, Any]:
    return dflash(source) | released.markov_written(source.settings)


def read_eagle3(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return {
        **released.read(config, target), "taps": released.taps(config, "deepspec", "eagle3"), "vocabulary": None,
        "qk_norm": True, "ttt": config.get("ttt_length", 7), "decay": config.get("step_loss_decay", 0.8),
    }  # fmt: skip


def read_dflash(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return released.block(config, "deepspec", "dflash", target)


def read_dspark(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return read_dflash(config, target) | released.markov(config)


def _kind(config: Config, names: Collection[str]) -> str | None:
    name = (config.get("architectures") or [""])[0]
    if name in EAGLE3:
        return "eagle3"
    if name.startswith("Gemma4"):
        raise ExportError(
            f"{name} has Gemma layers, which have more norms and a scale than Outrider's drafts; train a draft instead"
        )
    if name not in DSPARK or "dflash_config" in config:
        return None
    return "dspark" if config.get("markov_rank") else "dflash"


LAYOUTS = {
    "eagle3": Layout(released.EAGLE3, eagle3, read_eagle3, released.embedding_and_head, refuses=EAGLE3_REFUSES),
    "dflash": Layout(released.DFLASH, dflash, read_dflash, released.embedding_and_head, refuses=BLOCK_REFUSES),
    "dspark": Layout(released.DSPARK, dspark, read_dspark, released.embedding_and_head, refuses=BLOCK_REFUSES,
                     notes=(released.VANILLA,)),
}  # fmt: skip
FORMAT = Format(LAYOUTS, _kind)
