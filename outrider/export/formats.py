"""The formats of other programs: list them, and detect the format of a folder.

Anything a format has no key for (number of siblings, calibration, training) is written to `outrider.json` next to it: a
manifest like a checkpoint's, and small weights that have no name in the format.  Engines ignore this file; imports read
it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import drafters
from outrider.checkpoint import is_there, manifest_of
from outrider.config import nearest
from outrider.errors import ConfigError, ExportError
from outrider.export import kinds, names
from outrider.export.manifest import read_manifest
from outrider.formats import folder as folders
from outrider.formats.keys import CONFIG
from outrider.formats.layout import Config, Layout
from outrider.targets.hf.transformers import TransformersTarget

BORROWED = {"embed_tokens.weight": "embedding", "lm_head.weight": "head", "lm_heads.*.weight": "head"}
"""Names that formats use for the target's own matrices."""


def find(format: str) -> dict[str, Layout]:
    """The layouts of a format, by kind.  Raises ConfigError with the nearest name for an unknown one."""
    formats_by_kind = kinds()
    if format not in formats_by_kind:
        raise ConfigError(
            f"unknown format {format!r}{nearest(format, formats_by_kind)}; known: {', '.join(formats_by_kind)}"
        )
    return {kind: drafters.layouts(kind)[format] for kind in formats_by_kind[format]}


def matrix() -> list[dict[str, Any]]:
    """Which kinds can be exported to and imported from each format: [{format, kind, export, import, shift}], sorted by
    format and kind."""
    return [
        {
            "format": name, "kind": kind, "export": layout.config is not None, "import": layout.settings is not None,
            "shift": layout.shift,
        }
        for name in names() for kind, layout in sorted(find(name).items())
    ]  # fmt: skip


def layout_of(format: str, kind: str, writes: bool) -> Layout:
    """Raises ExportError for a method that this format does not support, or supports only in the other direction."""
    able = {
        name: one for name, one in find(format).items() if (one.config if writes else one.settings) is not None
    }  # fmt: skip
    if kind not in able:
        way = "written as" if writes else "read from"
        raise ExportError(f"{kind} can't be {way} {format}; kinds that can: {', '.join(able) or 'none'}")
    return able[kind]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is an Outrider checkpoint rather than a draft model in another format."""
    if not is_there(folder):
        return False
    manifest = read_manifest(folder) if folders.has_config(folder) else manifest_of(folder)
    return "kind" in manifest and "format" not in manifest


def identify(folder: Path, format: str | None = None, kind: str | None = None) -> tuple[str, str]:
    """(format, kind) of a folder in another program's format, from its config.json and the names of its weights.

    format, kind: given if known; an Outrider export names both itself.  Raises ExportError if no format matches, or
    several do.
    """
    if is_checkpoint(folder):
        raise ExportError(f"{folder} is already a checkpoint; use it as it is")
    manifest = read_manifest(folder)
    if format in (None, manifest.get("format")):
        format, kind = manifest.get("format"), kind or manifest.get("kind")
    if format is not None and all(layout.settings is None for layout in find(format).values()):
        raise ExportError(
            f"{folder} is in format {format}, which Outrider writes but can't read; use the checkpoint that it was "
            "made from"
        )
    if not folders.has_config(folder):
        raise ExportError(f"{folder} has no {CONFIG}; give the folder of a draft model as it was published")
    if kind is not None and format is None:
        raise ExportError(f"--kind {kind} needs a format too, since {folder} does not name its own; add --format")
    config = folders.read_config(folder)
    matches = candidates(config, format, kind, folders.read_names(folder))
    if len(matches) == 1:
        return matches[0]
    named = _named(config)
    guesses = ", ".join(f"{name} ({match_kind})" for name, match_kind in matches)
    readable = [name for name in names() if any(layout.settings is not None for layout in find(name).values())]
    which = f"may be {guesses}" if matches else f"matches no drafter of {format or ', '.join(readable)}"
    raise ExportError(f"{folder} {named}, and {which}; name its format and kind with --format and --kind")


def _named(config: Config) -> str:
    """What a folder claims to be, for an error message."""
    if "general.architecture" in config:
        return f"is a GGUF file of architecture {config['general.architecture']!r}"
    key = next((key for key in ("speculators_model_type", "architectures") if config.get(key)), None)
    return f"has no architectures in {CONFIG}" if key is None else f"has {key} {config[key]} in {CONFIG}"


def candidates(
    config: Config, format: str | None, kind: str | None, weights: Collection[str] = ()
) -> list[tuple[str, str]]:
    """(format, kind) pairs that match a config.json, restricted to `format` and `kind` if given.  weights: names of its
    weights."""
    formats = names() if format is None else [format]
    if kind is not None:
        return [(name, kind) for name in formats]
    matches = []
    for name in formats:
        for format_kind, layout in sorted(find(name).items()):
            with suppress(AttributeError, IndexError, KeyError, TypeError):  # values of the wrong type
                matches += [(name, format_kind)] if layout.is_of(config, weights) else []
    return matches


def renamed(names: Iterable[str], rules: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Maps our names to theirs by the first matching rule; names that match no rule are omitted."""
    mapping: dict[str, str] = {}
    for name in names:
        for old, new in rules:
            fits = re.fullmatch(re.escape(old).replace(r"\*", "(.*)"), name)
            if fits:
                mapping[name] = new.replace("*", "".join(fits.groups()))
                break
    return mapping


def borrowed(target: TransformersTarget, name: str) -> Tensor:
    """The target's embedding or head [V, H], on the CPU."""
    ids = torch.arange(target.spec.vocabulary, device=target.device)
    rows = target.embedding_rows(ids) if borrowed_kind(name) == "embedding" else target.head_rows(ids)
    return rows.detach().cpu()


def borrowed_kind(name: str) -> str | None:
    """`embedding` or `head`; None for any other name."""
    return next((kind for pattern, kind in BORROWED.items() if fnmatch(name, pattern)), None)
