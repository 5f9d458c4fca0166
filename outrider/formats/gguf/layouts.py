"""GGUF, llama.cpp's one file of weights, shape and the target's tokenizer.

What llama.cpp would compute or tokenise differently is refused; what it has no way to draft is left out, and the export
says so.  Draft models that others publish as GGUF are read, in f32, f16, bf16 and q8_0.
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
    """A method as GGUF.  tensors: what a file holds, from weights by names of the layout; weights: back, from a file.
    more: fields of `Layout`."""

    def writes(folder: Path, keys: Config, weights: Mapping[str, Tensor], source: Source) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file.write(folder / FILE, keys, tensors(weights, keys, source), precision_of(source))

    return Layout(
        names, config, settings, writes=writes, reads=lambda folder: read(folder, weights),
        precisions=tuple(PRECISIONS), rounded=_rounded, **more,
    )  # fmt: skip


def of_architecture(*names: str) -> Callable[[Config, Collection[str]], bool]:
    """Whether a file is of one of these architectures of llama.cpp."""
    return lambda config, tensors: config.get("general.architecture") in names


def write_file(path: Path, keys: Config, weights: Mapping[str, Tensor], lm: Any, precision: str) -> None:
    """A GGUF file of these keys and of a language model's weights by transformers' names.

    Matrices are rounded to `precision`.  Raises ExportError for a weight that has no name there, or that f16 can't
    hold.
    """
    file.write(path, keys, model.tensors(weights, keys, lm), precision)


def read(folder: Path, weights: Callable[[Path], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The weights of a folder's file, or of a file, by the names of its layout.

    Raises ExportError for a file that is torn, is quantised in a way that is not readable, or holds what is no number.
    """
    path = reading.find(folder)
    if path is None:
        raise ExportError(f"{folder} has no {FILE}; name the folder of a draft model, or its GGUF file")
    try:
        tensors = weights(path)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # a key may be missing, or hold anything
        raise ExportError(f"{path} does not fit its own keys: {error}; copy it again") from None
    if broken := not_finite(tensors):
        raise ExportError(f"{path} has values that are not finite in {', '.join(broken[:4])}; use another file")
    return tensors


def _rounded(name: str, weight: Tensor, source: Source) -> Tensor:
    """A weight of a layout's name as it reads back."""
    return file.rounded(name, weight, precision_of(source))
