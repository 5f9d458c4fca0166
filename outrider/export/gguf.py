"""GGUF, llama.cpp's one file of weights, shape and the target's tokenizer: small_model, dflash, dspark, eagle3, mtp.

What llama.cpp would compute or tokenise differently is refused; what it has no way to draft is left out, and the export
says so.  Draft models that others publish as GGUF are read, in f32, f16, bf16 and q8_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import ExportError
from outrider.export import gguf_drafters, gguf_file, gguf_model, gguf_mtp, gguf_read, gguf_refusals, gguf_settings
from outrider.export.gguf_file import FILE, PRECISIONS, precision_of
from outrider.export.gguf_model import header, read_file, refused
from outrider.export.layout import Config, Format, Layout, Source
from outrider.weights import not_finite

__all__ = ["FILE", "FORMAT", "PRECISIONS", "header", "read", "read_file", "refused", "write_file"]


def write_file(path: Path, keys: Config, weights: Mapping[str, Tensor], lm: Any, precision: str) -> None:
    """A GGUF file of these keys and of a language model's weights by transformers' names.

    Matrices are rounded to `precision`.  Raises ExportError for a weight that has no name there, or that f16 can't
    hold.
    """
    gguf_file.write(path, keys, gguf_model.tensors(weights, keys, lm), precision)


def write(folder: Path, config: Config, weights: Mapping[str, Tensor], source: Source) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kind = source.settings.kind
    if kind == "small_model":
        tensors = gguf_model.tensors(weights, config, source.model.lm)
    else:
        tensors = (gguf_mtp if kind == "mtp" else gguf_drafters).tensors(weights, config, source)
    gguf_file.write(folder / FILE, config, tensors, precision_of(source))


def read(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder's file, or of a file, by the names of its layout.

    Raises ExportError for a file that is torn, is quantised in a way that is not readable, or holds what is no number.
    """
    path = gguf_read.find(folder)
    if path is None:
        raise ExportError(f"{folder} has no {FILE}; name the folder of a draft model, or its GGUF file")
    architecture = gguf_read.read_header(path).keys.get("general.architecture")
    try:
        if architecture in gguf_model.FAMILIES:
            weights = read_file(path)[1]
        else:
            weights = (gguf_mtp if architecture == gguf_mtp.NAME else gguf_drafters).read(path)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # a key may be missing, or hold anything
        raise ExportError(f"{path} does not fit its own keys: {error}; copy it again") from None
    if broken := not_finite(weights):
        raise ExportError(f"{path} has values that are not finite in {', '.join(broken[:4])}; use another file")
    return weights


def rounded(name: str, weight: Tensor, source: Source) -> Tensor:
    """A weight of a layout's name as it reads back."""
    return gguf_file.rounded(name, weight, precision_of(source))


def _small_model(source: Source) -> dict[str, Any]:
    return header(source.model.lm, source.target.tokenizer, precision_of(source))


def _refused(source: Source) -> str | None:
    return refused(source.model.lm, source.target.tokenizer)


LAYOUTS = {
    "small_model": Layout(
        [("lm.*", "*")], _small_model, gguf_settings.small_model, refuses=(_refused,), notes=(gguf_refusals.trees,)
    ),
    "dflash": Layout(
        gguf_drafters.DFLASH, gguf_drafters.block, gguf_settings.dflash, refuses=gguf_refusals.DFLASH,
        notes=(gguf_refusals.siblings, gguf_refusals.zero_head), shift=gguf_drafters.SHIFT,
    ),
    "dspark": Layout(
        gguf_drafters.DSPARK, gguf_drafters.block, gguf_settings.dspark, refuses=gguf_refusals.DSPARK,
        notes=(gguf_refusals.siblings, gguf_refusals.calibration), shift=gguf_drafters.SHIFT,
    ),
    "eagle3": Layout(
        gguf_drafters.EAGLE3, gguf_drafters.eagle3, gguf_settings.eagle3, refuses=gguf_refusals.EAGLE3,
        notes=(gguf_refusals.trees,), shift=gguf_drafters.SHIFT,
    ),
    "mtp": Layout(
        gguf_mtp.MODULE, gguf_mtp.header, gguf_mtp.settings, refuses=gguf_mtp.REFUSES,
        notes=(gguf_refusals.trees, gguf_mtp.whole_target),
    ),
}  # fmt: skip
FORMAT = Format(LAYOUTS, gguf_settings.kind_of, writes=write, reads=read, precisions=tuple(PRECISIONS), rounded=rounded)
