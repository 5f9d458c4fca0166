"""An exported draft folder as an engine reads it: plain torch, written from the engines' conventions, without our exporter.

A `Draft` holds what a folder says in parts that can be exchanged: taps, rotation, norms, vocabulary, alignment, sight, weights.
`of_folder` reads them from the files, `of_model` from one of our models, and `drafted` computes the chain either means behind a
text, from the target's own states, with a note of what comes out of every stage.  No cache: all of a text is read for each
draft, which is slow and has nothing to go stale.

Conventions, as vLLM 0.32 reads them.  EAGLE-3 and P-EAGLE: layer id k is the state after k layers, pairs (state i, token i + 1)
turn by position i.  DFlash: `target_layer_ids` are outputs of layers counted from 0, speculators' ids one more; K drafts take
the anchor and K masks; the context enters every layer's keys and values without its input norm.  Medusa: head k reads the final
state of the last token with an anchor behind it.  SGLang differs in EAGLE-3's ids: outputs of layers counted from 0.

n tokens, K drafted, T taps, L target layers, H hidden size, V vocabulary, D draft vocabulary, h heads, d head size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import ExportError
from outrider.nn.draft_model import DraftModel
from outrider.targets.transformers import TransformersTarget

BLOCKS = ("dflash", "dspark", "domino")
KINDS = ("eagle3", "peagle", "medusa", *BLOCKS)
STRETCHES = ("linear", "llama3", "yarn")
TRAINED = "original_max_position_embeddings"
LONGEST = 32_768
"""A context that no config names: transformers' for Qwen3, whose layers ours are."""


class States(NamedTuple):
    """What the target made of a text."""

    tokens: list[int]
    layers: Tensor
    """[n, L, H], what comes out of each decoder layer."""
    hidden: Tensor
    """[n, H], after the final norm."""
    target: TransformersTarget


class Rotation(NamedTuple):
    """How queries and keys turn by position."""

    theta: float
    share: float = 1.0
    """Of a head that turns."""
    scaling: str = ""
    """Stretching, as `_stretch` writes it; empty for none."""


UNTURNED = Rotation(0.0)


@dataclass(frozen=True)
class Draft:
    """A draft model in parts.  Weights have the engines' names, `layers.0.` where EAGLE-3's may be `midlayer.`."""

    kind: str
    weights: Mapping[str, Tensor]
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    taps: tuple[int, ...] = ()
    """Outputs of target layers, counted from 0."""
    heads: tuple[int, int, int] = (1, 1, 1)
    """Query heads, key heads, head size."""
    rotation: Rotation = UNTURNED
    eps: float = 0.0
    flags: frozenset[str] = frozenset()
    """norm_before_residual, fc_norm, norm_output, bias."""
    ids: Tensor | None = None
    """[D], the target's ids of what can be drafted; None for all."""
    head: Tensor | None = None
    """[D, H]; None for the target's own."""
    mask: int | None = None
    """Token that stands in masked slots."""
    skip: int = 1
    """Input slots of a block before the one that drafts first."""
    order: tuple[int, ...] = ()
    """Which head drafts which depth."""
    causal: bool = False
    """A block's slots don't see those behind them."""
    markov: str = ""
    """Of a DSpark: vanilla, gated or rnn."""
    prefix: int = 0
    """Slots at a block's beginning that Domino's head leaves alone."""
    first_norm: bool = False
    """Keys of a block's context are normed by the first layer's weights in every layer."""
    unread: tuple[str, ...] = ()
    """Weights of the folder that the engine leaves out in silence."""


# ── from a folder ─────────────────────────────────────────────────────────────────────────────────────────────────────


