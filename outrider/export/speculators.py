"""speculators, what vLLM loads: eagle3, peagle, dflash, dspark, mtp.

config.json is flat but for `transformer_layer_config`, the draft layers, and `speculators_config`, how many tokens to draft and
for which target.  EAGLE-3 and P-EAGLE have a head in the file, be it the target's, and no embedding.  Layer k there is the
state after k layers, one more than ours.  No `model_type`: vLLM then takes the folder for another kind of model.

Keys that are missing mean what speculators 0.7.0 takes them for, even where vLLM's reader differs: it takes a DSpark's
`sample_from_anchor` for false and an EAGLE-3's `norm_before_residual` for true, which are the other way round here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.errors import ExportError
from outrider.export import released
from outrider.export.layout import Config, Format, Layout, Source
from outrider.targets.transformers import TransformersTarget

VERSION = "0.7.0"
"""Of the layout written here."""
MARKOV = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
"""What the library takes for granted in a DSpark whose config is silent."""
SHIFT = 1


def eagle3(source: Source) -> dict[str, Any]:
    settings = source.settings
    family = "qwen3" if settings.qk_norm else "llama"
    return {
        **common("eagle3", source, family, 1, settings.length),
        **fused(source),
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        "embed_requires_grad": False,
    }


def peagle(source: Source) -> dict[str, Any]:
    settings = source.settings
    return {
        **common("peagle", source, "qwen3", settings.layers, settings.length),
        **fused(source),
        "mask_token_id": source.model.mask_token,
        "embed_requires_grad": False,
    }


def fused(source: Source) -> dict[str, Any]:
    """What EAGLE-3's heads have in common."""
    return {
        "draft_vocab_size": source.settings.vocabulary or source.target.spec.vocabulary,
        "norm_before_residual": source.settings.norm_before_residual,
        "norm_before_fc": False,
        "target_hidden_size": source.target.spec.hidden,
        "eagle_aux_hidden_state_layer_ids": [tap + SHIFT for tap in source.model.taps],
    }


def dflash(source: Source) -> dict[str, Any]:
    settings, backbone = source.settings, source.backbone
    return {
        **common(settings.kind, source, "qwen3", settings.layers, settings.block),
        "draft_vocab_size": source.target.spec.vocabulary,
        "block_size": backbone.width,
        "sample_from_anchor": settings.anchor_predicts,
        "target_hidden_size": source.target.spec.hidden,
        "aux_hidden_state_layer_ids": [tap + SHIFT for tap in source.model.taps],
        "mask_token_id": backbone.mask_token,
        # of layers that see a window, which there are none of; but vLLM masks the block of every layer unless it is true
        "sliding_window_non_causal": True,
    }


def dspark(source: Source) -> dict[str, Any]:
    return dflash(source) | released.markov_written(source.settings)


def mtp(source: Source) -> dict[str, Any]:
    family = "qwen3" if source.settings.qk_norm else "llama"
    return common("mtp", source, family, 1, source.settings.length) | {"num_nextn_predict_layers": 1}


def common(kind: str, source: Source, family: str, count: int, tokens: int) -> dict[str, Any]:
    """What every config here says.  tokens: drafted per step."""
    spec = source.target.spec
    names = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator",
             "dspark": "DSparkSpeculator", "mtp": "MTPDraftModel"}  # fmt: skip
    return {
        "architectures": [names[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": spec.dtype,
        "tie_word_embeddings": False,
        "transformer_layer_config": released.written(source.settings, count, spec, family),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": spec.name, "architectures": source.architectures},
        },
    }


def drafted(config: Config) -> int:
    """Tokens per step that the config proposes."""
    return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])


