"""A target's spec: its sizes, and the hashes of its tokenizer and weights that drafters are bound to."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from outrider.errors import first_line
from outrider.kernels.quantized import QuantizedEmbedding, QuantizedLinear
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular
from outrider.targets import quantised
from outrider.targets.gguf import load as gguf
from outrider.targets.gguf.files import locate
from outrider.targets.hf.anatomy import output_layer, sizes
from outrider.targets.parallel import spread
from outrider.targets.protocol import TargetSpec
from outrider.targets.sizes import layer_sizes, unused_row

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SAMPLE = 64
"""Number of values of a weight that are hashed."""


def spec_of(
    model: PreTrainedModel, tokenizer: Any, name: str | None, revision: str | None, weights_hash: str | None = None
) -> TargetSpec:
    """weights_hash: default `hash_weights`."""
    (layers, hidden, context), words = sizes(model), quantised.rows_of(output_layer(model))
    return TargetSpec(
        name or type(model).__name__, revision or getattr(model.config, "_commit_hash", None), layers, hidden, words,
        context,
        str(model.dtype).removeprefix("torch."), None if tokenizer is None else hash_tokenizer(tokenizer),
        hash_weights(model) if weights_hash is None else weights_hash,
        quantised=quantised.precision(model), sizes=layer_sizes(model.config), unused=unused_row(tokenizer, words),
    )  # fmt: skip


def load_tokenizer(path: str, **options: Any) -> tuple[Any, str]:
    """The tokenizer of a folder, a Hugging Face id or a GGUF file, and ""; if there is none, None and the reason."""
    if (files := locate(path, options.get("revision"))) is not None:
        return gguf.read_tokenizer(gguf.described(path, files).parts)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        tokenizer.decode(tokenizer.encode("a"))  # it fails only here if tokenizer_config.json has invalid values
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        return None, first_line(error)
    # without files transformers creates a tokenizer of special tokens only
    is_real = len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens)
    return (tokenizer, "") if is_real else (None, "its vocabulary is empty")


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary, 16 hex digits."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256("\n".join(f"{token}\t{number}" for token, number in entries).encode()).hexdigest()[:16]


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over names, shapes and the first values of every weight, in bfloat16 so that it is the same for every
    dtype."""
    entries: dict[str, bytes] = {}
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, quantised.IN_BLOCKS)}
    packed = {f"{name}.{buffer}" for name, module in blocks.items() for buffer in module._buffers}
    for name, weight in model.state_dict().items():
        if name in packed:
            continue
        whole = spread.named(model, name) if weight.is_meta or spread.is_part(weight) else weight
        for part, weight in quantised.parts(name, whole):
            entries[part] = _entry(part, tuple(weight.shape), weight.flatten()[:SAMPLE])
    entries |= {f"{name}.weight": _of_blocks(f"{name}.weight", module) for name, module in blocks.items()}
    return hashlib.sha256(b"".join(entries[name] for name in sorted(entries))).hexdigest()[:16]


def _of_blocks(name: str, part: QuantizedLinear | QuantizedEmbedding) -> bytes:
    """The same entry as for a plain weight with these values, however they are packed on this machine."""
    rows = min(part.rows, -(-SAMPLE // part.columns))
    return _entry(name, (part.rows, part.columns), part.values(torch.arange(rows)).flatten()[:SAMPLE])


def hash_stored(path: str, revision: str | None, model: nn.Module) -> str:
    """`hash_weights` of a checkpoint, reading little more than the headers of its safetensors files.

    model: the checkpoint's, on the meta device.  Returns "" if files are missing, or if names or shapes differ from the
    model's.
    """
    digest, stored = hashlib.sha256(), _stored_weights(path, revision)
    names: dict[int, list[str]] = {}
    whole = model.state_dict(keep_vars=True)
    for name, weight in whole.items():
        names.setdefault(id(weight), []).append(name)
    try:
        for name, weight in sorted(whole.items()):
            place = next(stored[one] for one in (name, *names[id(weight)]) if one in stored)
            with safe_open(regular(place), "pt") as file:
                alias = next(one for one in (name, *names[id(weight)]) if stored.get(one) == place)
                part = file.get_slice(alias)
                if tuple(part.get_shape()) != tuple(weight.shape):
                    return ""
                digest.update(_entry(name, tuple(weight.shape), _first(part)))
    except (OSError, SafetensorError, StopIteration):
        return ""
    return digest.hexdigest()[:16]


def _entry(name: str, shape: tuple[int, ...], first: Tensor) -> bytes:
    """The hash input of a weight.  first: its first values, at most SAMPLE."""
    sample = first.to("cpu", torch.bfloat16).view(torch.int16)
    return f"{name} {shape}".encode() + sample.numpy().tobytes()


def _first(part: Any) -> Tensor:
    """The first SAMPLE values of a slice of a file."""
    shape = part.get_shape()
    if not shape:
        value: Tensor = part[:].flatten()
        return value
    of_one = max(1, math.prod(shape[1:]))
    rows: Tensor = part[: -(-SAMPLE // of_one)]
    return rows.flatten()[:SAMPLE]


def _stored_weights(path: str, revision: str | None) -> dict[str, Path]:
    """The file of each weight of a checkpoint in a folder, or of a Hugging Face id in the local cache."""
    try:
        local = Path(path)
        folder = local if local.is_dir() else Path(str(cached_file(path, "config.json", revision=revision))).parent
        if (index := folder / INDEX).exists():
            return {name: folder / file for name, file in parse_json(index.read_text())["weight_map"].items()}
        with safe_open(regular(folder / WEIGHTS), "pt") as file:
            return dict.fromkeys(file.keys(), folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError, KeyError):
        return {}
