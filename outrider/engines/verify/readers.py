"""An exported draft folder as an engine reads it: plain torch, written from the engines' conventions, independently of
our exporter.

A `Draft` holds a draft model in interchangeable parts: taps, rotation, norms, vocabulary, alignment, attention mask,
weights.  `of_folder` reads them from the files, `of_model` from one of our models.  `chains` computes what either
drafts.

Conventions, as vLLM 0.32 reads them.  EAGLE-3 and P-EAGLE: layer id k is the state after k layers; state i with token i
+ 1 is rotated by position i.  DFlash: `target_layer_ids` are outputs of layers counted from 0, speculators' ids are one
more; K drafts take the anchor and K masks; the context enters every layer's keys and values without its input norm.
Medusa: head k reads the final state of the last token before the anchor.  SGLang's ids for EAGLE-3 are outputs of
layers counted from 0.

D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import ExportError
from outrider.nn.draft_model import DraftModel
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular, whole_text

BLOCKS = ("dflash", "dflash2", "dspark", "domino")
KINDS = ("eagle3", "peagle", "medusa", *BLOCKS)
SCALINGS = ("linear", "llama3", "yarn")
TRAINED = "original_max_position_embeddings"
LONGEST = 32_768
"""The context length if no config has one: transformers' default for Qwen3, whose layers ours are."""


class Rotation(NamedTuple):
    """The rotary embedding of queries and keys."""

    theta: float
    share: float = 1.0
    """The part of each head that is rotated."""
    scaling: str = ""
    """The scaling, in the form of `_scaling`; empty if there is none."""


NO_ROTATION = Rotation(0.0)


@dataclass(frozen=True)
class Draft:
    """A draft model in parts.  Weights have the engines' names, with `layers.0.` for EAGLE-3's `midlayer.`."""

    kind: str
    weights: Mapping[str, Tensor]
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    taps: tuple[int, ...] = ()
    """Outputs of target layers, counted from 0."""
    heads: tuple[int, int, int] = (1, 1, 1)
    """Query heads, key heads, head size."""
    rotation: Rotation = NO_ROTATION
    eps: float = 0.0
    flags: frozenset[str] = frozenset()
    """norm_before_residual, fc_norm, norm_output, bias."""
    ids: Tensor | None = None
    """[D], the target's ids of the draft vocabulary; None for all."""
    head: Tensor | None = None
    """[D, H]; None for the target's own."""
    mask: int | None = None
    """Token of masked slots."""
    skip: int = 1
    """Input slots of a block before the first one that drafts."""
    order: tuple[int, ...] = ()
    """Which head drafts which depth."""
    causal: bool = False
    """Whether a slot of a block attends only to earlier slots."""
    markov: str = ""
    """For a DSpark: vanilla, gated or rnn."""
    window: int | None = None
    """Positions that a slot attends to, itself and those just before it; None for all."""
    candidates: int = 0
    """For a DFlash 2: tokens of a row that its selector chooses from."""
    prefix: int = 0
    """Slots at the start of a block that Domino's head does not correct."""
    first_norm: bool = False
    """Whether every layer normalises the keys of a block's context with the first layer's weights."""
    unread: tuple[str, ...] = ()
    """Weights of the folder that the engine silently ignores."""


# ── from a folder ─────────────────────────────────────────────────────────────────────────────────────────────────────


