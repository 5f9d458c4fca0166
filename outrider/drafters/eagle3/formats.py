"""EAGLE-3 in the formats of other programs: speculators, SGLang, DeepSpec, TensorRT-LLM, GGUF, and its authors' own.

The authors' config does not name the taps: their code takes the outputs of layers 1, n / 2 - 1 and n - 4 of n, counted
from 0.  A folder that names them at the top level is for vLLM, where layer k is the state after k layers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.drafters.eagle3 import METHOD
from outrider.errors import ExportError
from outrider.formats import deepspec, released, sglang, speculators, trtllm
from outrider.formats.gguf import drafters, layouts, refusals, settings
from outrider.formats.gguf.reading import SHAPES
from outrider.formats.layout import Answer, Config, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget

FLAGS = released.FLAGS
NAMES = [*released.FUSED, ("layers.*", "layers.*")]
MIDLAYER = [*released.FUSED, ("layers.0.*", "midlayer.*")]
REFUSES = (
    only("gated", False, "gated attention has no key there; train with gated: no"),
    only("aggregate", "fc", "learned queries have no key there; train with aggregate: fc"),
)
"""Settings for which no format has a key."""


# ── speculators ──────────────────────────────────────────────────────────────────────────────────────────────────────


def to_speculators(source: Source) -> dict[str, Any]:
    settings = source.settings
    config = speculators.fused(source, "eagle3", "Eagle3Speculator", "qwen3" if settings.qk_norm else "llama", 1)
    return config | {"fc_norm": settings.fc_norm, "norm_output": settings.norm_output, "embed_requires_grad": False}


def of_speculators(config: Config, target: TransformersTarget) -> dict[str, Any]:
    qk_norm = config["transformer_layer_config"].get("model_type") == "qwen3"
    return speculators.read_fused(config, target, METHOD, FLAGS) | {"qk_norm": qk_norm}


# ── SGLang, the authors' own, TensorRT-LLM ───────────────────────────────────────────────────────────────────────────


def of_sglang(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return {**released.head(config, target), "taps": released.taps(config, "sglang", METHOD), "qk_norm": False}


def of_authors(config: Config, target: TransformersTarget) -> dict[str, Any]:
    layers = target.spec.layers
    guessed = [1, layers // 2 - 1, layers - 4]
    is_named = config.get(METHOD.layers["eagle"][0]) is not None
    taps = released.taps(config, "eagle", METHOD) if is_named else guessed
    return {**released.head(config, target), "taps": taps, "qk_norm": False}


def is_of_authors(config: Config, names: Collection[str]) -> bool:
    return (config.get("architectures") or [""])[0] == sglang.EAGLE3 and "eagle_config" not in config


def trtllm_settings(source: Source) -> dict[str, Any]:
    return {
        "decoding_type": "Eagle3", "max_draft_len": source.settings.length,
        "eagle3_layers_to_capture": list(source.model.taps),
    }  # fmt: skip


def one_layer(source: Source) -> str | None:
    """TensorRT-LLM's loader creates fc only for two layers or more."""
    return "it needs two taps or more; train with more taps" if len(source.model.taps) < 2 else None


LLAMA = "its EAGLE-3 is Llama's, without query norms and with the feature itself as residual; train with qk_norm: no"
SGLANG_REFUSES = (
    only("qk_norm", False, LLAMA), only("norm_before_residual", False, LLAMA), sglang.WHOLE_HEADS, *REFUSES,
)  # fmt: skip


# ── DeepSpec ─────────────────────────────────────────────────────────────────────────────────────────────────────────

DEEPSPEC = ("Qwen3Eagle3Model", "Eagle3DraftModel")
PLAIN = "its EAGLE-3 normalises queries and keys, drafts all tokens and has no options; train with only qk_norm: yes"
DEEPSPEC_REFUSES = (
    only("qk_norm", True, PLAIN), only("vocabulary", None, PLAIN), *(only(flag, False, PLAIN) for flag in FLAGS),
    *REFUSES,
)  # fmt: skip


