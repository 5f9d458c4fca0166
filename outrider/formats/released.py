"""What the formats of released drafts share: weight names, layer sizes as transformers names them, and what they can't
express.

Rotation is written to `rope_parameters` and, for readers older than transformers 5, to `rope_theta` and `rope_scaling`.
In transformers `rope_scaling`, even null, replaces `rope_parameters`, so a partial rotation is also written at the top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import ExportError
from outrider.formats import keys
from outrider.formats.layout import Config, Source, only
from outrider.method import Method
from outrider.nn.shape import STRETCHES, LayerConfig
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import TargetSpec

PLAIN: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "sliding_window": None}
"""Fixed values of our layers; a config must have the same."""
FLAGS = ("fc_norm", "norm_output", "norm_before_residual")
"""Settings of an EAGLE-3 whose config keys have the same name as ours."""


def written(shape: LayerConfig, layers: int, spec: TargetSpec, family: str) -> dict[str, Any]:
    """The config of `layers` draft layers for a target.  family: qwen3, which norms queries and keys, or llama."""
    scaling = dict(shape.rope_scaling or {"rope_type": "default"})
    partial = {} if shape.partial_rotary_factor == 1 else {"partial_rotary_factor": shape.partial_rotary_factor}
    return {
        "model_type": family, "hidden_size": spec.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "vocab_size": spec.vocabulary, "max_position_embeddings": spec.context,
        "rms_norm_eps": shape.rms_norm_eps, "hidden_act": "silu", "attention_bias": False,
        "rope_parameters": {**scaling, "rope_theta": shape.rope_theta, **partial}, "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling, **partial,
        **({"layer_types": ["full_attention"] * layers,
        "sliding_window": None} if family == "qwen3" else {"mlp_bias": False}),
    }  # fmt: skip


def whole(source: Source, architecture: str, layers: int, family: str) -> dict[str, Any]:
    """A config with the draft layers at its top level, as in all formats except speculators."""
    spec = source.target.spec
    return {
        **written(source.settings, layers, spec, family), "architectures": [architecture], "dtype": spec.dtype,
        "tie_word_embeddings": False,
    }  # fmt: skip


def read(config: Config, target: TransformersTarget) -> dict[str, Any]:
    """A config's layer settings as ours.  Raises ExportError for settings that our layers don't support, and for a
    different hidden size or vocabulary."""
    spec = target.spec
    for key, expected in (("hidden_size", spec.hidden), ("vocab_size", spec.vocabulary)):
        if config.get(key) not in (None, expected):
            raise ExportError(f"{key} is {config[key]}, {spec.name} has {expected}; load the target it was trained for")
    for key, ours in PLAIN.items():
        if config.get(key, ours) != ours and not (
            key == "sliding_window" and not config.get("use_sliding_window", True)
        ):
            raise ExportError(f"{key} is {config[key]!r}; Outrider's drafts need {ours!r}; use a draft that has it")
    if set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise ExportError(
            f"layer_types {config['layer_types']} has layers of sliding-window attention; "
            "Outrider's drafts have full attention only; use a draft that has it"
        )
    heads = _number(config, "num_attention_heads")
    return {
        "heads": heads, "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or _number(config, "hidden_size") // heads,
        "intermediate": _number(config, "intermediate_size"), "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        **_rotation(config),
    }  # fmt: skip


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ExportError(f"{key} must be a whole number above 0, got {value!r}; correct config.json")
    return value


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation, from rope_parameters (transformers 5) or from rope_theta and rope_scaling (before it).

    Raises ExportError if both are present and differ, since some engines read one and some the other.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, Mapping) or any(isinstance(value, Mapping) for value in new.values()):
        raise ExportError(
            "rope_parameters differ by kind of layer, but all layers of Outrider's drafts have the same rotation; "
            "use a draft that has"
        )
    at_top = {key: float(config[key]) for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    rope = _rope_settings(new if new.keys() & {"rope_type", "type"} else {**old, **new}, config)
    others = _rope_settings(old, config) if "rope_scaling" in config or not new else rope
    for key, value in {**others, **at_top}.items():
        if rope[key] != value:
            both = f"both {value} and {rope[key]} (in rope_parameters, in rope_scaling or at the top of config.json)"
            raise ExportError(
                f"{key} is {both}; the config contradicts itself, and some engines read one, some the other; make "
                "them equal"
            )
    scaling = rope["rope_scaling"] or {}
    kind = scaling.get("rope_type", "default")
    if kind in ("yarn", "llama3") and config.get("max_position_embeddings"):  # the default in transformers and engines
        scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if kind not in ("default", *STRETCHES):
        raise ExportError(f"rotary scaling {kind!r} is not supported; use a draft with one of {', '.join(STRETCHES)}")
    if not 0 < rope["rope_theta"] < math.inf:
        raise ExportError(f"rope_theta must be a number above 0, got {rope['rope_theta']}; correct config.json")
    return rope


def _rope_settings(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation from one of the two, with missing values taken from the top-level keys."""
    rest = dict(rope)
    if "type" in rest:
        rest.setdefault("rope_type", rest.pop("type"))
        rest.pop("type", None)
    theta = rest.pop("rope_theta", config.get("rope_theta"))
    share = rest.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    return {
        "rope_theta": 10_000.0 if theta is None else float(theta),
        "partial_rotary_factor": 1.0 if share is None else float(share),
        "rope_scaling": None if rest.get("rope_type", "default") == "default" else rest,
    }


