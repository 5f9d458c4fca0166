"""GGUF, llama.cpp's one file: small_model as a plain causal language model with the target's tokenizer in it; write
only.

Names of tensors are taken from llama.cpp's own library (`pip install gguf`).  What differs from a config.json: a tied
head is not stored; vectors stay float32; the rows of queries and keys of a `llama` are interleaved, since llama.cpp
rotates neighbouring pairs and not halves; and the tokenizer's splitting of words is a name out of a list, not a
pattern.  A tokenizer that splits otherwise, or shapes that llama.cpp would read and compute differently, are refused.

llama.cpp normalises no text (NFC), so texts that are not normalised may come out as other tokens there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ExportError
from outrider.export.layout import Config, Format, Layout, Source

FILE = "model.gguf"
PRECISIONS = {"f32": (torch.float32, 0), "f16": (torch.float16, 1), "bf16": (torch.bfloat16, 32)}
"""How a number is stored, and llama.cpp's number for a file of it."""
DEFAULT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    (QWEN2, False): "qwen2",
    (QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"), True): "llama-bpe",
    (None, False): "gpt-2",
}
"""(Pattern that splits a text, whether a word that is a token is taken whole) to llama.cpp's name; None: GPT-2's
own."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of token in GGUF."""
SCALING = {"linear": "linear", "default": None, "llama3": None}
"""Rotary scalings that a file can have; llama3's is a factor for each frequency."""


# ── keys of the file ─────────────────────────────────────────────────────────────────────────────────────────────────


def header(lm: Any, tokenizer: Any, precision: str) -> dict[str, Any]:
    """The keys of a GGUF file of a causal language model; whole numbers are unsigned there.

    Raises ExportError for what `refused` finds.
    """
    if reason := refused(lm, tokenizer):
        raise ExportError(f"it can't be written as GGUF: {reason}")
    config = lm.config
    name, rope = config.model_type, dict(config.rope_parameters)
    scaling = SCALING[rope.get("rope_type", "default")]
    shape = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(rope["rope_theta"]), "vocab_size": config.vocab_size,
        **({} if scaling is None else {"rope.scaling.type": scaling, "rope.scaling.factor": float(rope["factor"])}),
    }  # fmt: skip
    return {
        "general.architecture": name, "general.type": "model", "general.file_type": PRECISIONS[precision][1],
        **{f"{name}.{key}": value for key, value in shape.items()}, **_vocabulary(tokenizer, config.vocab_size),
        **_specials(lm, tokenizer),
    }  # fmt: skip


def refused(lm: Any, tokenizer: Any) -> str | None:
    """Why a language model can't be written as GGUF here; None where it can."""
    config = lm.config
    name = config.model_type
    if name not in ("qwen3", "llama"):
        return f"its architecture is {name}; known are qwen3 and llama, use llama.cpp's converter on --to transformers"
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            return f"{key} is true; that is known only without"
    if config.hidden_act != "silu" or set(getattr(config, "layer_types", None) or ["full_attention"]) != {
        "full_attention"
    }:
        return "its layers are not all full attention with SiLU"
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind not in SCALING or rope.get("partial_rotary_factor", 1) != 1 or (kind == "llama3" and name != "llama"):
        return f"its rotation is {rope}; known are default, linear, and llama3 for a llama"
    if tokenizer is None:
        return "its target has no tokenizer, and the file needs one; load the target from a folder that has it"
    return _split(tokenizer)[1]


def _precision(source: Source) -> str:
    return source.precision or DEFAULT.get(source.target.spec.dtype, "f32")


# ── the tokenizer ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _split(tokenizer: Any) -> tuple[str, str | None]:
    """llama.cpp's name for how a tokenizer splits texts; and why it has none, or None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "", "its tokenizer is not of the tokenizers library; only byte-level BPE can be written"
    tokenizer_json = json.loads(backend.to_str())
    model, normalizer, before = (
        tokenizer_json["model"],
        tokenizer_json["normalizer"],
        tokenizer_json["pre_tokenizer"] or {},
    )
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        return "", f"its tokenizer is {model['type']}; only byte-level BPE can be written"
    if normalizer is not None and normalizer.get("type") != "NFC":
        return "", f"its tokenizer normalises texts by {normalizer.get('type')}, which llama.cpp would not do"
    steps = before.get("pretokenizers", [before])
    last = steps[-1]
    patterns = [step.get("pattern", {}).get("Regex") for step in steps[:-1] if step.get("type") == "Split"]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(patterns) != len(steps) - 1:
        return (
            "",
            f"its tokenizer splits texts by {[step.get('type') for step in steps]}; only byte-level BPE can be written",
        )
    known = SPLITS.get((patterns[0] if patterns else None, bool(model.get("ignore_merges"))))
    if not model["merges"]:
        return "", "its tokenizer has no merges, which llama.cpp needs"
    if known is None or len(patterns) > 1 or bool(last.get("use_regex")) != (not patterns):
        return (
            "",
            f"its tokenizer splits texts in a way that is not supported; supported are {', '.join(SPLITS.values())}",
        )
    return known, None


def _vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Tokens, kinds and merges.  Ids without a token, up to the `size` of the head, are unused ones."""
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {one["id"]: one for one in tokenizer_json["added_tokens"]}
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in tokenizer.get_vocab().items():
        if i >= size:
            raise ExportError(
                f"the tokenizer has token id {i}, but the model has {size} tokens; use the tokenizer that belongs to "
                "this model"
            )
        tokens[i] = token
        kinds[i] = NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer_json["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _split(tokenizer)[0], "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges,
    }  # fmt: skip


