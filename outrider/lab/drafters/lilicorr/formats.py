"""LiLiCorr in the folders that vLLM and SGLang load: DFlash's, with the scorer's sizes in `dflash_config`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.errors import ExportError
from outrider.formats import released, sglang
from outrider.formats.layout import Answer, Config, Layout, Source
from outrider.lab.drafters.lilicorr import METHOD
from outrider.targets.hf.transformers import TransformersTarget

ARCHITECTURE = "LiLiCorrDraftModel"
SIZES = {
    "lilicorr_candidate_topk": "candidates", "lilicorr_hidden_size": "scorer_hidden",
    "lilicorr_num_layers": "scorer_layers", "lilicorr_num_heads": "scorer_heads", "lilicorr_mlp_ratio": "scorer_ratio",
    "lilicorr_factor_dim": "factor", "lilicorr_vector_eps": "factor_eps", "lilicorr_logit_scale": "scale",
}  # fmt: skip
"""Keys of `dflash_config` to Outrider's settings."""
NAMES = [*released.BLOCK, ("lilicorr.*", "lilicorr.*")]


def folder(source: Source) -> dict[str, Any]:
    config = sglang.block(source, ARCHITECTURE)
    sizes = {key: getattr(source.settings, setting) for key, setting in SIZES.items()}
    sizes["lilicorr_hidden_size"] = sizes["lilicorr_hidden_size"] or source.target.spec.hidden
    config["dflash_config"] |= {"block_size": config["block_size"], "lilicorr_enabled": True, **sizes}
    return config


def read_folder(config: Config, target: TransformersTarget) -> dict[str, Any]:
    dflash_config = config["dflash_config"]
    if dflash_config.get("conv_kernel_size"):
        raise ExportError("it has convolutions around its layers, which Outrider's lilicorr has not; use one without")
    if missing := [key for key in SIZES if key not in dflash_config]:
        raise ExportError(f"dflash_config.{missing[0]} is missing; copy config.json again")
    block = released.block({"block_size": dflash_config.get("block_size"), **config}, "sglang", METHOD, target)
    sizes = {setting: dflash_config[key] for key, setting in SIZES.items()}
    return block | sizes | {"scorer_hidden": dflash_config["lilicorr_hidden_size"] or None}


def is_folder(config: Config, names: Collection[str]) -> bool:
    dflash_config = config.get("dflash_config")
    return isinstance(dflash_config, dict) and "lilicorr_num_layers" in dflash_config


def powers(source: Source) -> str | None:
    k = source.settings.candidates
    return (
        None if k in (1, 2, 4, 8, 16) else f"engines want a power of two up to 16 as candidates, got {k}; train with 8"
    )


def tree(source: Source) -> str | None:
    nodes = source.settings.nodes
    return f"its tree of {nodes} nodes is left out: engines draft one path" if nodes else None


REFUSES: tuple[Answer, ...] = (sglang.WHOLE_HEADS, *released.BLOCK_REFUSES, powers)
FORMATS = {"sglang": Layout(NAMES, folder, read_folder, refuses=REFUSES, notes=(tree,), is_of=is_folder)}
