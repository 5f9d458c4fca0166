"""DFlash in the formats of other programs: speculators, SGLang, z-lab, DeepSpec, TensorRT-LLM, GGUF.

vLLM and SGLang read z-lab's folders, which have the same names.  There, masks predict the token of their own position,
so a block of n slots drafts n - 1 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.drafters.dflash import METHOD
from outrider.formats import deepspec, released, sglang, speculators, trtllm
from outrider.formats.gguf import drafters, layouts, refusals
from outrider.formats.layout import Config, Layout, Source
from outrider.targets.hf.transformers import TransformersTarget

REFUSES = released.BLOCK_REFUSES


def to_speculators(source: Source) -> dict[str, Any]:
    return speculators.block(source, "dflash", "DFlashSpeculator")


def of_speculators(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return speculators.read_block(config, target, METHOD)


def of_sglang(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return sglang.read_block(config, target, METHOD)


def of_deepspec(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return released.block(config, "deepspec", METHOD, target)


def of_gguf(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return drafters.read_block(config, target, METHOD)


def gguf_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a file, excluding a Markov head of zeros; see `zero_head`."""
    weights = drafters.read(path)
    has_head = any(weights[name].any() for name in drafters.MARKOV if name in weights)
    return weights if has_head else {name: weight for name, weight in weights.items() if name not in drafters.MARKOV}


def trtllm_settings(source: Source) -> dict[str, Any]:
    return {
        "decoding_type": "DFlash", "max_draft_len": source.settings.block, "mask_token_id": source.mask_token,
        "target_layer_ids": list(source.model.taps),
    }  # fmt: skip


def zero_head(source: Source) -> str | None:
    """A note on drafts that predict in the anchor's slot."""
    if not source.settings.anchor_predicts:
        return None
    return "llama.cpp runs it as a draft-dspark with a Markov head of zeros: its draft-dflash ignores the anchor's slot"


FORMATS = {
    "speculators": Layout(
        released.BLOCK, to_speculators, of_speculators, refuses=REFUSES, shift=speculators.SHIFT,
        is_of=speculators.is_of("dflash"),
    ),
    "sglang": Layout(
        released.BLOCK, sglang.block, of_sglang, refuses=(sglang.WHOLE_HEADS, *REFUSES), is_of=sglang.is_of("dflash")
    ),
    # SpecForge writes the same folder, and sglang's layout reads both
    "zlab": Layout(released.BLOCK, None, of_sglang),
    "deepspec": Layout(
        released.BLOCK, deepspec.block, of_deepspec, released.embedding_and_head, refuses=deepspec.REFUSES,
        is_of=deepspec.is_block(markov=False),
    ),
    "trtllm": Layout(
        released.BLOCK, sglang.block, files=trtllm.files(trtllm_settings), refuses=(sglang.WHOLE_HEADS, *REFUSES)
    ),
    "gguf": layouts.layout(
        drafters.BLOCK, drafters.block, of_gguf, drafters.tensors, gguf_weights,
        is_of=drafters.is_block("dflash", markov=False), refuses=(*refusals.FIRST, released.learnt_mask),
        notes=(refusals.siblings, zero_head), shift=drafters.SHIFT,
    ),
}  # fmt: skip
