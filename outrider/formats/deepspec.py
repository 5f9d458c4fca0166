"""DeepSpec, the format of DeepSeek's published drafts `deepseek-ai/{dspark,dflash,eagle3}_*`.

config.json is the target's own, overridden with the draft's sizes.  DFlash is a DSpark without its heads: rank 0 and no
confidence.  Weights have no prefix; embedding and head are stored although they are frozen copies of the target's.
Layers are counted from 0, as in Outrider.  Its EAGLE-3 norms queries and keys and drafts all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from outrider.errors import ExportError
from outrider.formats import released
from outrider.formats.layout import Config, Source, only

NAME = "deepspec"
BLOCK = "Qwen3DSparkModel"
"""The architecture of its block drafters."""
REFUSES = (
    only(
        "anchor_predicts",
        True,
        "its blocks draft the first token in the anchor's slot; train with anchor_predicts: yes",
    ),
    released.learnt_mask,
)
"""Settings that its block drafters can't express."""


def is_block(markov: bool) -> Callable[[Config, Collection[str]], bool]:
    """Whether a config.json describes a block drafter with, or without, a Markov head."""

    def fits(config: Config, names: Collection[str]) -> bool:
        name = (config.get("architectures") or [""])[0]
        if name.startswith("Gemma4"):
            raise ExportError(
                f"{name} has Gemma layers, which have more norms and a scale than Outrider's drafts; train a draft "
                "instead"
            )
        return name == BLOCK and "dflash_config" not in config and bool(config.get("markov_rank")) is markov

    return fits


def common(source: Source, architecture: str, layers: int) -> dict[str, Any]:
    """The keys that all configs of this format share."""
    facts = {"num_target_layers": source.target.spec.layers, "target_layer_ids": list(source.model.taps)}
    return released.whole(source, architecture, layers, "qwen3") | facts


def block(source: Source) -> dict[str, Any]:
    """The config of a block drafter without heads."""
    settings = source.settings
    return common(source, BLOCK, settings.layers) | {
        "block_size": settings.block, "mask_token_id": source.mask_token, "num_anchors": settings.anchors,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }  # fmt: skip