def _specials(lm: Any, tokenizer: Any) -> dict[str, Any]:
    """Tokens that begin and end a text, from tokenizer and generation settings, and the chat template."""
    ends = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    ends = list(ends) if isinstance(ends, list | tuple) else [ends]
    ids = {
        "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0],
        "eot": next((i for i in ends if i not in (None, tokenizer.eos_token_id)), None),
        "padding": tokenizer.pad_token_id,
    }  # fmt: skip
    begins = tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    template = tokenizer.chat_template
    return {
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None},
        "tokenizer.ggml.add_bos_token": begins,
        "tokenizer.ggml.add_eos_token": False,
        **({"tokenizer.chat_template": template} if isinstance(template, str) else {}),
    }


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def write(folder: Path, config: Config, weights: Mapping[str, Tensor], source: Source) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / FILE, config, weights, source.model.lm, _precision(source))


def write_file(path: Path, keys: Config, weights: Mapping[str, Tensor], lm: Any, precision: str) -> None:
    """A GGUF file of these keys and of a language model's weights by transformers' names.

    Matrices are rounded to `precision`.  Raises ExportError for a weight that has no name there, or that f16 can't
    hold.
    """
    library = _library()
    writer = library.GGUFWriter(path, keys["general.architecture"])
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if key != "general.architecture":  # its writer begins with it
            adds.get(type(value), writer.add_array)(key, value)
    names = _names(keys, list(weights))
    for name, weight in weights.items():
        dtype = PRECISIONS[precision][0] if weight.dim() > 1 else torch.float32
        stored = _reordered(name, weight.detach().cpu(), keys).to(dtype).contiguous()
        if not stored.isfinite().all():
            raise ExportError(f"{name} has values that {precision} can't hold; choose bf16 or f32")
        _add_tensor(writer, names[name], stored)
    for name, factors in _frequencies(lm).items():
        _add_tensor(writer, name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(folder: Path) -> dict[str, Tensor]:
    """The weights of such a file by transformers' names, in the numbers that they are stored in."""
    return read_file(folder / FILE)[1]


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys, and weights by transformers' names, of a GGUF file that was written here."""
    reader = _library().GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    found = {one.name: _tensor(one) for one in reader.tensors}
    names = _names(keys, _possible(keys[f"{keys['general.architecture']}.block_count"]))
    weights = {
        name: _reordered(name, found.pop(theirs), keys, back=True) for name, theirs in names.items() if theirs in found
    }  # fmt: skip
    return keys, {**weights, **found}


def _possible(layers: int) -> list[str]:
    """Weights that a model of these families can have, by transformers' names."""
    parts = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    whole = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return [*whole, *(f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts)]


def _names(keys: Config, names: list[str]) -> dict[str, str]:
    """transformers' names to llama.cpp's.  Raises ExportError for one that has none."""
    library, family = _library(), keys["general.architecture"]
    arch = next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == family)
    known = library.get_tensor_name_map(arch, keys[f"{family}.block_count"])
    found = {name: known.get_name(name, try_suffixes=(".weight",)) for name in names}
    lost = [
        name
        for name, theirs in found.items()
        if theirs is None and name not in _possible(keys[f"{family}.block_count"])
    ]
    if lost:
        raise ExportError(
            f"llama.cpp has no name for the weights {', '.join(lost[:4])} of {family}, so they can't be written as GGUF"
        )
    return {name: theirs for name, theirs in found.items() if theirs is not None}


def _reordered(name: str, weight: Tensor, keys: Config, back: bool = False) -> Tensor:
    """Queries and keys [heads · head_dim, H] of a llama in llama.cpp's order, or back; other weights unchanged.

    Within each head, row i of half h becomes row h of pair i.
    """
    family, part = keys["general.architecture"], name.split(".")[-2]
    count = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(part)
    if family != "llama" or count is None:
        return weight
    halves = weight.view(keys[f"{family}.attention.{count}"], *((-1, 2) if back else (2, -1)), weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _frequencies(lm: Any) -> dict[str, Tensor]:
    """The divisor of each frequency in llama3's rotation [head_dim / 2]; empty for other rotations."""
    rope = lm.config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return {}
    frequencies = lm.model.rotary_emb.inv_freq.detach().cpu().double()
    plain = float(rope["rope_theta"]) ** -(torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies))
    return {"rope_freqs.weight": (plain / frequencies).float()}


def _add_tensor(writer: Any, name: str, weight: Tensor) -> None:
    if weight.dtype == torch.bfloat16:  # numpy has no such number
        kind = _library().GGMLQuantizationType.BF16
        writer.add_tensor(name, weight.view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, weight.numpy())


def _tensor(one: Any) -> Tensor:
    found = torch.from_numpy(one.data.copy())
    return found.view(torch.bfloat16) if one.tensor_type == _library().GGMLQuantizationType.BF16 else found


def _library() -> Any:
    """llama.cpp's own.  Raises ExportError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ExportError("GGUF needs llama.cpp's library: pip install 'outrider[gguf]'") from None
    return gguf


LAYOUTS = {
    "small_model": Layout(
        [("lm.*", "*")],
        lambda source: header(source.model.lm, source.target.tokenizer, _precision(source)),
        refuses=(lambda source: refused(source.model.lm, source.target.tokenizer),),
    )
}
FORMAT = Format(LAYOUTS, writes=write, reads=read, precisions=tuple(PRECISIONS))
