"""Export a target as a GGUF file, so that llama.cpp can verify with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.errors import ConfigError, ExportError
from outrider.formats.gguf import file, model, reading
from outrider.formats.gguf.file import DEFAULT, FILE, PRECISIONS
from outrider.formats.keys import MANIFEST
from outrider.storage.atomic import new_folder
from outrider.targets.gguf.architectures import ARCHITECTURES
from outrider.targets.hf.transformers import TransformersTarget
from outrider.weights import weights_of


def is_model(files: Sequence[Path]) -> bool:
    """Whether GGUF files contain a language model rather than a draft model.  Raises ExportError for a damaged file."""
    return reading.read_header(files[0]).keys.get("general.architecture") in ARCHITECTURES


def pass_on(name: str, files: Sequence[Path], out: str | Path) -> Path:
    """Copy a target that is already in GGUF files, unchanged, into a new folder.  Returns the folder.

    Raises ExportError if `out` exists.
    """
    names = [FILE] if len(files) == 1 else [path.name for path in files]
    about = {"format": "gguf", "precision": None, "target": {"name": name}}
    with new_folder(Path(out), ExportError) as part:
        for path, file_name in zip(files, names, strict=True):
            shutil.copyfile(path, part / file_name)
        (part / MANIFEST).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return Path(out)


def export_target(target: TransformersTarget, out: str | Path, precision: str | None = None) -> Path:
    """Write a target as GGUF atomically, read it back and compare every weight.  Returns the new folder.

    precision: number type to round to; the target's unless given.  Raises ExportError for a target that llama.cpp would
    compute or tokenise differently, and if `out` exists; ConfigError for an unknown precision.
    """
    spec, kind = target.spec, precision or DEFAULT.get(target.spec.dtype, "f32")
    if kind not in PRECISIONS:
        raise ConfigError(f"gguf can't be written in {kind!r}; choose one of {', '.join(PRECISIONS)}")
    if spec.quantised is not None:
        raise ExportError(
            f"{spec.name} is quantised to {spec.quantised} here; load it unquantised, and give --precision"
        )
    weights, lm = {name: one.detach().cpu() for name, one in weights_of(target.model).items()}, target.model
    keys = model.header(lm, target.tokenizer, kind)
    about = {
        "format": "gguf", "precision": kind,
        "target": {"name": spec.name, "revision": spec.revision, "tokenizer_hash": spec.tokenizer_hash,
                   "weights_hash": spec.weights_hash},
    }  # fmt: skip
    with new_folder(Path(out), ExportError) as part:
        file.write(part / FILE, keys, model.tensors(weights, keys, lm), kind)
        (part / MANIFEST).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        back = model.read_file(part / FILE)[1]
        meant = {name: file.rounded(name, weight, kind) for name, weight in weights.items()}
        if wrong := [name for name in meant if name not in back or not torch.equal(back[name], meant[name])]:
            raise ExportError(
                f"{spec.name} as gguf reads back with different weights: {', '.join(wrong[:4])}; try again"
            )
    return Path(out)
