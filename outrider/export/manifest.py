"""The files that describe a draft's folder: config.json, and `outrider.json` if Outrider exported it.  No torch.

Both are validated here before anything uses them.  Import and deployment follow the same rules for layer numbers and
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.drafters import methods
from outrider.errors import ExportError
from outrider.formats.keys import CONFIG, MANIFEST, at, read_json

VERSION = 1
"""Manifest version; equals `checkpoint.VERSION`, which is not imported because it would load torch."""
WANTED = {
    dict: "a mapping", str: "a text", int: "a whole number", list[int]: "a list of integers, one per layer",
}  # fmt: skip
TYPES: Mapping[str, Mapping[str, Any]] = {
    MANIFEST: {
        "kind": str, "format": str, "config": dict, "target": dict, "target.name": str, "target.precision": str,
        "taps": list[int], "unmapped": dict, "training": dict,
    },
    CONFIG: {
        "eagle_config": dict, "dflash_config": dict, "speculators_config": dict, "block_size": int, "num_heads": int,
        "medusa_num_heads": int, "mask_token_id": int, "markov_head_type": str, "dflash_config.mask_token_id": int,
        **dict.fromkeys(
            (key for method in methods().values() for format, (key, _) in method.layers.items() if format != "gguf"),
            list[int],
        ),
    },
}  # fmt: skip
"""File → key → its type.  null is allowed, since other programs write it for unset keys, except for the manifest's
kind and format."""
Found = dict[str, Any]


def read_manifest(folder: Path) -> Found:
    """The manifest of an Outrider export or checkpoint; empty for other folders, even if they have a report of ours.

    Raises ExportError for a manifest that this version can't read.
    """
    path = folder / MANIFEST
    stored = read_json(path) if path.exists() else {}
    if "kind" not in stored:
        return {}
    _check_types(path, stored)
    version = stored.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        what = f"of version {_shown(version)}, but this Outrider reads {VERSION}"
        raise ExportError(f"{path} is {what}; use the release that wrote it, or delete that file and import again")
    return stored


def read_config(folder: Path) -> Found:
    """config.json of a draft; empty if there is none.  Raises ExportError for values of the wrong type."""
    path = folder / CONFIG
    stored = read_json(path) if path.exists() else {}
    _check_types(path, stored)
    return stored


def _check_types(path: Path, stored: Found) -> None:
    for key, type_ in TYPES[path.name].items():
        value = at(stored, key)
        if value is None and not (key in ("kind", "format") and key in stored):
            continue
        is_list = type_ == list[int] and type(value) is list
        if not (all(type(one) is int for one in value) if is_list else type(value) is type_):  # true is not an int
            raise ExportError(
                f"{path}: {key} must be {WANTED[type_]}, got {_shown(value)}; export or copy the folder again"
            )


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "…"
