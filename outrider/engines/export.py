"""Write a drafter for an engine or in a format, with its model card: the implementation of `outrider export`."""

from __future__ import annotations

from pathlib import Path

from outrider.engines import card, names
from outrider.errors import ConfigError, ExportError
from outrider.export.writing import export_folder
from outrider.loading import Source, describe
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target


def export(
    drafter: str | Path | Source, to: str, out: str | Path, target: TransformersTarget | str | None = None,
    precision: str | None = None,
) -> Path:  # fmt: skip
    """Write a drafter for an engine or in a format, read it back, compare every weight, and write its model card.

    drafter: a checkpoint, or a published draft model, by its folder or Hugging Face id. to: a format, or an engine such
    as `vllm`, which stands for the format it reads for this kind of drafter. out: a new folder, returned. target:
    loaded or by name; the one the drafter was trained for unless given. precision: number type to round to, if the
    format has a choice.

    Raises ConfigError for an unknown name or precision, and if the target is unknown; ExportError if the format does
    not support the method or can't express its settings, or if `out` already exists.
    """
    source = drafter if isinstance(drafter, Source) else describe(drafter)
    chosen = names.chosen(to, source.kind)
    target = target or source.target
    if target is None:
        raise ConfigError(f"{source.name} does not name its target; name it with --target")
    if Path(out).exists():
        raise ExportError(f"{out} exists already; name a new folder, or delete it first")
    loaded = load_target(target, compile=False) if isinstance(target, str) else target
    folder = export_folder(source.folder, chosen.format, out, loaded, precision)
    card.write(folder)
    return folder