def taps(config: Config, format: str, method: Method) -> list[int]:
    """Layer numbers in our count.  Raises ExportError if they are missing: a wrong guess loses nearly all
    acceptance."""
    key = method.layers[format][0]
    ids = keys.at(config, key)
    if not ids:
        raise ExportError(f"{key} is missing; it names the layers that the draft reads; write them into config.json")
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        raise ExportError(f"{key} must be a list of integers, one per layer, got {ids!r}; correct config.json")
    return list(keys.layers(method, format, config))


def mask(config: Config, key: str, target: TransformersTarget) -> int:
    """The token of masked slots, from its key in config.json, else the target's own mask token.

    Raises ExportError if there is neither: the token used in training can't be guessed.
    """
    token = keys.at(config, key)
    token = target.mask_token if token is None else token
    if token is None:
        raise ExportError(
            f"{key} is missing, and {target.spec.name} has no mask token; write the id of masked slots into config.json"
        )
    if type(token) is not int:
        raise ExportError(f"{key} must be a token id, got {token!r}; correct config.json")
    return token


def _shape(config: Config) -> Config:
    """The part of a config with the sizes of the draft's layers."""
    return config["transformer_layer_config"] if "speculators_model_type" in config else config


def block(config: Config, format: str, method: Method, target: TransformersTarget) -> dict[str, Any]:
    """A block drafter's config as our settings, except for its head."""
    shape, in_anchor = _shape(config), keys.anchor_predicts(method, format, config)
    within, dot, _ = method.layers[format][0].rpartition(".")
    return {
        **read(shape, target), "layers": shape["num_hidden_layers"], "block": config["block_size"] - (not in_anchor),
        "anchor_predicts": in_anchor, "taps": taps(config, format, method),
        "mask_token": mask(config, f"{within}{dot}mask_token_id", target), "init_from_layers": None,
    }  # fmt: skip


def head(config: Config, target: TransformersTarget, flags: Sequence[str] = FLAGS) -> dict[str, Any]:
    """The settings for layers, vocabulary and norms from the config of an EAGLE-3."""
    size = config.get("draft_vocab_size") or target.spec.vocabulary
    return {
        **read(_shape(config), target),
        "vocabulary": None if size == target.spec.vocabulary else size,
        **{key: bool(config.get(key)) for key in flags},
    }


def learnt_mask(source: Source) -> str | None:
    """Block drafters and P-EAGLE: the formats require a mask token, but our mask may be a learnt vector."""
    if source.mask_token is None:
        return (
            "its mask is a trained vector and the format wants a token; "
            "train with mask_token: ID of one that never occurs"
        )
    return None


BLOCK_REFUSES = (
    learnt_mask,
    # speculators has a key for it, but vLLM's second model runner refuses it and the first one silently ignores it
    only("anchor_predicts", False, "its DFlash drafts nothing in the anchor's slot; train with anchor_predicts: no"),
)
"""What the DFlash of engines can't do."""


def head_copy(source: Source) -> tuple[str, ...]:
    """Readers of EAGLE-3 expect a head in the file, even if it is the target's."""
    return ("lm_head.weight",)


def embedding_and_head(source: Source) -> tuple[str, ...]:
    return ("embed_tokens.weight", "lm_head.weight")


# ── names, ours and theirs ────────────────────────────────────────────────────────────────────────────────────────────

FUSED = [
    *((f"head.{name}", name) for name in ("d2t", "t2d", "lm_head.weight")),
    *((name, name) for name in ("fc_norm.*", "fc.weight", "norm.weight")),
]
"""EAGLE-3 weights outside the layers."""
BLOCK = [(f"backbone.{name}", name) for name in ("layers.*", "fc.weight", "hidden_norm.weight", "norm.weight")]
"""Block drafter weights, except for additional heads."""
