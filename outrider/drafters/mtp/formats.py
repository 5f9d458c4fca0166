"""MTP's modules in the formats of other programs: speculators, and GGUF in `gguf.py`."""

from __future__ import annotations

from typing import Any

from outrider.drafters.mtp import gguf
from outrider.errors import ExportError
from outrider.formats import released, speculators
from outrider.formats.gguf import layouts, refusals
from outrider.formats.layout import Config, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget


def written(source: Source) -> dict[str, Any]:
    settings = source.settings
    config = speculators.common(
        source, "mtp", "MTPDraftModel", "qwen3" if settings.qk_norm else "llama", 1, settings.length
    )
    return config | {"num_nextn_predict_layers": 1}


def read(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    if config.get("num_nextn_predict_layers", 1) != 1:
        raise ExportError(
            f"num_nextn_predict_layers is {config['num_nextn_predict_layers']}, but this format has one module; "
            "set it to 1"
        )
    return {
        **released.read(shape, target),
        "length": speculators.drafted(config),
        "modules": 1,
        "native": False,
        "qk_norm": shape.get("model_type") == "qwen3",
    }


REFUSES = (
    only("native", False, "its modules are the target's own, which the engine already has"),
    only("modules", 1, "it has {} modules, the format only one"),
)
NO_ENGINE = "no engine loads it: in this format, vLLM 0.32 supports eagle3, peagle, dflash, dflash2 and dspark"
NAMES = [
    ("layers.0.eh_proj.weight", "mtp_layers.0.input_proj.weight"),
    ("layers.0.hnorm.weight", "mtp_layers.0.hidden_layernorm.weight"),
    ("layers.0.enorm.weight", "mtp_layers.0.token_layernorm.weight"),
    ("layers.0.shared_head.norm.weight", "mtp_layers.0.final_layernorm.weight"),
    ("layers.0.*", "mtp_layers.0.*"),
]
FORMATS = {
    "speculators": Layout(
        NAMES, written, read, refuses=REFUSES, notes=(lambda source: NO_ENGINE,), shift=speculators.SHIFT,
        is_of=speculators.is_of("mtp"),
    ),
    "gguf": layouts.layout(
        gguf.MODULE, gguf.header, gguf.settings, gguf.tensors, gguf.read, is_of=layouts.of_architecture(gguf.NAME),
        refuses=gguf.REFUSES, notes=(refusals.trees, gguf.whole_target),
    ),
}  # fmt: skip