def to_deepspec(source: Source) -> dict[str, Any]:
    settings = source.settings
    return deepspec.common(source, DEEPSPEC[0], 1) | {
        "target_model_name_or_path": source.target.spec.name, "ttt_length": settings.ttt,
        "step_loss_decay": settings.decay,
        "draft_num_hidden_layers": 1,
    }  # fmt: skip


def of_deepspec(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return {
        **released.read(config, target), "taps": released.taps(config, "deepspec", METHOD), "vocabulary": None,
        "qk_norm": True, "ttt": config.get("ttt_length", 7), "decay": config.get("step_loss_decay", 0.8),
    }  # fmt: skip


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_gguf(source: Source) -> dict[str, Any]:
    return drafters.common(source, "eagle3", 1) | {
        "eagle3.target_hidden_size": source.target.spec.hidden,
        "eagle3.norm_before_residual": source.settings.norm_before_residual, "eagle3.norm_before_fc": False,
    }  # fmt: skip


def of_gguf(config: Config, target: TransformersTarget) -> dict[str, Any]:
    settings.check(config, target)
    if config["eagle3.block_count"] != 1:
        raise ExportError(f"eagle3.block_count is {config['eagle3.block_count']}; Outrider's EAGLE-3 has one layer")
    reduced = config[SHAPES].get("d2t")
    return {
        **settings.layer(config), "taps": released.taps(config, "gguf", METHOD), "qk_norm": False, "fc_norm": False,
        "vocabulary": None if reduced is None else reduced[0], "norm_output": False,
        "norm_before_residual": bool(config.get("eagle3.norm_before_residual")),
    }  # fmt: skip


def three(source: Source) -> str | None:
    if (count := len(source.model.taps)) != 3:
        return f"llama.cpp's EAGLE-3 reads three layers, but this one reads {count}; train with three taps"
    return None


def whole_heads(source: Source) -> str | None:
    return refusals.PARTIAL if source.sizes.partial_rotary_factor != 1 else None


GGUF = [
    *((f"layers.0.{name}.weight", f"blk.0.{gguf_name}.weight") for name, gguf_name in drafters.PARTS.items()),
    ("layers.0.hidden_norm.weight", "blk.0.attn_norm_2.weight"), ("fc.weight", "fc.weight"),
    ("norm.weight", "output_norm.weight"), ("head.lm_head.weight", "lm_head.weight"), ("head.d2t", "d2t"),
    ("head.t2d", "t2d"),
]  # fmt: skip
GGUF_REFUSES: tuple[Answer, ...] = (
    *refusals.FIRST, whole_heads, three, *REFUSES,
    only("qk_norm", False, "llama.cpp's EAGLE-3 has no norms of queries and keys; train with qk_norm: no"),
    only("fc_norm", False, "llama.cpp's EAGLE-3 has no norm of each tap; train with fc_norm: no"),
    only("norm_output", False, "llama.cpp's EAGLE-3 feeds back what its last norm reads; train with norm_output: no"),
)  # fmt: skip
FORMATS = {
    "speculators": Layout(
        NAMES, to_speculators, of_speculators, released.head_copy, inferred=speculators.embedding(trained=False),
        refuses=REFUSES, shift=speculators.SHIFT, is_of=speculators.is_of("eagle3"),
    ),
    "sglang": Layout(
        MIDLAYER, sglang.eagle3, of_sglang, released.head_copy, refuses=SGLANG_REFUSES, is_of=sglang.is_eagle3
    ),
    "deepspec": Layout(
        NAMES, to_deepspec, of_deepspec, released.embedding_and_head, refuses=DEEPSPEC_REFUSES,
        is_of=lambda config, names: (config.get("architectures") or [""])[0] in DEEPSPEC,
    ),
    "eagle": Layout(MIDLAYER, None, of_authors, is_of=is_of_authors),
    "trtllm": Layout(
        MIDLAYER, sglang.eagle3, duplicates=released.head_copy, files=trtllm.files(trtllm_settings),
        refuses=(one_layer, *SGLANG_REFUSES),
    ),
    "gguf": layouts.layout(
        GGUF, to_gguf, of_gguf, drafters.tensors, drafters.read, is_of=layouts.of_architecture("eagle3"),
        refuses=GGUF_REFUSES, notes=(refusals.trees,), shift=drafters.SHIFT,
    ),
}  # fmt: skip
