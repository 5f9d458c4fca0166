"""The keys and tensors of a drafter's GGUF file; quantised tensors become float32.

Supported are the types that a target may have, and integers; the error for any other type names the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import machine
from outrider.errors import ExportError
from outrider.kernels.blocks import BLOCKS, PLAIN, dequantized, row_bytes
from outrider.targets.gguf import reader
from outrider.targets.gguf.reader import Header, Info

SUFFIX = ".gguf"
DTYPES = {**PLAIN, "I32": torch.int32, "I64": torch.int64}
"""Types that torch has as well."""
HEADS = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
"""llama.cpp's names for embedding and head, and the names that all our formats use."""
SHAPES = "outrider.shapes"
"""A key that `read_config` adds: the shape of every tensor, by name, rows first."""


def find(folder: Path) -> Path | None:
    """The GGUF file at this path or in this folder; None if there is none.

    Raises ExportError for a folder with several files, none of them named `model.gguf`.
    """
    if folder.is_file():
        return folder if folder.suffix == SUFFIX else None
    if (folder / f"model{SUFFIX}").exists():
        return folder / f"model{SUFFIX}"
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(ascii(path.name)[1:-1] for path in files[:4])
        raise ExportError(f"{folder} has {len(files)} GGUF files: {names}; name one of them")
    return files[0] if files else None


def read_header(path: Path) -> Header:
    """Keys and tensor offsets.  Raises ExportError for a file that is not GGUF or is damaged."""
    try:
        return reader.read_header(path)
    except (OSError, reader.Damaged) as error:
        raise ExportError(f"{path} can't be read: {error}; copy it again") from None


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a file, and the shapes of its tensors under `SHAPES`."""
    header = read_header(path)
    return header.keys | {SHAPES: {name: info.shape for name, info in header.tensors.items()}}


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors by their names in the file; only those in `names` if given.

    Raises ExportError for a tensor of an unsupported type, or one that is truncated.
    """
    header = read_header(path)
    infos = {name: info for name, info in header.tensors.items() if names is None or name in names}
    if why := machine.fits(sum(4 * math.prod(info.shape) for info in infos.values())):
        raise ExportError(f"{path} can't be loaded: {why}; copy it again, or use a smaller draft")
    return {name: _tensor(path, name, info) for name, info in infos.items()}


def rounded_heads(path: Path) -> set[str]:
    """Which of embedding and head a file stores in q8_0, which only approximates the original matrix."""
    infos = read_header(path).tensors
    return {name for theirs, name in HEADS.items() if theirs in infos and infos[theirs].kind == "Q8_0"}


def _tensor(path: Path, name: str, info: Info) -> Tensor:
    if info.kind not in DTYPES and info.kind not in BLOCKS:
        raise ExportError(f"{path} has {reader.shown(name)} in {info.kind}; use a file in {', '.join(BLOCKS)}")
    try:
        with reader.opened(path) as file:
            raw = reader.read_bytes(file, info)
    except (OSError, reader.Damaged) as error:
        raise ExportError(f"{path} can't be read: {error}; copy it again") from None
    return widened(raw, info.kind, info.shape)


def widened(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Decodes a tensor's bytes [n], uint8.  kind: ggml's name of its type; block types become float32."""
    if kind in DTYPES:
        return raw.view(DTYPES[kind]).view(shape)
    return dequantized(kind, raw.view(-1, row_bytes(kind, shape[-1])), shape[-1]).view(shape)
