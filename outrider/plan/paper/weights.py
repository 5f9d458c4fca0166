"""How weights are stored and in which type they are multiplied, by name or from config.json.  No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.config import nearest
from outrider.errors import ConfigError


class Weight(NamedTuple):
    """A storage format of a matrix."""

    bytes: float
    """Bytes of one weight, including its share of the scales."""
    matmul: str
    """Type of the matrix products."""


class Stored(NamedTuple):
    """How a model's weights are stored."""

    layers: Weight
    experts: Weight
    rest_bytes: float
    """Bytes of a weight of the embeddings and the output layer."""


NAMED = {
    "float32": Weight(4.0, "bf16"), "bf16": Weight(2.0, "bf16"), "fp16": Weight(2.0, "bf16"),
    "fp8": Weight(1.0, "fp8"), "int8": Weight(1.0, "bf16"), "int4": Weight(0.5 + 2.5 / 128, "bf16"),
    "mxfp4": Weight(0.5 + 1 / 32, "bf16"), "q8_0": Weight(34 / 32, "bf16"), "q4_0": Weight(18 / 32, "bf16"),
    "q4_k": Weight(144 / 256, "bf16"),
}  # fmt: skip
"""int8 and int4 weights are multiplied as bf16.  int4 has a two-byte scale and a zero point for every 128 weights,
mxfp4 a one-byte scale for every 32.  q8_0, q4_0 and q4_k are blocks of GGUF files."""
DTYPES = {"float32": "float32", "bfloat16": "bf16", "float16": "fp16"}


def stored(fields: Mapping[str, Any], weight: str | None, name: str) -> Stored:
    """How the weights of this config are stored.  Raises ConfigError for an unknown format.

    weight: the format of the layers' matrices, in place of the config's.
    """
    text = next(
        (fields[part] for part in ("text_config", "llm_config") if isinstance(fields.get(part), Mapping)), fields
    )
    dtype = fields.get("dtype") or fields.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    plain = NAMED[DTYPES.get(str(dtype), "bf16")]
    if weight is not None:
        if weight not in NAMED:
            raise ConfigError(f"unknown type of weights {weight!r}{nearest(weight, NAMED)}")
        ends = NAMED["q8_0"] if weight.startswith("q") else plain  # as `quantize` rounds them
        return Stored(NAMED[weight], NAMED[weight], ends.bytes)
    quantization = fields.get("quantization_config") or text.get("quantization_config")
    if quantization is None:
        return Stored(plain, plain, plain.bytes)
    try:
        weight_type = _quantised(quantization)
    except (AttributeError, KeyError, TypeError):  # a value of the wrong type for the method
        weight_type = None
    if weight_type is None:
        method = (
            quantization.get("quant_method", "no quant_method") if isinstance(quantization, Mapping) else quantization
        )
        raise ConfigError(
            f"the config.json of {name} has an unknown quantization_config ({method!s:.80}); give the type of its "
            "weights with --weights"
        )
    if quantization.get("quant_method") == GGUF:
        return Stored(weight_type, weight_type, quantization["ends"])
    return Stored(plain if quantization.get("quant_method") == "mxfp4" else weight_type, weight_type, plain.bytes)


GGUF = "gguf"
ENDS = ("token_embd.weight", "output.weight")
"""llama.cpp's names of the embedding and the output layer."""


def in_blocks(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` for a GGUF file: mean bytes of a weight, for the layers and for the embedding and output
    layer.  tensors: by name, each with `shape` and `size`."""
    matrices = {name: info for name, info in tensors.items() if len(info.shape) > 1}
    config: dict[str, Any] = {"quant_method": GGUF}
    for part, names in (("layers", matrices.keys() - set(ENDS)), ("ends", matrices.keys() & set(ENDS))):
        numbers = sum(math.prod(matrices[name].shape) for name in names)
        config[part] = sum(matrices[name].size for name in names) / max(1, numbers)
    return config


def _quantised(config: Mapping[str, Any]) -> Weight | None:
    method = config.get("quant_method")
    if method == GGUF:
        return Weight(config["layers"], "bf16")
    if method in ("fp8", "fbgemm_fp8"):
        return NAMED["fp8"]
    if method == "mxfp4":
        return NAMED["mxfp4"]
    if method in ("awq", "gptq") and isinstance(config.get("bits"), int):
        group = config.get("group_size") or 128
        scales = (2 + config["bits"] / 8) / group if group > 0 else 0.0
        return Weight(config["bits"] / 8 + scales, "bf16")
    if method == "bitsandbytes":
        return NAMED["int4"] if config.get("load_in_4bit") else NAMED["int8"]
    if method == "compressed-tensors":
        first: Mapping[str, Any] = next(iter((config.get("config_groups") or {}).values()), {})
        scheme = first.get("weights") or {}
        if scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return NAMED["fp8"]
        if scheme.get("num_bits") in (4, 8):
            return NAMED[f"int{scheme['num_bits']}"]
    return None
