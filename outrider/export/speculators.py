"""speculators, what vLLM loads: eagle3, peagle, dflash, dspark, mtp.

config.json is flat but for `transformer_layer_config`, the draft layers, and `speculators_config`, how many tokens to
draft and for which target.  EAGLE-3 and P-EAGLE have a head in the file, be it the target's, and no embedding.  Layer k
there is the state after k layers, one more than ours.  No `model_type`: vLLM then takes the folder for another kind of
model.

Missing keys have speculators 0.7.0's defaults, even where vLLM's reader differs: it takes a DSpark's
`sample_from_anchor` for false and an EAGLE-3's `norm_before_residual` for true, which are the other way round here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from outrider.errors import ExportError
from outrider.export import released
from outrider.export.layout import Config, Format, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget

VERSION = "0.7.0"
"""Of the layout written here."""
MARKOV = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
"""The library's defaults for a DSpark."""
SHIFT = 1
ARCHITECTURES = {
    "eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "mtp": "MTPDraftModel",
}  # fmt: skip


def eagle3(source: Source) -> dict[str, Any]:
    settings = source.settings
    config = fused(source, 1, "qwen3" if settings.qk_norm else "llama")
    return config | {"fc_norm": settings.fc_norm, "norm_output": settings.norm_output, "embed_requires_grad": False}


def peagle(source: Source) -> dict[str, Any]:
    config = fused(source, source.settings.layers, "qwen3")
    return config | {"mask_token_id": source.mask_token, "embed_requires_grad": False}


def fused(source: Source, layers: int, family: str) -> dict[str, Any]:
    """What EAGLE-3's heads have in common."""
    settings, spec = source.settings, source.target.spec
    return common(source, family, layers, settings.length) | {
        "draft_vocab_size": settings.vocabulary or spec.vocabulary,
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False, "target_hidden_size": spec.hidden,
        "eagle_aux_hidden_state_layer_ids": [tap + SHIFT for tap in source.model.taps],
    }  # fmt: skip


def dflash(source: Source) -> dict[str, Any]:
    settings, spec = source.settings, source.target.spec
    backbone: Any = source.model.backbone
    return common(source, "qwen3", settings.layers, settings.block) | {
        "draft_vocab_size": spec.vocabulary,
        "block_size": backbone.width,
        "sample_from_anchor": settings.anchor_predicts,
        "target_hidden_size": spec.hidden,
        "aux_hidden_state_layer_ids": [tap + SHIFT for tap in source.model.taps],
        "mask_token_id": source.mask_token,
        # of sliding-window layers, which there are none of; but vLLM masks the block of every layer unless it is true
        "sliding_window_non_causal": True,
    }


def dspark(source: Source) -> dict[str, Any]:
    return dflash(source) | released.markov_written(source.settings)


def mtp(source: Source) -> dict[str, Any]:
    family = "qwen3" if source.settings.qk_norm else "llama"
    return common(source, family, 1, source.settings.length) | {"num_nextn_predict_layers": 1}


def common(source: Source, family: str, count: int, tokens: int) -> dict[str, Any]:
    """The keys that every config here has.  tokens: drafted per step."""
    kind, spec = source.settings.kind, source.target.spec
    return {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": spec.dtype,
        "tie_word_embeddings": False,
        "transformer_layer_config": released.written(source.settings, count, spec, family),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": spec.name,
                "architectures": list(getattr(source.target.model.config, "architectures", None) or []),
            },
        },
    }


def drafted(config: Config) -> int:
    """Tokens per step that the config proposes."""
    return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])


def read_fused(config: Config, target: TransformersTarget, kind: str, flags: Sequence[str]) -> dict[str, Any]:
    if config.get("norm_before_fc"):
        raise ExportError(
            "norm_before_fc is true: one norm over all taps, which Outrider can't run; use a draft with "
            "norm_before_fc: false"
        )
    taps = released.taps(config, "speculators", kind)
    return {**released.head(config, target, flags), "length": drafted(config), "taps": taps}


def read_eagle3(config: Config, target: TransformersTarget) -> dict[str, Any]:
    qk_norm = config["transformer_layer_config"].get("model_type") == "qwen3"
    return read_fused(config, target, "eagle3", released.FLAGS) | {"qk_norm": qk_norm}


