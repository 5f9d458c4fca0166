"""P-EAGLE in speculators' format, for vLLM."""

from __future__ import annotations

from typing import Any

from outrider.drafters.peagle import METHOD
from outrider.errors import ExportError
from outrider.formats import released, speculators
from outrider.formats.layout import Config, Layout, Source
from outrider.targets.hf.transformers import TransformersTarget


def written(source: Source) -> dict[str, Any]:
    config = speculators.fused(source, "peagle", "PEagleSpeculator", "qwen3", source.settings.layers)
    return config | {"mask_token_id": source.mask_token, "embed_requires_grad": False}


def read(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    if shape.get("model_type") != "qwen3":
        kind = repr(shape.get("model_type", "llama"))
        raise ExportError(
            f"its layers have model_type {kind}; Outrider's P-EAGLE has Qwen3 layers, which norm queries and keys: "
            "use a draft with those"
        )
    extra = {"layers": shape["num_hidden_layers"], "mask_token": released.mask(config, "mask_token_id", target)}
    fused = speculators.read_fused(config, target, METHOD, ("norm_before_residual",))
    return fused | extra | {"init_from_layers": None}


NAMES = [*released.FUSED, ("layers.*", "layers.*"), ("mask_hidden", "mask_hidden")]
FORMATS = {
    "speculators": Layout(
        NAMES, written, read, released.head_copy, inferred=speculators.embedding(trained=True),
        refuses=(released.learnt_mask,), shift=speculators.SHIFT, is_of=speculators.is_of("peagle"),
    ),
}  # fmt: skip
