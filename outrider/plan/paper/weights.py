"""How weights are stored, and in which type they are multiplied: by name, or as a config.json says.  No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.config import nearest
from outrider.errors import ConfigError


class Weight(NamedTuple):
    """One way to store a matrix."""

    bytes: float
    """Of one weight, its share of the scales included."""
    matmul: str
    """Type in which it is multiplied."""


class Stored(NamedTuple):
    """How a model's weights are stored."""

    layers: Weight
    experts: Weight
    rest_bytes: float
    """Of embeddings and the output layer."""


NAMED = {
    "float32": Weight(4.0, "bf16"), "bf16": Weight(2.0, "bf16"), "fp16": Weight(2.0, "bf16"),
    "fp8": Weight(1.0, "fp8"), "int8": Weight(1.0, "bf16"), "int4": Weight(0.5 + 2.5 / 128, "bf16"),
    "mxfp4": Weight(0.5 + 1 / 32, "bf16"),
}  # fmt: skip
"""int8 and int4 weights are multiplied as bf16; int4 has a scale of two bytes and a zero for every 128 weights, mxfp4 a
scale of one byte for every 32."""
DTYPES = {"float32": "float32", "bfloat16": "bf16", "float16": "fp16"}


def stored(fields: Mapping[str, Any], weight: str | None, name: str) -> Stored:
    """How the weights of this config are stored.  Raises ConfigError for a way that is not known.

    weight: of the layers' matrices, in place of what the config says.
    """
    text = next((fields[part] for part in ("text_config", "llm_config") if part in fields), fields)
    dtype = fields.get("dtype") or fields.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    plain = NAMED[DTYPES.get(str(dtype), "bf16")]
    if weight is not None:
        if weight not in NAMED:
            raise ConfigError(f"weights {weight!r} are not a type that is known here{nearest(weight, NAMED)}")
        return Stored(NAMED[weight], NAMED[weight], plain.bytes)
    own = fields.get("quantization_config") or text.get("quantization_config")
    if own is None:
        return Stored(plain, plain, plain.bytes)
    found = _quantised(own)
    if found is None:
        raise ConfigError(
            f"the config.json of {name} has a quantization_config that is not known here "
            f"({own.get('quant_method', 'no quant_method')}); say how its weights are stored with --weights"
        )
    if own.get("quant_method") == GGUF:
        return Stored(found, found, own["ends"])
    return Stored(plain if own.get("quant_method") == "mxfp4" else found, found, plain.bytes)


GGUF = "gguf"
ENDS = ("token_embd.weight", "output.weight")
"""llama.cpp's names of embedding and output layer."""


def in_blocks(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What a `quantization_config` would say of the matrices of a GGUF file: bytes of a weight, of layers and of the
    two ends.  tensors: by name, each with `shape` and `size`."""
    matrices = {name: info for name, info in tensors.items() if len(info.shape) > 1}
    found: dict[str, Any] = {"quant_method": GGUF}
    for part, names in (("layers", matrices.keys() - set(ENDS)), ("ends", matrices.keys() & set(ENDS))):
        numbers = sum(math.prod(matrices[name].shape) for name in names)
        found[part] = sum(matrices[name].size for name in names) / max(1, numbers)
    return found


def _quantised(own: Mapping[str, Any]) -> Weight | None:
    method = own.get("quant_method")
    if method == GGUF:
        return Weight(own["layers"], "bf16")
    if method in ("fp8", "fbgemm_fp8"):
        return NAMED["fp8"]
    if method == "mxfp4":
        return NAMED["mxfp4"]
    if method in ("awq", "gptq") and isinstance(own.get("bits"), int):
        group = own.get("group_size") or 128
        scales = (2 + own["bits"] / 8) / group if group > 0 else 0.0
        return Weight(own["bits"] / 8 + scales, "bf16")
    if method == "bitsandbytes":
        return NAMED["int4"] if own.get("load_in_4bit") else NAMED["int8"]
    if method == "compressed-tensors":
        first: Mapping[str, Any] = next(iter((own.get("config_groups") or {}).values()), {})
        scheme = first.get("weights") or {}
        if scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return NAMED["fp8"]
        if scheme.get("num_bits") in (4, 8):
            return NAMED[f"int{scheme['num_bits']}"]
    return None