def read_fused(config: Config, target: TransformersTarget) -> dict[str, Any]:
    if config.get("norm_before_fc"):
        raise ExportError("norm_before_fc norms all taps as one, which no draft here does")
    size = config.get("draft_vocab_size") or target.spec.vocabulary
    return {
        **released.read(config["transformer_layer_config"], target.spec),
        "length": drafted(config),
        "taps": released.taps(config.get("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids", SHIFT),
        "vocabulary": None if size == target.spec.vocabulary else size,
        "norm_before_residual": bool(config.get("norm_before_residual")),
    }


def read_eagle3(config: Config, target: TransformersTarget) -> dict[str, Any]:
    qk_norm = config["transformer_layer_config"].get("model_type") == "qwen3"
    flags = {key: bool(config.get(key)) for key in ("fc_norm", "norm_output")}
    return {**read_fused(config, target), **flags, "qk_norm": qk_norm}


def read_peagle(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    if shape.get("model_type") != "qwen3":
        raise ExportError(
            f"its layers are of model_type {shape.get('model_type', 'llama')!r}; a P-EAGLE here has Qwen3's, which norm "
            "queries and keys, so one of Llama's can't be read"
        )
    mask = released.mask(config.get("mask_token_id"), "mask_token_id", target)
    return {**read_fused(config, target), "layers": shape["num_hidden_layers"], "mask_token": mask, "copies": None}


def embedding(config: Config, names: Collection[str]) -> dict[str, Any]:
    """An embedding that was trained along must be in the file, where it is held against the target's."""
    along = config.get("embed_requires_grad", config["speculators_model_type"] == "peagle")
    if along and "embed_tokens.weight" not in names:
        raise ExportError(
            "its embedding was trained along (embed_requires_grad, which is true for a P-EAGLE unless said) and is not in the "
            "file; where it is the target's, write embed_requires_grad: false into config.json"
        )
    return {}


def read_dflash(config: Config, target: TransformersTarget) -> dict[str, Any]:
    anchor_predicts = bool(config.get("sample_from_anchor", config["speculators_model_type"] == "dspark"))
    if config.get("draft_vocab_size", target.spec.vocabulary) != target.spec.vocabulary:
        raise ExportError(f"draft_vocab_size {config['draft_vocab_size']}: blocks here are drafted from the whole vocabulary")
    return {
        **released.read(config["transformer_layer_config"], target.spec),
        "layers": config["transformer_layer_config"]["num_hidden_layers"],
        "block": config["block_size"] - (not anchor_predicts),
        "anchor_predicts": anchor_predicts,
        "taps": released.taps(config.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids", SHIFT),
        "mask_token": released.mask(config.get("mask_token_id"), "mask_token_id", target),
        "copies": None,
    }


def read_dspark(config: Config, target: TransformersTarget) -> dict[str, Any]:
    return read_dflash(config, target) | released.markov({**MARKOV, **config})


def read_mtp(config: Config, target: TransformersTarget) -> dict[str, Any]:
    shape = config["transformer_layer_config"]
    if config.get("num_nextn_predict_layers", 1) != 1:
        raise ExportError(f"num_nextn_predict_layers {config['num_nextn_predict_layers']}: this format has one module")
    qk_norm = shape.get("model_type") == "qwen3"
    return {**released.read(shape, target.spec), "length": drafted(config), "modules": 1, "native": False, "qk_norm": qk_norm}


def one_module(source: Source) -> str | None:
    if source.settings.native:
        return "its modules are the target's own, which the engine has"
    return f"it has {source.settings.modules} modules, the format one" if source.settings.modules != 1 else None


def no_engine(source: Source) -> str | None:
    return "no engine loads it: of this format vLLM 0.32 takes eagle3, peagle, dflash, dflash2 and dspark"


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


LAYOUTS = {
    "eagle3": Layout(
        released.EAGLE3,
        eagle3,
        read_eagle3,
        told=embedding,
        copies=released.head_copy,
        refuses=released.not_eagle3,
        shift=SHIFT,
    ),
    "peagle": Layout(
        released.PEAGLE,
        peagle,
        read_peagle,
        told=embedding,
        copies=released.head_copy,
        refuses=released.learnt_mask,
        shift=SHIFT,
    ),
    "dflash": Layout(released.DFLASH, dflash, read_dflash, refuses=released.not_dflash, shift=SHIFT),
    "dspark": Layout(
        released.DSPARK,
        dspark,
        read_dspark,
        refuses=released.learnt_mask,
        notes=released.vanilla_alone,
        shift=SHIFT,
    ),
    "mtp": Layout(MODULE, mtp, read_mtp, refuses=one_module, notes=no_engine, shift=SHIFT),
}
FORMAT = Format(LAYOUTS, _kind)
