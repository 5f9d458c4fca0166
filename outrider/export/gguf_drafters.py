"""Drafters as GGUF: dflash and dspark in llama.cpp's architecture `dflash`, eagle3 in `eagle3`.

Embedding and head are the target's, which llama.cpp takes from the target's file.  Layers are counted there as what
goes into them: tap k is `target_layers` k + 1, and what comes out of the last layer of a Qwen3 or Llama is not given
out.  A dflash that drafts in the anchor's slot is written as a DSpark whose Markov head is zero, since only a DSpark
reads that slot.  EAGLE-3's queries and keys are interleaved, as a llama's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ExportError
from outrider.export import gguf_file, gguf_model, gguf_read, gguf_tokenizer
from outrider.export.layout import Config, Source

SHIFT = 1
KIND = "outrider.kind"
"""A key of ours: the kind of drafter, where the architecture alone does not tell."""
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Parts of a decoder layer, ours and llama.cpp's."""
DFLASH = [
    *((f"backbone.layers.*.{ours}.weight", f"blk.*.{theirs}.weight") for ours, theirs in PARTS.items()),
    ("backbone.fc.weight", "fc.weight"), ("backbone.hidden_norm.weight", "enc.output_norm.weight"),
    ("backbone.norm.weight", "output_norm.weight"),
]  # fmt: skip
MARKOV = ("markov_w1.weight", "markov_w2.weight")
DSPARK = [
    *DFLASH, *((f"markov_head.{name}", name) for name in MARKOV), ("confidence_head.proj.*", "conf_proj.*"),
]  # fmt: skip
EAGLE3 = [
    *((f"layers.0.{ours}.weight", f"blk.0.{theirs}.weight") for ours, theirs in PARTS.items()),
    ("layers.0.hidden_norm.weight", "blk.0.attn_norm_2.weight"), ("fc.weight", "fc.weight"),
    ("norm.weight", "output_norm.weight"), ("head.lm_head.weight", "lm_head.weight"), ("head.d2t", "d2t"),
    ("head.t2d", "t2d"),
]  # fmt: skip
INTERLEAVED = {"blk.0.attn_q.weight": "head_count", "blk.0.attn_k.weight": "head_count_kv"}
"""Weights of an EAGLE-3 whose rows are interleaved, and the key of their number of heads."""


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def common(source: Source, architecture: str, layers: int) -> dict[str, Any]:
    """The keys that every drafter's file has."""
    spec = source.target.spec
    own = {
        "block_count": layers, "context_length": spec.context, "embedding_length": spec.hidden,
        "vocab_size": spec.vocabulary, **gguf_model.layer(source.sizes),
        "target_layers": [tap + SHIFT for tap in source.model.taps],
    }  # fmt: skip
    return {
        **gguf_file.general(architecture, gguf_file.precision_of(source)), KIND: source.settings.kind,
        **{f"{architecture}.{key}": value for key, value in own.items()}, **gguf_model.stretch(source.sizes),
        **gguf_tokenizer.keys(source.target.tokenizer, spec.vocabulary, source.target.model),
    }  # fmt: skip


def block(source: Source) -> dict[str, Any]:
    """dflash and dspark."""
    backbone: Any = source.model.backbone
    keys = common(source, "dflash", source.settings.layers)
    keys |= {"dflash.block_size": backbone.width, "tokenizer.ggml.mask_token_id": source.mask_token}
    if not is_dspark(source):
        return keys
    confidence = source.settings.kind == "dspark" and source.settings.confidence
    return keys | {
        "dflash.sample_from_anchor": source.settings.anchor_predicts, "dflash.has_confidence_head": confidence,
    }  # fmt: skip


def is_dspark(source: Source) -> bool:
    """Whether llama.cpp drafts with it as with a DSpark: it has a Markov head, be it zero."""
    return source.settings.kind == "dspark" or source.settings.anchor_predicts


def eagle3(source: Source) -> dict[str, Any]:
    return common(source, "eagle3", 1) | {
        "eagle3.target_hidden_size": source.target.spec.hidden,
        "eagle3.norm_before_residual": source.settings.norm_before_residual, "eagle3.norm_before_fc": False,
    }  # fmt: skip


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors(weights: Mapping[str, Tensor], keys: Config, source: Source) -> dict[str, Tensor]:
    """A drafter's weights by the names of its layout, as the file has them."""
    theirs = {name: file_name for file_name, name in gguf_read.HEADS.items()}
    # which tokens a draft may hold follows from d2t and is not stored
    found = {theirs.get(name, name): weight for name, weight in weights.items() if name != "t2d"}
    if keys["general.architecture"] == "eagle3":
        for name, count in INTERLEAVED.items():
            found[name] = gguf_model.interleaved(found[name], keys[f"eagle3.attention.{count}"])
    if "d2t" in found:  # the file has the target's own ids
        found["d2t"] = found["d2t"] + torch.arange(len(found["d2t"]), device=found["d2t"].device)
    if source.settings.kind == "dflash" and is_dspark(source):
        found |= {name: torch.zeros(source.target.spec.vocabulary, 1) for name in MARKOV}
    return found | gguf_model.factors(source.sizes)


def read(path: Path) -> dict[str, Tensor]:
    """The weights of a drafter's file by the names of its layout."""
    keys, found = gguf_read.read_header(path).keys, gguf_read.read_tensors(path)
    found.pop(gguf_model.FACTORS, None)  # the settings have what they were made from
    if keys["general.architecture"] == "eagle3":
        _restore_rows(found, keys)
    if keys.get(KIND) == "dflash" and not any(found[name].any() for name in MARKOV if name in found):
        found = {name: weight for name, weight in found.items() if name not in MARKOV}
    if "d2t" in found:
        _set_map(found, len(keys["tokenizer.ggml.tokens"]))
    return {gguf_read.HEADS.get(name, name): weight for name, weight in found.items()}


def _restore_rows(found: dict[str, Tensor], keys: Config) -> None:
    for name, count in INTERLEAVED.items():
        heads = keys.get(f"eagle3.attention.{count}", keys["eagle3.attention.head_count"])
        if name not in found or found[name].dim() != 2 or found[name].shape[0] % (2 * heads):
            raise ExportError(f"{name} is missing, or its rows are not those of {heads} heads; copy the file again")
        found[name] = gguf_model.interleaved(found[name], heads, back=True)


def _set_map(found: dict[str, Tensor], vocabulary: int) -> None:
    """The map of a reduced vocabulary as it is here: the target's ids less the draft's own, and which can be drafted.

    Raises ExportError for ids outside the vocabulary.
    """
    ids = found["d2t"].flatten().long()
    if not len(ids) or not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise ExportError(f"d2t names tokens outside the {vocabulary} of the file's tokenizer; copy the file again")
    found["d2t"] = ids - torch.arange(len(ids))
    found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
