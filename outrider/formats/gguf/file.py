"""GGUF, llama.cpp's single file of keys and tensors, written with llama.cpp's own library (`pip install gguf`).

Vectors and the expert router stay in 32 bits, as llama.cpp requires.  In q8_0 and q4_0, 32 numbers of a row share a
scale, in q4_k 256 (see `kernels.rounding`); matrices whose row length is not a multiple of that are stored in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ExportError
from outrider.formats.gguf.reading import widened
from outrider.formats.layout import Config, Source
from outrider.kernels import rounding

FILE = "model.gguf"
PRECISIONS = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_k": 14}
"""How matrices are stored, and llama.cpp's `file_type` number for it."""
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64}
DEFAULT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
ENDS = ("token_embd.weight", "output.weight", "model.embed_tokens.weight", "embed_tokens.weight", "lm_head.weight")
"""llama.cpp's, transformers' and our own names of embedding and output layer."""
FULL = ("ffn_gate_inp.", "_conv_base")
"""Substrings of the names of matrices and convolution kernels that stay in 32 bits."""
QUANTIZATION_VERSION = 2
"""Version of the layouts of quantised numbers."""


def precision_of(source: Source) -> str:
    """The requested precision, else the target's."""
    return source.precision or DEFAULT.get(source.target.spec.dtype, "f32")


def general(architecture: str, precision: str) -> dict[str, Any]:
    """The keys that every file we write starts with."""
    return {
        "general.architecture": architecture, "general.type": "model", "general.file_type": PRECISIONS[precision],
        "general.quantization_version": QUANTIZATION_VERSION,
    }  # fmt: skip


def stored_as(name: str, weight: Tensor, precision: str) -> str:
    """How a tensor is stored in a file of this precision: one of `PRECISIONS`, i64, or another type of blocks."""
    if not weight.is_floating_point():
        return "i64"
    if weight.dim() < 2 or any(part in name for part in FULL):
        return "f32"
    if precision not in rounding.MODES:
        return precision
    return (rounding.kind_of(precision, name in ENDS, weight.shape[-1]) or "f16").lower()


def rounded(name: str, weight: Tensor, precision: str) -> Tensor:
    """A weight as it reads back from a file of this precision; on the CPU."""
    kind, weight = stored_as(name, weight, precision), weight.detach().cpu()
    if kind not in DTYPES:
        return widened(_blocks(kind, weight).flatten(), kind.upper(), weight.shape)
    return weight.to(DTYPES[kind])


def write(path: Path, keys: Config, tensors: Mapping[str, Tensor], precision: str) -> None:
    """Write a GGUF file of these keys, and of tensors by llama.cpp's names.  Integers are stored unsigned.

    Raises ExportError for values that the precision can't hold.
    """
    writer = library().GGUFWriter(path, keys["general.architecture"])
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if key != "general.architecture":  # the writer adds it itself
            adds.get(type(value), writer.add_array)(key, value)
    for name, weight in tensors.items():
        _add(writer, name, weight.detach().cpu().contiguous(), precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, weight: Tensor, precision: str) -> None:
    kind = stored_as(name, weight, precision)
    if kind != "i64" and not rounded(name, weight, precision).isfinite().all():
        raise ExportError(f"{name} has values that {kind} can't hold; choose bf16 or f32")
    types = library().GGMLQuantizationType
    if kind not in DTYPES:
        writer.add_tensor(name, _blocks(kind, weight).numpy(), raw_dtype=types[kind.upper()])
    elif kind == "bf16":  # numpy has no bfloat16
        writer.add_tensor(name, weight.to(torch.bfloat16).view(torch.uint8).numpy(), raw_dtype=types.BF16)
    else:
        writer.add_tensor(name, weight.to(DTYPES[kind]).numpy())


def _blocks(kind: str, weight: Tensor) -> Tensor:
    """The bytes of a matrix in a type of blocks [..., bytes]."""
    return rounding.rounded(kind.upper(), weight.flatten(0, -2)).view(*weight.shape[:-1], -1)


def library() -> Any:
    """llama.cpp's own library, imported late because it takes a moment to load."""
    import gguf

    return gguf
