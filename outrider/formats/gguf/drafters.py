"""Drafters as GGUF: dflash and dspark in llama.cpp's architecture `dflash`, eagle3 in `eagle3`.

Embedding and head are the target's, which llama.cpp takes from the target's file.  llama.cpp taps the inputs of
layers: tap k is `target_layers` k + 1, and the output of the last layer of a Qwen3 or Llama is not available.  A dflash
that drafts in the anchor's slot is written as a DSpark with a zero Markov head, since only a DSpark reads that slot.
EAGLE-3's queries and keys are interleaved, like a llama's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ExportError
from outrider.formats import keys, released
from outrider.formats.gguf import file, model, reading, tokenizer
from outrider.formats.gguf.settings import check, layer
from outrider.formats.keys import OURS as KIND
from outrider.formats.layout import Config, Source
from outrider.method import Method
from outrider.targets.hf.transformers import TransformersTarget

SHIFT = 1
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Parts of a decoder layer: our name to llama.cpp's."""
BLOCK = [
    *((f"backbone.layers.*.{ours}.weight", f"blk.*.{theirs}.weight") for ours, theirs in PARTS.items()),
    ("backbone.fc.weight", "fc.weight"), ("backbone.hidden_norm.weight", "enc.output_norm.weight"),
    ("backbone.norm.weight", "output_norm.weight"),
]  # fmt: skip
MARKOV = ("markov_w1.weight", "markov_w2.weight")
SELECTOR = "selector_hidden.weight"
"""A tensor that only a DFlash 2 has."""
BLOCK_SIZE = 16
"""Slots of a block if the file does not specify it."""
INTERLEAVED = {"blk.0.attn_q.weight": "head_count", "blk.0.attn_k.weight": "head_count_kv"}
"""Weights of an EAGLE-3 with interleaved rows, and the key of their number of heads."""


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def common(source: Source, architecture: str, layers: int) -> dict[str, Any]:
    """The keys that all drafter files share."""
    spec = source.target.spec
    renamed = {
        "block_count": layers, "context_length": spec.context, "embedding_length": spec.hidden,
        "vocab_size": spec.vocabulary, **model.layer(source.sizes),
        "target_layers": [tap + SHIFT for tap in source.model.taps],
    }  # fmt: skip
    return {
        **file.general(architecture, file.precision_of(source)), KIND: source.settings.kind,
        **{f"{architecture}.{key}": value for key, value in renamed.items()}, **model.stretch(source.sizes),
        **tokenizer.keys(source.target.tokenizer, spec.vocabulary, source.target.model),
    }  # fmt: skip


def block(source: Source, confidence: bool | None = None) -> dict[str, Any]:
    """Keys of a block drafter.  confidence: whether it has a confidence head; None for one without a Markov head."""
    backbone: Any = source.model.backbone
    keys = common(source, "dflash", source.settings.layers)
    keys |= {"dflash.block_size": backbone.width, "tokenizer.ggml.mask_token_id": source.mask_token}
    if confidence is None and not source.settings.anchor_predicts:
        return keys
    return keys | {
        "dflash.sample_from_anchor": source.settings.anchor_predicts,
        "dflash.has_confidence_head": bool(confidence),
    }


def read_block(config: Config, target: TransformersTarget, method: Method) -> dict[str, Any]:
    """The settings of a block drafter, except for its heads."""
    check(config, target)
    if "d2t" in config[reading.SHAPES]:
        raise ExportError("it has d2t, but Outrider drafts blocks from the whole vocabulary; use a draft without")
    return {
        **layer(config), "layers": config["dflash.block_count"],
        "anchor_predicts": keys.anchor_predicts(method, "gguf", config),
        "block": keys.length(method, "gguf", {}, {"dflash.block_size": BLOCK_SIZE, **config}),
        "taps": released.taps(config, "gguf", method), "init_from_layers": None,
        "mask_token": released.mask(config, "tokenizer.ggml.mask_token_id", target),
    }  # fmt: skip


def is_block(kind: str, markov: bool) -> Callable[[Config, Collection[str]], bool]:
    """Whether a file holds this kind of block drafter: by our key if present, else by whether it has a Markov head.

    Raises ExportError for a drafter of this architecture that Outrider does not have.
    """

    def fits(config: Config, names: Collection[str]) -> bool:
        if config.get("general.architecture") != "dflash":
            return False
        if SELECTOR in names:  # a DFlash 2
            return False
        if config.get("dflash.hyper_connection.count"):
            raise ExportError(
                "it is a DSpark of DeepSeek-V4's layers, which Outrider has no drafter for; use one of plain layers"
            )
        return config[KIND] == kind if KIND in config else (MARKOV[0] in names) is markov

    return fits


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors(weights: Mapping[str, Tensor], keys: Config, source: Source) -> dict[str, Tensor]:
    """Converts a drafter's weights from the names of its layout to what the file stores."""
    theirs = {name: file_name for file_name, name in reading.HEADS.items()}
    # t2d follows from d2t and is not stored
    tensors = {theirs.get(name, name): weight for name, weight in weights.items() if name != "t2d"}
    if keys["general.architecture"] == "eagle3":
        for name, count in INTERLEAVED.items():
            tensors[name] = model.interleaved(tensors[name], keys[f"eagle3.attention.{count}"])
    if "d2t" in tensors:  # the file stores absolute token ids, not offsets
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]), device=tensors["d2t"].device)
    if "dflash.sample_from_anchor" in keys and MARKOV[0] not in tensors:  # only a DSpark reads the anchor's slot
        tensors |= {name: torch.zeros(source.target.spec.vocabulary, 1) for name in MARKOV}
    return tensors | model.factors(source.sizes)


def read(path: Path) -> dict[str, Tensor]:
    """The weights of a drafter's file, by the names of its layout."""
    keys, tensors = reading.read_header(path).keys, reading.read_tensors(path)
    tensors.pop(model.FACTORS, None)  # the settings hold the numbers they were computed from
    if keys["general.architecture"] == "eagle3":
        _restore_rows(tensors, keys)
    if "d2t" in tensors:
        _set_map(tensors, len(keys["tokenizer.ggml.tokens"]))
    return {reading.HEADS.get(name, name): weight for name, weight in tensors.items()}


def _restore_rows(tensors: dict[str, Tensor], keys: Config) -> None:
    for name, count in INTERLEAVED.items():
        heads = keys.get(f"eagle3.attention.{count}", keys["eagle3.attention.head_count"])
        if name not in tensors or tensors[name].dim() != 2 or tensors[name].shape[0] % (2 * heads):
            raise ExportError(f"{name} is missing, or its rows are not those of {heads} heads; copy the file again")
        tensors[name] = model.interleaved(tensors[name], heads, back=True)


def _set_map(tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Convert a reduced vocabulary's map to ours: d2t is target id minus draft id, t2d which tokens can be drafted.

    Raises ExportError for ids outside the vocabulary.
    """
    ids = tensors["d2t"].flatten().long()
    if not len(ids) or not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise ExportError(f"d2t names tokens outside the {vocabulary} of the file's tokenizer; copy the file again")
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
