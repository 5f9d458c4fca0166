"""A draft in a GGUF file as llama.cpp reads it: the parts of a `readers.Draft`, written from llama.cpp's source,
independently of our exporter.

Conventions, as of llama.cpp 0c1e570.  `target_layers` are numbers of the states *before* a layer: ours + 1.  DFlash: K
drafts take the anchor and K masks.  A DSpark is a DFlash with a Markov head, whose first slot drafts if
`sample_from_anchor` is true or missing; with an all-zero Markov head it is a DFlash that drafts there.  `d2t` holds the
target's ids themselves.  Queries and keys of an EAGLE-3 are rotated in neighbouring pairs, so their rows are
interleaved; a DFlash's are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engines.verify import readers
from outrider.engines.verify.readers import Draft, Rotation
from outrider.errors import ExportError

LAYER = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj": "mlp_conv.kernel_projection",
}  # fmt: skip
WHOLE = {
    "fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "enc.output_norm.weight": "hidden_norm.weight",
    "output.weight": "lm_head.weight", "token_embd.weight": "embed_tokens.weight", "d2t": "d2t",
    "markov_w1.weight": "markov_head.markov_w1.weight", "markov_w2.weight": "markov_head.markov_w2.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "conf_proj.weight": "confidence_head.weight", "conf_proj.bias": "confidence_head.bias",
}  # fmt: skip
FREQUENCIES = "rope_freqs.weight"
DIGITS = 6
"""Significant digits of a number stored in 32 bits."""
Keys = Mapping[str, Any]


def of_file(path: str | Path) -> Draft:
    """A draft as llama.cpp reads its file.  Raises ExportError if it can't be read, or its kind is unknown here."""
    path = Path(path)
    keys, tensors = read(path)
    family = str(keys.get("general.architecture"))
    if family not in ("dflash", "eagle3"):
        raise ExportError(f"{path} has architecture {family}, which can't be compared; known are dflash and eagle3")
    markov = [name for name in tensors if name.startswith("markov_")]
    kind = "dspark" if any(tensors[name].any() for name in markov) else family
    kind = "dflash2" if "selector_hidden.weight" in tensors else kind
    settings = {key.removeprefix(f"{family}."): value for key, value in keys.items()}
    settings["sample_from_anchor"] = bool(markov) and settings.get("sample_from_anchor", True)
    if kind == "dflash":
        tensors = {name: weight for name, weight in tensors.items() if name not in markov}
    try:
        return _draft(kind, settings, tensors)
    except KeyError as error:
        raise ExportError(f"{path} lacks the key {error}, which llama.cpp reads; export it again") from None


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys and tensors by llama.cpp's names, with quantised ones as floats.  Raises ExportError for a broken file."""
    library = _library()
    try:
        reader = library.GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        return keys, {one.name: _tensor(one, library) for one in reader.tensors}
    except (OSError, ValueError, IndexError, NotImplementedError) as error:
        raise ExportError(f"{path} can't be read as GGUF: {error}; export it again") from None


def _tensor(one: Any, library: Any) -> Tensor:
    if one.tensor_type == library.GGMLQuantizationType.I64:
        return torch.from_numpy(one.data.copy())
    return torch.from_numpy(library.quants.dequantize(one.data, one.tensor_type).copy())


def _draft(kind: str, keys: Keys, tensors: Mapping[str, Tensor]) -> Draft:
    if keys.get("norm_before_fc"):
        raise ExportError("a norm of all taps together (norm_before_fc) can't be compared; export without it")
    heads, size = int(keys["attention.head_count"]), int(keys["attention.key_length"])
    kv_heads = int(keys.get("attention.head_count_kv", heads))
    weights = {_name(name): weight for name, weight in tensors.items() if name != FREQUENCIES}
    if kind == "eagle3":
        counts = {"layers.0.self_attn.q_proj.weight": heads, "layers.0.self_attn.k_proj.weight": kv_heads}
        weights |= {name: _halves(weights[name], count) for name, count in counts.items()}
    if "d2t" in weights:  # `parts` expects the offset from a draft token's own id
        weights["d2t"] = weights["d2t"] - torch.arange(len(weights["d2t"]))
    is_block = kind in readers.BLOCKS
    return Draft(
        kind, **readers.parts_of(weights), heads=(heads, kv_heads, size),
        rotation=_rotation(keys, size, tensors.get(FREQUENCIES)),
        eps=_rounded(keys["attention.layer_norm_rms_epsilon"]), taps=tuple(int(k) - 1 for k in keys["target_layers"]),
        flags=frozenset({"norm_before_residual"} if keys.get("norm_before_residual") else ()),
        mask=int(keys["tokenizer.ggml.mask_token_id"]) if is_block else None,
        skip=0 if keys["sample_from_anchor"] else 1,
        causal=is_block and bool(keys.get("attention.causal", False)), markov="vanilla" if kind == "dspark" else "",
        window=keys.get("attention.sliding_window") or None, candidates=int(keys.get("selector_top_k", 0)),
    )  # fmt: skip


def _name(name: str) -> str:
    """The other engines' name for a tensor; its own if they have none."""
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in LAYER:
        return ".".join(["layers", parts[1], LAYER[parts[2]], *parts[3:]])
    return WHOLE.get(name, name)


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads · head_dim, H] of neighbouring pairs as rows of two halves, the layout of other engines."""
    neighbours = weight.view(heads, -1, 2, weight.shape[-1])
    return neighbours.transpose(1, 2).reshape(weight.shape)


def _rotation(keys: Keys, size: int, factors: Tensor | None) -> Rotation:
    """The rotation described by the keys. factors [size / 2]: the divisor of each frequency, as in llama3."""
    share = int(keys.get("rope.dimension_count", size)) / size
    kind = str(keys.get("rope.scaling.type", "none"))
    scaling: dict[str, Any] = {}
    if kind not in ("none", "linear", "yarn"):
        raise ExportError(f"rotary scaling {kind!r} is not supported; use none, linear or yarn")
    if factors is not None:
        scaling = {"rope_type": "divisors", "divisors": [_rounded(factor) for factor in factors.tolist()]}
    elif kind != "none":
        scaling = {"rope_type": kind, "factor": _rounded(keys["rope.scaling.factor"])}
    if kind == "yarn":
        scaling[readers.TRAINED] = float(keys["rope.scaling.original_context_length"])
        named = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        scaling |= {ours: _rounded(keys[f"rope.scaling.{key}"]) for key, ours in named.items()
                    if f"rope.scaling.{key}" in keys}  # fmt: skip
    return Rotation(
        _rounded(keys.get("rope.freq_base", 1e4)), share, json.dumps(scaling, sort_keys=True) if scaling else ""
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _library() -> Any:
    """llama.cpp's own gguf package, which takes a moment to load."""
    import gguf
    import gguf.quants

    return gguf
