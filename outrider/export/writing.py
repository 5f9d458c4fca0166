"""Export a drafter to another program's format: rename, account for every weight, write, read back, compare."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.checkpoint import load_model, manifest_for, manifest_of
from outrider.errors import ConfigError, ExportError
from outrider.export.formats import borrowed, identify, is_checkpoint, layout_of, renamed
from outrider.export.reading import described, imported
from outrider.formats.keys import MANIFEST
from outrider.formats.layout import Layout, Source, first
from outrider.nn.draft_model import DraftModel
from outrider.storage.atomic import new_folder
from outrider.targets.hf.transformers import TransformersTarget
from outrider.weights import weights_of


def export_folder(
    folder: str | Path, to: str, out: str | Path, target: TransformersTarget, precision: str | None = None
) -> Path:  # fmt: skip
    """Write a drafter in a format atomically, read it back and compare every weight.  Returns the new folder.

    folder: a checkpoint, or a draft model in another format.  precision: number type to round to, if the format has a
    choice; the target's unless given.  A layout's notes are logged as warnings.  Raises ExportError if the format does
    not support the method or can't express its settings, or if `out` exists; ConfigError for a precision that the
    format does not have.
    """
    folder = Path(folder)
    kind = manifest_of(folder)["kind"] if is_checkpoint(folder) else identify(folder)[1]
    layout = layout_of(to, kind, writes=True)
    if precision is not None and precision not in layout.precisions:
        choice = f"choose one of {', '.join(layout.precisions)}" if layout.precisions else "leave the precision out"
        raise ConfigError(f"{to} can't be written in {precision!r}; {choice}")
    model, about = _opened(folder, target)
    source = Source(model, target, precision, about.get("report") or {})
    if reason := first(layout.refuses, source):
        raise ExportError(f"{folder} can't be written as {to}: {reason}")
    ours_by_name = {name: weight.detach().cpu() for name, weight in weights_of(source.model).items()}
    names = renamed(ours_by_name, layout.names)
    weights = {theirs: ours_by_name[ours] for ours, theirs in names.items()}
    weights |= {name: borrowed(target, name) for name in layout.duplicates(source) if name not in weights}
    unmapped = {name: weight.tolist() for name, weight in ours_by_name.items() if name not in names}
    assert layout.config is not None
    with new_folder(Path(out), ExportError, (OSError, SafetensorError)) as part:
        layout.writes(part, layout.config(source), weights, source)
        layout.files(source, part)
        manifest = {**about, "format": to, "tap_shift": layout.shift, "unmapped": unmapped}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _compare(ours_by_name, part, to, layout, source)
    for note in filter(None, (answer(source) for answer in layout.notes)):
        logging.getLogger(__name__).warning("%s as %s: %s", out, to, note)
    return Path(out)


def _opened(folder: Path, target: TransformersTarget) -> tuple[DraftModel, Mapping[str, Any]]:
    """The model of a checkpoint or of a folder in another format, and its manifest."""
    if is_checkpoint(folder):
        checkpoint, manifest = load_model(folder, target), dict(manifest_of(folder))
        model = checkpoint.over_all_tokens()
        if checkpoint.reduced is not None:
            manifest["config"] = manifest_for(model)["config"]
            logging.getLogger(__name__).warning(
                "%s drafts %d of the target's tokens; as exported it drafts from all of them, by the target's whole "
                "head", folder, checkpoint.config.vocabulary,
            )  # fmt: skip
        return model, manifest
    model = imported(folder, target)
    return model, manifest_for(model, *described(folder))


def _compare(weights: Mapping[str, Tensor], written: Path, to: str, layout: Layout, source: Source) -> None:
    """Read the written folder back and compare it with the intended weights.  Raises ExportError for any difference."""
    names = renamed(weights, layout.names)
    meant = {
        ours: layout.rounded(theirs, weights[ours], source).to(weights[ours].dtype) for ours, theirs in names.items()
    }
    if layout.settings is not None:
        back, meant = weights_of(imported(written, source.target, to)), dict(weights) | meant
    else:
        read_back = layout.reads(written)
        back = {ours: read_back[theirs] for ours, theirs in names.items() if theirs in read_back}
    if wrong := [name for name in meant if name not in back or not torch.equal(back[name].cpu(), meant[name])]:
        raise ExportError(
            f"what was written as {to} reads back with different weights: {', '.join(wrong[:4])}; the folder was "
            "deleted"
        )