def read_peagle(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    if shape.get("model_type") != "qwen3":
        kind = repr(shape.get("model_type", "llama"))
        raise ExportError(
            f"its layers have model_type {kind}; Outrider's P-EAGLE has Qwen3 layers, which norm queries and keys: "
            "use a draft with those"
        )
    more = {"layers": shape["num_hidden_layers"], "mask_token": released.mask(config, "mask_token_id", target)}
    return read_fused(config, target, "peagle", ("norm_before_residual",)) | more | {"init_from_layers": None}


def embedding(config: Config, names: Collection[str]) -> dict[str, Any]:
    """An embedding that was trained too must be in the file, where it is compared with the target's."""
    along = config.get("embed_requires_grad", config["speculators_model_type"] == "peagle")
    if along and "embed_tokens.weight" not in names:
        # embed_requires_grad is true for a P-EAGLE unless given
        where = "where it is the target's, write embed_requires_grad: false into config.json"
        raise ExportError(f"its embedding was trained too and is not in the file; {where}")
    return {}


def read_dflash(config: Config, target: TransformersTarget) -> dict[str, Any]:
    if config.get("draft_vocab_size", target.spec.vocabulary) != target.spec.vocabulary:
        raise ExportError(
            f"draft_vocab_size is {config['draft_vocab_size']}, but Outrider drafts blocks from the whole vocabulary; "
            "use a draft without draft_vocab_size"
        )
    kind = "dspark" if config["speculators_model_type"] == "dspark" else "dflash"
    return released.block(config, "speculators", kind, target)


def read_dspark(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return read_dflash(config, target) | released.markov({**MARKOV, **config})


def read_mtp(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    if config.get("num_nextn_predict_layers", 1) != 1:
        raise ExportError(
            f"num_nextn_predict_layers is {config['num_nextn_predict_layers']}, but this format holds one module; "
            "set it to 1"
        )
    qk_norm = shape.get("model_type") == "qwen3"
    return {
        **released.read(shape, target),
        "length": drafted(config),
        "modules": 1,
        "native": False,
        "qk_norm": qk_norm,
    }


MTP_REFUSES = (
    only("native", False, "its modules are the target's own, which the engine has"),
    only("modules", 1, "it has {} modules, the format one"),
)
NO_ENGINE = "no engine loads it: of this format vLLM 0.32 takes eagle3, peagle, dflash, dflash2 and dspark"
MODULE = [
    ("layers.0.eh_proj.weight", "mtp_layers.0.input_proj.weight"),
    ("layers.0.hnorm.weight", "mtp_layers.0.hidden_layernorm.weight"),
    ("layers.0.enorm.weight", "mtp_layers.0.token_layernorm.weight"),
    ("layers.0.shared_head.norm.weight", "mtp_layers.0.final_layernorm.weight"),
    ("layers.0.*", "mtp_layers.0.*"),
]


def _kind(config: Config, names: Collection[str]) -> str | None:
    found = config.get("speculators_model_type")
    return found if found in LAYOUTS else None


COPIED: dict[str, Any] = {"duplicates": released.head_copy, "inferred": embedding, "shift": SHIFT}
LAYOUTS = {
    "eagle3": Layout(released.EAGLE3, eagle3, read_eagle3, **COPIED, refuses=released.EAGLE3_REFUSES),
    "peagle": Layout(released.PEAGLE, peagle, read_peagle, **COPIED, refuses=(released.learnt_mask,)),
    "dflash": Layout(released.DFLASH, dflash, read_dflash, refuses=released.DFLASH_REFUSES, shift=SHIFT),
    "dspark": Layout(released.DSPARK, dspark, read_dspark, refuses=(released.learnt_mask,), notes=(released.VANILLA,),
                     shift=SHIFT),
    "mtp": Layout(MODULE, mtp, read_mtp, refuses=MTP_REFUSES, notes=(lambda source: NO_ENGINE,), shift=SHIFT),
}  # fmt: skip
FORMAT = Format(LAYOUTS, _kind)