def of_folder(folder: str | Path, engine: str = "vllm") -> Draft:
    """What `engine` takes a folder for.  Raises ExportError where it can't be read, or is of no kind that is known here."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
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
    raise ExportError(f"{folder} is of a kind that is not read here; known: {', '.join(KINDS)}")


def kind_of(config: Mapping[str, Any]) -> str | None:
    """What an engine takes a config.json for."""
    said = config.get("speculators_model_type")
    if said is not None:
        return str(said)
    name = (config.get("architectures") or [""])[0]
    if config.get("model_type") == "medusa":
        return "medusa"
    if "dflash_config" in config:
        return str(config["dflash_config"].get("projector_type", "dflash"))
    if name == "LlamaForCausalLMEagle3":
        return "eagle3"
    return "small_model" if name.endswith("ForCausalLM") else None


def _medusa(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Draft:
    # vLLM makes no bias unless it is announced, and passes over weights that it has no place for
    flags = frozenset({"bias"} if config.get("medusa_fc_bias") else ())
    unread = () if flags else tuple(sorted(name for name in weights if name.endswith(".bias")))
    return Draft("medusa", weights, flags=flags, order=tuple(range(config["num_heads"])), unread=unread)


def _layers(kind: str, layers: Mapping[str, Any], weights: Mapping[str, Tensor], theta: float, **more: Any) -> Draft:
    """What all but Medusa have.  theta: of rotary angles whose base the config leaves out."""
    heads = layers["num_attention_heads"]
    size = layers.get("head_dim") or layers["hidden_size"] // heads
    return Draft(
        kind, **_parts(weights), heads=(heads, layers.get("num_key_value_heads") or heads, size),
        rotation=_rotation(layers, theta), eps=layers.get("rms_norm_eps", 1e-6), **more,
    )  # fmt: skip


def _eagle3(kind: str, config: Mapping[str, Any], weights: Mapping[str, Tensor], engine: str) -> Draft:
    layers = config.get("transformer_layer_config", config)
    own = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        raise ExportError("eagle_aux_hidden_state_layer_ids is missing, so an engine guesses; export again")
    shift = 0 if engine == "sglang" and "eagle_config" in config else 1
    weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    # what a config leaves out differs by format: speculators' EAGLE-3 norms the residual
    assumed = kind == "eagle3" and "speculators_model_type" in config
    flags = {key for key in ("fc_norm", "norm_output") if config.get(key)}
    flags |= {"norm_before_residual"} if config.get("norm_before_residual", assumed) else set()
    mask = config.get("mask_token_id", config.get("pard_token"))
    return _layers(
        kind, layers, weights, 1e4, taps=tuple(int(k) - shift for k in ids), flags=frozenset(flags), mask=mask
    )  # fmt: skip


def _block(kind: str, config: Mapping[str, Any], weights: Mapping[str, Tensor], engine: str) -> Draft:
    layers = config.get("transformer_layer_config", config)
    own = {**(config.get("dflash_config") or {}), **config}  # SGLang reads a head's keys at the top, SpecForge below
    if "speculators_model_type" in config:
        taps = [int(k) - 1 for k in config["aux_hidden_state_layer_ids"]]
        # vLLM's first model runner passes over this key for a DFlash, its second refuses it; without it, it is false
        in_anchor = config.get("sample_from_anchor", False) and (engine != "vllm" or kind == "dspark")
        # vLLM lets this key speak for all layers, not for those alone that see a window; of a DSpark it doesn't read it
        causal = kind != "dspark" and not config.get("sliding_window_non_causal", True)
    else:
        taps, causal = own["target_layer_ids"], bool(own.get("causal", False))
        in_anchor = kind == "dspark" or (kind == "domino" and own.get("shift_label", False))
        if kind == "dspark" and engine == "vllm":  # where there is no speculators_model_type, it is true without the key
            in_anchor = config.get("sample_from_anchor", True)
    return _layers(
        kind, layers, weights, 1e6, taps=tuple(taps), mask=own["mask_token_id"], skip=0 if in_anchor else 1, causal=causal,
        markov=own.get("markov_head_type", "vanilla") if kind == "dspark" else "",
        prefix=own["pure_draft_prefix_len"] if kind == "domino" else 0,
    )  # fmt: skip


def _rotation(layers: Mapping[str, Any], theta: float) -> Rotation:
    # transformers lets rope_scaling take the place of rope_parameters, even where it says nothing
    rope = layers.get("rope_scaling" if "rope_scaling" in layers else "rope_parameters") or {}
    found = rope.get("rope_theta", layers.get("rope_theta", theta))
    share = rope.get("partial_rotary_factor", layers.get("partial_rotary_factor", 1.0))
    return Rotation(float(found), float(share), _stretch(rope, layers.get("max_position_embeddings", LONGEST)))


def _stretch(rope: Mapping[str, Any], longest: int) -> str:
    """Stretching in one spelling, so that what turns alike reads alike.  Raises ExportError for a way that is not read here.

    longest: what was trained on where the config doesn't say it, by the rule of transformers, which vLLM follows.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ""
    if kind not in STRETCHES:
        raise ExportError(f"rotary angles of type {kind!r} are not read here, those of {', '.join(STRETCHES)} are")
    aside = ("rope_theta", "partial_rotary_factor", "type", "rope_type")
    said = {key: float(value) if type(value) is int else value for key, value in rope.items() if key not in aside}
    if kind != "linear":
        said.setdefault(TRAINED, float(longest))
    wanted = ["factor", *(("low_freq_factor", "high_freq_factor") if kind == "llama3" else ())]
    if missing := [key for key in wanted if not isinstance(said.get(key), float)]:
        raise ExportError(f"rotary angles of type {kind!r} lack {', '.join(missing)}")
    return json.dumps({"rope_type": kind, **said}, sort_keys=True)


