"""DSpark in the formats of other programs: speculators, SGLang, DeepSpec, GGUF."""

from __future__ import annotations

from typing import Any

from outrider.drafters.dspark import METHOD
from outrider.errors import ExportError
from outrider.formats import deepspec, released, sglang, speculators
from outrider.formats.gguf import drafters, layouts, refusals
from outrider.formats.gguf.reading import SHAPES
from outrider.formats.layout import Config, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget

LIBRARY = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
"""speculators' defaults."""
NAMES = [*released.BLOCK, ("markov_head.*", "markov_head.*"), ("confidence_head.proj.*", "confidence_head.proj.*")]
VANILLA = only(
    "markov", "vanilla", "vLLM 0.32 has no parameters for a {} head and does not load it; train with markov: vanilla"
)
"""A note: vLLM's DSpark has parameters for a vanilla head only."""
IN_ANCHOR = "its DSpark drafts the first token in the anchor's slot; train with anchor_predicts: yes"


# ── keys of its heads, the same in every format ──────────────────────────────────────────────────────────────────────


def heads(settings: Any) -> dict[str, Any]:
    return {
        "markov_rank": settings.rank, "markov_head_type": settings.markov,
        "enable_confidence_head": settings.confidence,
        "confidence_head_with_markov": True,
    }  # fmt: skip


def of_heads(config: Config) -> dict[str, Any]:
    if not config.get("markov_rank"):
        raise ExportError("markov_rank is 0, so it has no head to correct the block; import it with --kind dflash")
    confidence = bool(config.get("enable_confidence_head"))
    if confidence and not config.get("confidence_head_with_markov", True):
        raise ExportError(
            "confidence_head_with_markov is false, but Outrider's confidence head reads the previous token too; use "
            "a draft with true"
        )
    return {
        "rank": config["markov_rank"],
        "markov": config.get("markov_head_type", "vanilla"),
        "confidence": confidence,
    }


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_speculators(source: Source) -> dict[str, Any]:
    return speculators.block(source, "dspark", "DSparkSpeculator") | heads(source.settings)


def of_speculators(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return speculators.read_block(config, target, METHOD) | of_heads({**LIBRARY, **config})


def to_sglang(source: Source) -> dict[str, Any]:
    config, head_config = sglang.block(source, "Qwen3DSparkModel"), heads(source.settings)
    config["dflash_config"] |= {"projector_type": "dspark", **head_config}
    # SGLang reads the heads' keys at the top, SpecForge in dflash_config
    return config | head_config | {"target_layer_ids": list(source.model.taps), "mask_token_id": source.mask_token}


def of_sglang(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return sglang.read_block(config, target, METHOD) | of_heads({**config["dflash_config"], **config})


def to_deepspec(source: Source) -> dict[str, Any]:
    return deepspec.block(source) | heads(source.settings)


def of_deepspec(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return released.block(config, "deepspec", METHOD, target) | of_heads(config)


def to_gguf(source: Source) -> dict[str, Any]:
    return drafters.block(source, confidence=source.settings.confidence)


def of_gguf(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shapes = config[SHAPES]
    return drafters.read_block(config, target, METHOD) | {
        "rank": shapes[drafters.MARKOV[0]][-1], "markov": "vanilla", "confidence": "conf_proj.weight" in shapes,
    }  # fmt: skip


def calibration(source: Source) -> str | None:
    head: Any = source.model.confidence_head
    if head is None or (not head.shifts.any() and bool((head.temperatures == 1).all())):
        return None
    return "the calibration of its confidences is left out: --spec-draft-p-min uses them as they were trained"


GGUF = [
    *drafters.BLOCK, *((f"markov_head.{name}", name) for name in drafters.MARKOV),
    ("confidence_head.proj.*", "conf_proj.*"),
]  # fmt: skip
GGUF_REFUSES = (
    *refusals.FIRST, released.learnt_mask,
    only("markov", "vanilla", "llama.cpp has no {} Markov head; train with markov: vanilla"),
)  # fmt: skip
FORMATS = {
    "speculators": Layout(
        NAMES, to_speculators, of_speculators, refuses=(released.learnt_mask,), notes=(VANILLA,),
        shift=speculators.SHIFT, is_of=speculators.is_of("dspark"),
    ),
    "sglang": Layout(
        NAMES, to_sglang, of_sglang, is_of=sglang.is_of("dspark"),
        refuses=(only("anchor_predicts", True, IN_ANCHOR), sglang.WHOLE_HEADS, released.learnt_mask),
    ),
    "deepspec": Layout(
        NAMES, to_deepspec, of_deepspec, released.embedding_and_head, refuses=deepspec.REFUSES, notes=(VANILLA,),
        is_of=deepspec.is_block(markov=True),
    ),
    "gguf": layouts.layout(
        GGUF, to_gguf, of_gguf, drafters.tensors, drafters.read, is_of=drafters.is_block("dspark", markov=True),
        refuses=GGUF_REFUSES, notes=(refusals.siblings, calibration), shift=drafters.SHIFT,
    ),
}  # fmt: skip