def of_folder(folder: str | Path, engine: str = "vllm") -> Draft:
    """A folder as `engine` reads it.  Raises ExportError if it can't be read, or its kind is unknown here."""
    folder = Path(folder)
    try:
        config = parse_json(whole_text(folder / "config.json"))
        weights = load_file(regular(folder / "model.safetensors"))
        kind = kind_of(config)
        if kind == "medusa":
            return _medusa(config, weights)
        if kind in KINDS:
            return (_block if kind in BLOCKS else _eagle3)(kind, config, weights, engine)
    except ExportError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"{folder} can't be read as a draft model: {error}; export it again") from None
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ExportError(f"config.json of {folder} lacks what an engine reads ({error!r}); export it again") from None
    raise ExportError(f"{folder} has a kind of drafter that can't be compared; use one of {', '.join(KINDS)}")


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The kind that an engine infers from a config.json; None if unknown."""
    model_type = config.get("speculators_model_type")
    if model_type is not None:
        return str(model_type)
    name = (config.get("architectures") or [""])[0]
    if config.get("model_type") == "medusa":
        return "medusa"
    if "dflash_config" in config:
        assumed = "dflash2" if "selector_rank" in config["dflash_config"] else "dflash"
        return str(config["dflash_config"].get("projector_type", assumed))
    if name == "LlamaForCausalLMEagle3":
        return "eagle3"
    return "small_model" if name.endswith("ForCausalLM") else None


def _medusa(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Draft:
    # vLLM creates biases only if the config declares them, and ignores weights it has no parameter for
    flags = frozenset({"bias"} if config.get("medusa_fc_bias") else ())
    unread = () if flags else tuple(sorted(name for name in weights if name.endswith(".bias")))
    return Draft("medusa", weights, flags=flags, order=tuple(range(config["num_heads"])), unread=unread)


def _layers(kind: str, layers: Mapping[str, Any], weights: Mapping[str, Tensor], theta: float, **more: Any) -> Draft:
    """The parts common to all kinds except Medusa.  theta: the rotary base if the config names none."""
    heads = layers["num_attention_heads"]
    size = layers.get("head_dim") or layers["hidden_size"] // heads
    return Draft(
        kind, **parts_of(weights), heads=(heads, layers.get("num_key_value_heads") or heads, size),
        rotation=_rotation(layers, theta), eps=layers.get("rms_norm_eps", 1e-6), **more,
    )  # fmt: skip


def _eagle3(kind: str, config: Mapping[str, Any], weights: Mapping[str, Tensor], engine: str) -> Draft:
    layers = config.get("transformer_layer_config", config)
    eagle = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        raise ExportError(
            "eagle_aux_hidden_state_layer_ids is missing from config.json, so engines would guess the layers; "
            "export it again"
        )
    shift = 0 if engine == "sglang" and "eagle_config" in config else 1
    weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    # defaults differ by format: speculators' EAGLE-3 norms the residual
    assumed = kind == "eagle3" and "speculators_model_type" in config
    flags = {key for key in ("fc_norm", "norm_output") if config.get(key)}
    flags |= {"norm_before_residual"} if config.get("norm_before_residual", assumed) else set()
    mask = config.get("mask_token_id", config.get("pard_token"))
    return _layers(
        kind, layers, weights, 1e4, taps=tuple(int(k) - shift for k in ids), flags=frozenset(flags), mask=mask
    )  # fmt: skip


def _block(kind: str, config: Mapping[str, Any], weights: Mapping[str, Tensor], engine: str) -> Draft:
    layers = config.get("transformer_layer_config", config)
    window = layers.get("sliding_window") if "sliding_attention" in layers.get("layer_types", ()) else None
    settings = {
        **(config.get("dflash_config") or {}),
        **config,
    }  # SGLang reads a head's keys at the top level, SpecForge in dflash_config
    if "speculators_model_type" in config:
        taps = [int(k) - 1 for k in config["aux_hidden_state_layer_ids"]]
        # vLLM's first model runner ignores this key for a DFlash, its second refuses it; the default is false
        in_anchor = config.get("sample_from_anchor", False) and (engine != "vllm" or kind == "dspark")
        # vLLM applies this key to all layers, not only to those with a window; for a DSpark it ignores it
        causal = kind != "dspark" and not config.get("sliding_window_non_causal", True)
    else:
        # without a key, layers with a window are causal within a block
        taps, causal = settings["target_layer_ids"], settings.get("is_causal", settings.get("causal", bool(window)))
        in_anchor = kind == "dspark" or (kind == "domino" and settings.get("shift_label", False))
        if kind == "dspark" and engine == "vllm":  # the default is true without speculators_model_type
            in_anchor = config.get("sample_from_anchor", True)
    return _layers(
        kind, layers, weights, 1e6, taps=tuple(taps), mask=settings["mask_token_id"], skip=0 if in_anchor else 1,
        causal=bool(causal), window=window, candidates=settings.get("selector_top_k", 0),
        markov=settings.get("markov_head_type", "vanilla") if kind == "dspark" else "",
        prefix=settings["pure_draft_prefix_len"] if kind == "domino" else 0,
    )  # fmt: skip


def _rotation(layers: Mapping[str, Any], theta: float) -> Rotation:
    # transformers lets rope_scaling replace rope_parameters, even if it is empty
    rope = layers.get("rope_scaling" if "rope_scaling" in layers else "rope_parameters") or {}
    base = rope.get("rope_theta", layers.get("rope_theta", theta))
    share = rope.get("partial_rotary_factor", layers.get("partial_rotary_factor", 1.0))
    return Rotation(float(base), float(share), _scaling(rope, layers.get("max_position_embeddings", LONGEST)))


def _scaling(rope: Mapping[str, Any], longest: int) -> str:
    """The scaling of a rotation in a canonical form, so that equal ones compare equal.  Raises ExportError if unknown.

    longest: the trained length if the config does not have it, by transformers' rule, which vLLM follows.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ""
    if kind not in SCALINGS:
        raise ExportError(f"rotary scaling {kind!r} is not supported; use one of {', '.join(SCALINGS)}")
    ignored = ("rope_theta", "partial_rotary_factor", "type", "rope_type")
    settings = {key: float(value) if type(value) is int else value for key, value in rope.items() if key not in ignored}
    if kind != "linear":
        settings.setdefault(TRAINED, float(longest))
    required = ["factor", *(("low_freq_factor", "high_freq_factor") if kind == "llama3" else ())]
    if missing := [key for key in required if not isinstance(settings.get(key), float)]:
        raise ExportError(f"rotary scaling {kind!r} lacks {', '.join(missing)}; write them into config.json")
    return json.dumps({"rope_type": kind, **settings}, sort_keys=True)


