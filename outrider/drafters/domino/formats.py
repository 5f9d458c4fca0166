"""Domino in SGLang's format."""

from __future__ import annotations

from typing import Any

from outrider.drafters.domino import METHOD
from outrider.formats import released, sglang
from outrider.formats.layout import Config, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget


def written(source: Source) -> dict[str, Any]:
    settings, config = source.settings, sglang.block(source)
    config["dflash_config"] |= {
        "projector_type": "domino", "emb_dim": settings.rank, "gru_hidden_dim": settings.gru,
        "pure_draft_prefix_len": settings.pure_prefix, "shift_label": settings.anchor_predicts,
    }  # fmt: skip
    return config


def read(config: Config, target: TransformersTarget) -> dict[str, Any]:
    dflash_config = config["dflash_config"]
    return sglang.read_block(config, target, METHOD) | {
        "rank": dflash_config["emb_dim"], "gru": dflash_config["gru_hidden_dim"],
        "pure_prefix": dflash_config["pure_draft_prefix_len"],
    }  # fmt: skip


NAMES = [*released.BLOCK, ("prefix_gru.*", "prefix_gru.*"), ("embed_proj.*", "embed_proj.*")]
SECOND_SLOT = "it corrects a block from its second slot on; train with pure_prefix: 1"
FORMATS = {
    "sglang": Layout(
        NAMES, written, read, is_of=sglang.is_of("domino"),
        refuses=(only("pure_prefix", 1, SECOND_SLOT), sglang.WHOLE_HEADS, released.learnt_mask),
    ),
}  # fmt: skip
