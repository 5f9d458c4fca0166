"""A draft's folder describes itself: `outrider.json`, which our export writes there, and config.json.  No torch.

Both are checked here before anything reads them.  Import and deployment follow the same rules for layer numbers and
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config import read_object
from outrider.drafters import method, methods
from outrider.errors import ExportError

MANIFEST, CONFIG = "outrider.json", "config.json"
VERSION = 1
"""Of manifests; `checkpoint.VERSION`, which would bring torch along."""
WANTED = {
    dict: "a mapping", str: "a text", int: "a whole number", list[int]: "a list of whole numbers, one per layer",
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"
TYPES: Mapping[str, Mapping[str, Any]] = {
    MANIFEST: {
        "kind": str, "format": str, "config": dict, "target": dict, "target.name": str, "target.precision": str,
        "taps": list[int], "unmapped": dict, "training": dict,
    },
    CONFIG: {
        "eagle_config": dict, "dflash_config": dict, "speculators_config": dict, "block_size": int, "num_heads": int,
        "medusa_num_heads": int, "mask_token_id": int, "markov_head_type": str, "dflash_config.mask_token_id": int,
        **dict.fromkeys(
            (key for own in methods().values() for format, (key, _) in own.layers.items() if format != "gguf"),
            list[int],
        ),
    },
}  # fmt: skip
"""File → key → its type.  null is what others write for nothing, but the manifest's kind and format are texts."""
Found = dict[str, Any]


def read_manifest(folder: Path) -> Found:
    """The manifest of a folder: of our own export or a checkpoint; empty for a folder of others, with or without a
    report of ours.

    Raises ExportError for one that can't be read here.
    """
    path = folder / MANIFEST
    found = read_json(path) if path.exists() else {}
    if "kind" not in found:
        return {}
    _check_types(path, found)
    version = found.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        what = f"of version {_shown(version)}, but this Outrider reads {VERSION}"
        raise ExportError(f"{path} is {what}; use the release that wrote it, or delete that file and import again")
    return found


def read_config(folder: Path) -> Found:
    """config.json of a draft; empty where there is none.  Raises ExportError for values of a wrong type."""
    path = folder / CONFIG
    found = read_json(path) if path.exists() else {}
    _check_types(path, found)
    return found


def read_json(path: Path) -> Found:
    """A JSON object.  Raises ExportError where there is none, or where a key is there twice: readers differ in which
    counts."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} can't be read: {error}; copy the folder again") from None


def _check_types(path: Path, found: Found) -> None:
    for key, wanted in TYPES[path.name].items():
        value = at(found, key)
        if value is None and not (key in ("kind", "format") and key in found):
            continue
        is_list = wanted == list[int] and type(value) is list
        if not (all(type(one) is int for one in value) if is_list else type(value) is wanted):  # true is not a number
            raise ExportError(
                f"{path}: {key} must be {WANTED[wanted]}, got {_shown(value)}; export or copy the folder again"
            )


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "…"


def at(found: Mapping[str, Any], key: str) -> Any:
    """The value under a key such as dflash_config.block, or GGUF's dflash.block_size; None where there is none."""
    if key in found:
        return found[key]
    outer, _, inner = key.rpartition(".")
    return ((found.get(outer) or {}) if outer else found).get(inner)


def layers(kind: str, format: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of the target whose output the draft reads, counted from 0; () where config.json does not name them."""
    key, shift = method(kind).layers.get(format, ("", 0))
    return tuple(layer - shift for layer in at(config, key) or ())


def length(kind: str, format: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Tokens that it drafts a step, by our settings or by the folder's own; None where neither has it."""
    setting = method(kind).length
    own = settings.get(setting)
    if type(own) is int:
        return own
    size = config.get("dflash.block_size" if format == "gguf" else "block_size")
    if setting == "block" and size is not None:
        return int(size) - (not anchor_predicts(kind, format, config))
    if setting == "heads":
        return config.get("num_heads", config.get("medusa_num_heads"))
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    count = first.get("speculative_tokens")
    return count if type(count) is int else None


def anchor_predicts(kind: str, format: str, config: Mapping[str, Any]) -> bool:
    """Whether a block drafts in the anchor's slot too: one token more."""
    if format == "gguf":  # of the files of DFlash only ours do
        default = kind == "dspark"
        is_known = default or "outrider.kind" in config
        return is_known and bool(config.get("dflash.sample_from_anchor", default))
    if format == "speculators":
        return bool(config.get("sample_from_anchor", kind == "dspark"))
    if kind == "domino":
        return bool((config.get("dflash_config") or {}).get("shift_label"))
    return kind == "dspark" or format == "deepspec"


def target_of(config: Mapping[str, Any]) -> str | None:
    """The target that the config.json of others names; None where it names none."""
    own = at(config, "speculators_config.verifier") or {}
    name = own.get("name_or_path") if isinstance(own, Mapping) else None
    name = name or config.get("target_model_name_or_path") or config.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None
