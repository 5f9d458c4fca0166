"""GGUF, llama.cpp's single file of weights, shape and the target's tokenizer.

Models that llama.cpp would compute or tokenise differently are refused.  Features it can't draft with are left out, and
the export says so.  Draft models published as GGUF can be imported in f32, f16, bf16 and q8_0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import ExportError
from outrider.formats.gguf import file, model, reading
from outrider.formats.gguf.file import FILE, PRECISIONS, precision_of
from outrider.formats.gguf.model import header, read_file, refused
from outrider.formats.layout import Config, Layout, Source
from outrider.targets.hf.transformers import TransformersTarget
from outrider.weights import not_finite

__all__ = ["FILE", "PRECISIONS", "header", "layout", "of_architecture", "read_file", "refused", "write_file"]


def layout(
    names: Sequence[tuple[str, str]], config: Callable[[Source], dict[str, Any]],
    settings: Callable[[Config, TransformersTarget], dict[str, Any]],
    tensors: Callable[[Mapping[str, Tensor], Config, Source], Mapping[str, Tensor]],
    weights: Callable[[Path], Mapping[str, Tensor]], **more: Any,
) -> Layout:  # fmt: skip
    """A method's GGUF layout.  tensors: converts weights by the layout's names to the file's tensors; weights: reads
    them back from a file; more: other fields of `Layout`."""

    def writes(folder: Path, keys: Config, weights: Mapping[str, Tensor], source: Source) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file.write(folder / FILE, keys, tensors(weights, keys, source), precision_of(source))

    return Layout(
        names, config, settings, writes=writes, reads=lambda folder: read(folder, weights),
        precisions=tuple(PRECISIONS), rounded=_rounded, **more,
    )  # fmt: skip


def of_architecture(*names: str) -> Callable[[Config, Collection[str]], bool]:
    """A check whether a file has one of these llama.cpp architectures."""
    return lambda config, tensors: config.get("general.architecture") in names


def write_file(path: Path, keys: Config, weights: Mapping[str, Tensor], lm: Any, precision: str) -> None:
    """Write a GGUF file of these keys, and of a language model's weights by transformers' names.

    Matrices are rounded to `precision`.  Raises ExportError for a weight that has no llama.cpp name, or overflows f16.
    """
    file.write(path, keys, model.tensors(weights, keys, lm), precision)


def read(folder: Path, weights: Callable[[Path], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The weights of a GGUF file, or of a folder's GGUF file, by the names of its layout.

    Raises ExportError for a file that is damaged, has an unsupported quantisation, or holds values that are not finite.
    """
    path = reading.find(folder)
    if path is None:
        raise ExportError(f"{folder} has no {FILE}; name the folder of a draft model, or its GGUF file")
    try:
        tensors = weights(path)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # a key may be missing or hold anything
        raise ExportError(f"{path} does not fit its own keys: {error}; copy it again") from None
    if broken := not_finite(tensors):
        raise ExportError(f"{path} has values that are not finite in {', '.join(broken[:4])}; use another file")
    return tensors


def _rounded(name: str, weight: Tensor, source: Source) -> Tensor:
    """A weight, by its name in the layout, as it reads back."""
    return file.rounded(name, weight, precision_of(source))