def parts_of(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of a `Draft` from named weights; without the confidence head, which changes no token."""
    ignored = ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight", "confidence_head.")
    offsets = weights.get("d2t")
    return {
        "norms": {name: weight for name, weight in weights.items() if "norm" in name},
        "weights": {name: w for name, w in weights.items() if "norm" not in name and not name.startswith(ignored)},
        "ids": None if offsets is None else offsets + torch.arange(len(offsets)), "head": weights.get("lm_head.weight"),
    }  # fmt: skip


# ── from our own model ────────────────────────────────────────────────────────────────────────────────────────────────


def of_model(model: DraftModel) -> Draft:
    """The same parts from one of our models, drafting from the vocabulary that it is exported with.  Raises ExportError
    for a kind that is unknown here."""
    model = model.over_all_tokens()
    config, kind = model.config, model.config.kind
    weights = {name.removeprefix("backbone."): weight.detach().cpu() for name, weight in model.state_dict().items()}
    if kind == "medusa":
        named = {_medusa_name(name, config.layers): weight for name, weight in weights.items() if name != "accuracies"}
        if config.head == "target":
            named |= dict.fromkeys((f"lm_heads.{k}.weight" for k in range(config.heads)), _target_head(model))
        return Draft("medusa", named, flags=frozenset({"bias"}), order=tuple(range(config.heads)))
    if kind not in KINDS:
        raise ExportError(f"{kind} can't be compared; use one of {', '.join(KINDS)}")
    weights = {name.removeprefix("head."): weight for name, weight in weights.items()}
    weights.pop("candidate_selector.share", None)  # the codebooks include it
    rotation = Rotation(config.rope_theta, config.partial_rotary_factor, _scaling(config.rope_scaling or {}, LONGEST))
    flags = frozenset(
        name for name in ("norm_before_residual", "fc_norm", "norm_output") if getattr(config, name, False)
    )
    parts = parts_of(weights)
    if parts["head"] is None and kind not in BLOCKS:  # the folder has a copy of the target's
        parts["head"] = _target_head(model)
    return Draft(
        kind, taps=tuple(model.taps), heads=(config.heads, config.kv_heads, config.head_dim), rotation=rotation,
        eps=config.rms_norm_eps, flags=flags, mask=getattr(getattr(model, "backbone", model), "mask_token", None),
        skip=0 if getattr(config, "anchor_predicts", False) else 1, markov=getattr(config, "markov", ""),
        window=getattr(config, "window", None), candidates=getattr(config, "candidates", 0),
        prefix=getattr(config, "pure_prefix", 0), **parts,
    )  # fmt: skip


def _target_head(model: DraftModel) -> Tensor:
    return model.target.head_rows(torch.arange(model.target.spec.vocabulary, device=model.target.device)).cpu()


def _medusa_name(name: str, layers: int) -> str:
    _, k, n, part = name.split(".", 3)
    return f"lm_heads.{k}.weight" if int(n) == layers else f"blocks.{k}.layers.{n}.{part.removeprefix('linear.')}"