def _parts(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of a `Draft` from weights by their names; without confidences, which change no token."""
    aside = ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight", "confidence_head.")
    offsets = weights.get("d2t")
    return {
        "norms": {name: weight for name, weight in weights.items() if "norm" in name},
        "weights": {name: w for name, w in weights.items() if "norm" not in name and not name.startswith(aside)},
        "ids": None if offsets is None else offsets + torch.arange(len(offsets)), "head": weights.get("lm_head.weight"),
    }  # fmt: skip


# ── from our own model ────────────────────────────────────────────────────────────────────────────────────────────────


def of_model(model: DraftModel) -> Draft:
    """The same parts of one of our models.  Raises ExportError for a kind that is not known here."""
    config, kind = model.config, model.config.kind
    weights = {name.removeprefix("backbone."): weight.detach().cpu() for name, weight in model.state_dict().items()}
    if kind == "medusa":
        named = {_medusa_name(name, config.layers): weight for name, weight in weights.items() if name != "accuracies"}
        if config.head == "target":
            named |= dict.fromkeys((f"lm_heads.{k}.weight" for k in range(config.heads)), _target_head(model))
        return Draft("medusa", named, flags=frozenset({"bias"}), order=tuple(range(config.heads)))
    if kind not in KINDS:
        raise ExportError(f"{kind} is not read here; known: {', '.join(KINDS)}")
    weights = {name.removeprefix("head."): weight for name, weight in weights.items()}
    rotation = Rotation(config.rope_theta, config.partial_rotary_factor, _stretch(config.rope_scaling or {}, LONGEST))
    flags = frozenset(name for name in ("norm_before_residual", "fc_norm", "norm_output") if getattr(config, name, False))
    parts = _parts(weights)
    if parts["head"] is None and kind not in BLOCKS:  # a copy of the target's stands in the folder
        parts["head"] = _target_head(model)
    return Draft(
        kind, taps=tuple(model.taps), heads=(config.heads, config.kv_heads, config.head_dim), rotation=rotation,
        eps=config.rms_norm_eps, flags=flags, mask=getattr(getattr(model, "backbone", model), "mask_token", None),
        skip=0 if getattr(config, "anchor_predicts", False) else 1, markov=getattr(config, "markov", ""),
        prefix=getattr(config, "pure_prefix", 0), **parts,
    )  # fmt: skip


def _target_head(model: DraftModel) -> Tensor:
    return model.target.head_rows(torch.arange(model.target.spec.vocabulary, device=model.target.device)).cpu()


def _medusa_name(name: str, layers: int) -> str:
    _, k, n, part = name.split(".", 3)
    return f"lm_heads.{k}.weight" if int(n) == layers else f"blocks.{k}.layers.{n}.{part.removeprefix('linear.')}"


# ── what it drafts ────────────────────────────────────────────────────────────────────────────────────────────────────


class Drafted(NamedTuple):
    """One chain, and what came out of each stage on the way."""

    tokens: list[int]
    stages: dict[str, Tensor]


@torch.inference_mode()
def states(target: TransformersTarget, tokens: Sequence[int]) -> States:
    """The target's states of a whole text."""
    every = tuple(range(target.spec.layers))
    hidden, layers = target.read(torch.tensor([list(tokens)], device=target.device), every)
    assert layers is not None
    return States(list(tokens), layers[0].float(), hidden[0].float(), target)


@torch.inference_mode()
def drafted(draft: Draft, seen: States, anchor: int, length: int) -> Drafted:
    """The chain of `length` tokens behind the token at place `anchor` of a text, whose states before it are known."""
    chains = {"eagle3": _eagle3_chain, "peagle": _peagle_chain, "medusa": _medusa_chain}
    stages: dict[str, Tensor] = {}
    return Drafted(chains.get(draft.kind, _block_chain)(draft, seen, anchor, length, stages), stages)


def _eagle3_chain(draft: Draft, seen: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    words = _embedded(seen, seen.tokens[1 : anchor + 1])
    features = _fused(draft, seen, anchor, stages)
    found: list[int] = []
    for step in range(length):
        note = stages if step == 0 else {}
        state = _layer(draft, 0, words, features, None, note)
        normed = _norm(draft, "norm", state)
        note["norm"] = normed[-1:]
        found.append(_choice(draft, seen, normed[-1], note))
        following = normed if "norm_output" in draft.flags else state
        words = torch.cat([words, _embedded(seen, found[-1:])])
        features = torch.cat([features, following[-1:]])
    return found


def _peagle_chain(draft: Draft, seen: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    features = _fused(draft, seen, anchor, stages)
    empty = _linear(draft, "fc", draft.weights["mask_hidden"].float().flatten()[None])
    assert draft.mask is not None
    words = _embedded(seen, [*seen.tokens[1 : anchor + 1], *[draft.mask] * (length - 1)])
    x = torch.cat([features, empty.expand(length - 1, -1)])
    return [_choice(draft, seen, row, stages) for row in _through(draft, words, x, None, length, stages)]


def _block_chain(draft: Draft, seen: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    context = _norm(draft, "hidden_norm", _fused(draft, seen, anchor, stages))
    stages["hidden_norm"] = context
    assert draft.mask is not None
    slots = _embedded(seen, [seen.tokens[anchor], *[draft.mask] * (length + draft.skip - 1)])
    x = _through(draft, None, slots, context, length, stages)
    if draft.kind == "dflash":
        return [_choice(draft, seen, row, stages) for row in x]
    correct = _markov if draft.kind == "dspark" else _domino
    found, memory = [seen.tokens[anchor]], torch.zeros(1)
    for k, row in enumerate(x):
        added, memory = correct(draft, seen, row.cpu(), found[-1], memory)
        stages[f"correction {k}"] = added = added * (k >= draft.prefix)
        found.append(_choice(draft, seen, row, stages, added))
    return found[1:]


def _through(
    draft: Draft, words: Tensor | None, x: Tensor, context: Tensor | None, length: int, stages: dict[str, Tensor]
) -> Tensor:  # fmt: skip
    """Rows x [n, H] through all layers, and the last `length` of them normed.  words: beside x in the first layer."""
    for layer in range(1 + max(int(name.split(".")[1]) for name in draft.weights if name.startswith("layers."))):
        x = _layer(draft, layer, words if layer == 0 else None, x, context, stages)
    x = stages["norm"] = _norm(draft, "norm", x)[-length:]
    return x


def _markov(draft: Draft, seen: States, row: Tensor, token: int, memory: Tensor) -> tuple[Tensor, Tensor]:
    """DSpark's correction [V] of a slot behind a token, and what it remembers along the block."""
    word = draft.weights["markov_head.markov_w1.weight"][token].float()
    if draft.markov == "gated":
        word = _linear(draft, "markov_head.gate_proj", torch.cat([row, word]), has_bias=True).sigmoid() * word
    elif draft.markov == "rnn":
        joint = torch.cat([memory.expand(len(word)), word, row])
        keep, new, out = _linear(draft, "markov_head.joint_proj", joint, has_bias=True).chunk(3)
        memory = keep.sigmoid() * memory + (1 - keep.sigmoid()) * new.tanh()
        word = out.tanh()
    return _linear(draft, "markov_head.markov_w2", word), memory


def _domino(draft: Draft, seen: States, row: Tensor, token: int, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Domino's correction [V] of a slot behind a token, and the state of its GRU."""
    read, kept = (draft.weights[f"prefix_gru.weight_{part}_l0"].float() for part in ("ih", "hh"))
    word = _embedded(seen, [token]).cpu()
    memory = torch.gru_cell(word, memory.expand(1, kept.shape[1]), read, kept)[0]
    return _linear(draft, "embed_proj.2", F.silu(_linear(draft, "embed_proj.0", torch.cat([row, memory])))), memory


def _medusa_chain(draft: Draft, seen: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    found = []
    for depth in range(length):
        k, x, n = draft.order[depth], seen.hidden[anchor - 1], 0
        while (name := f"blocks.{k}.layers.{n}") + ".weight" in draft.weights:
            x, n = x + F.silu(_linear(draft, name, x, "bias" in draft.flags)), n + 1
        stages[f"head {depth}"] = x
        found.append(int(_linear(draft, f"lm_heads.{k}", x).argmax()))
    return found


def _embedded(seen: States, tokens: Sequence[int]) -> Tensor:
    return seen.target.embed(torch.tensor(list(tokens), device=seen.target.device)).float()


def _fused(draft: Draft, seen: States, anchor: int, stages: dict[str, Tensor]) -> Tensor:
    """Features [anchor, H] of the tokens before the anchor."""
    taps = seen.layers[:anchor, list(draft.taps)]
    stages["taps"] = taps
    if "fc_norm" in draft.flags:
        taps = torch.stack([_norm(draft, f"fc_norm.{i}", taps[:, i]) for i in range(len(draft.taps))], 1)
    stages["fc"] = _linear(draft, "fc", taps.flatten(1))
    return stages["fc"]


def _linear(draft: Draft, name: str, x: Tensor, has_bias: bool = False) -> Tensor:
    bias = draft.weights[name + ".bias"].float() if has_bias else None
    return F.linear(x, draft.weights[name + ".weight"].float(), bias)


def _norm(draft: Draft, name: str, x: Tensor) -> Tensor:
    weight = draft.norms[name + ".weight"].float()
    return F.rms_norm(x, weight.shape, weight, draft.eps)


def _layer(
    draft: Draft, number: int, words: Tensor | None, x: Tensor, context: Tensor | None, stages: dict[str, Tensor]
) -> Tensor:  # fmt: skip
    """One decoder layer over rows x [n, H], causal, or over a block behind a context that its rows see."""
    name = f"layers.{number}"
    residual = x
    if words is None:
        rows = _norm(draft, f"{name}.input_layernorm", x)
    else:
        normed = _norm(draft, f"{name}.hidden_norm", x)
        residual = normed if "norm_before_residual" in draft.flags else x
        rows = torch.cat([_norm(draft, f"{name}.input_layernorm", words), normed], -1)
    stages[f"{name} norms"] = rows
    keyed, before = (rows, 0) if context is None else (torch.cat([context, rows]), len(context))
    heads, kv_heads, _ = draft.heads
    part = f"{name}.self_attn."
    q = _turned(draft, _headed(draft, part + "q_norm", _linear(draft, part + "q_proj", rows), heads), before)
    keys = _linear(draft, part + "k_proj", keyed)
    k = _headed(draft, part + "k_norm", keys, kv_heads)
    if draft.first_norm and context is not None:
        k = torch.cat([_headed(draft, "layers.0.self_attn.k_norm", keys[:before], kv_heads), k[:, before:]], 1)
    k = stages[f"{name} rotation"] = _turned(draft, k)
    v = _linear(draft, part + "v_proj", keyed).unflatten(-1, (kv_heads, -1)).transpose(0, 1)
    sight = torch.ones(len(rows), len(keyed), dtype=torch.bool, device=x.device)
    sight = sight.tril(before) if context is None or draft.causal else sight
    found = F.scaled_dot_product_attention(q[None], k[None], v[None], sight, enable_gqa=True)[0]
    x = residual + _linear(draft, part + "o_proj", found.transpose(0, 1).flatten(1))
    stages[f"{name} attention"] = x
    rows = _norm(draft, f"{name}.post_attention_layernorm", x)
    gate, up = (_linear(draft, f"{name}.mlp.{half}_proj", rows) for half in ("gate", "up"))
    x = stages[f"{name} out"] = x + _linear(draft, f"{name}.mlp.down_proj", F.silu(gate) * up)
    return x


def _headed(draft: Draft, norm: str, x: Tensor, heads: int) -> Tensor:
    """[h, n, d], normed by head where the folder has such a norm."""
    x = x.unflatten(-1, (heads, draft.heads[2]))
    return (_norm(draft, norm, x) if norm + ".weight" in draft.norms else x).transpose(0, 1)


def _turned(draft: Draft, x: Tensor, first: int = 0) -> Tensor:
    """x [h, n, d] turned by places from `first` on, in pairs of one number of each half."""
    turning = int(draft.heads[2] * draft.rotation.share)
    speed, scale = _speeds(draft.rotation, turning)
    angle = torch.arange(first, first + x.shape[1]).float()[:, None] * speed
    cos, sin = (scale * angle.cos()).to(x.device), (scale * angle.sin()).to(x.device)
    one, other, rest = x.tensor_split((turning // 2, turning), -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)


def _speeds(rotation: Rotation, turning: int) -> tuple[Tensor, float]:
    """By how much each pair turns a place, [turning / 2], and what cos and sin are multiplied by, as vLLM's layers have it."""
    speed = rotation.theta ** -(torch.arange(0, turning, 2, dtype=torch.float32) / turning)
    if not rotation.scaling:
        return speed, 1.0
    said = json.loads(rotation.scaling)
    factor, kind = said["factor"], said["rope_type"]
    if kind == "linear":
        return speed / factor, 1.0
    if kind == "llama3":
        turns = said[TRAINED] * speed / (2 * math.pi)  # of the pair, in a text as long as those it was trained on
        kept = ((turns - said["low_freq_factor"]) / (said["high_freq_factor"] - said["low_freq_factor"])).clamp(0, 1)
        return speed * (kept + (1 - kept) / factor), 1.0
    # YaRN: the pairs between which turning goes over from as it was to slowed
    begin, end = (
        turning * math.log(said[TRAINED] / (turns * 2 * math.pi)) / (2 * math.log(rotation.theta))
        for turns in (said.get("beta_fast") or 32, said.get("beta_slow") or 1)
    )
    if said.get("truncate", True):
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, turning - 1)
    slowed = ((torch.arange(turning // 2) - begin) / max(end - begin, 1e-3)).clamp(0, 1)
    return speed * (1 - slowed + slowed / factor), _loudness(said)


def _loudness(said: Mapping[str, Any]) -> float:
    """YaRN: what cos and sin are multiplied by."""

    def by(weight: float) -> float:
        return 0.1 * weight * math.log(said["factor"]) + 1 if said["factor"] > 1 else 1.0

    if said.get("attention_factor") is not None:
        return float(said["attention_factor"])
    if said.get("mscale") and said.get("mscale_all_dim"):
        return by(said["mscale"]) / by(said["mscale_all_dim"])
    return by(1)


def _choice(
    draft: Draft, seen: States, state: Tensor, stages: dict[str, Tensor], added: Tensor | None = None
) -> int:  # fmt: skip
    logits = seen.target.head(state[None])[0] if draft.head is None else draft.head.float() @ state.cpu()
    logits = logits if added is None else logits + added.to(logits.device)
    stages.setdefault("head", logits)
    best = int(logits.argmax())
    chosen = best if draft.ids is None else int(draft.ids[best])
    stages.setdefault("token", torch.tensor([float(chosen)]))
    return chosen
