"""What a draft's folder says of itself: `outrider.json`, which our export leaves there, and config.json.  No torch.

Both are checked here, before anything reads them.  Layer numbers and lengths of a folder that comes from elsewhere follow the
rules of `outrider import`, which stands on the same floor and can't be called from here: a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config import read_object
from outrider.errors import ExportError

MANIFEST, CONFIG = "outrider.json", "config.json"
VERSION = 1
"""Of manifests; `checkpoint.VERSION`, which would bring torch along."""
BLOCKS = ("dflash", "dspark", "domino")
"""Draft at most one block."""
WANTED = {dict: "a mapping", list: "a list", str: "a text", int: "a whole number"}
MANIFEST_TYPES = {"kind": str, "format": str, "config": dict, "target": dict, "taps": list}
CONFIG_TYPES = {
    "eagle_config": dict, "dflash_config": dict, "speculators_config": dict, "block_size": int, "num_heads": int,
    "medusa_num_heads": int, "mask_token_id": int, "markov_head_type": str,
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"
OF_BLOCKS = ("dflash_config.target_layer_ids", 0)
LAYERS: Mapping[tuple[str, str], tuple[str, int]] = {
    ("speculators", "eagle3"): (IDS, 1), ("speculators", "peagle"): (IDS, 1),
    ("speculators", "dflash"): ("aux_hidden_state_layer_ids", 1), ("speculators", "dspark"): ("aux_hidden_state_layer_ids", 1),
    ("sglang", "eagle3"): (f"eagle_config.{IDS}", 0), ("sglang", "dflash"): OF_BLOCKS, ("sglang", "dspark"): OF_BLOCKS,
    ("sglang", "domino"): OF_BLOCKS, ("zlab", "dflash"): OF_BLOCKS,
    ("trtllm", "eagle3"): (f"eagle_config.{IDS}", 0), ("trtllm", "dflash"): OF_BLOCKS,
    ("deepspec", "eagle3"): ("target_layer_ids", 0), ("deepspec", "dflash"): ("target_layer_ids", 0),
    ("deepspec", "dspark"): ("target_layer_ids", 0),
    # the authors' own folders have none; one that has is vLLM's
    ("eagle", "eagle3"): (IDS, 1),
}  # fmt: skip
"""(Format, kind) → key of config.json that names the target's layers, and their layer number less ours."""
Found = dict[str, Any]


def manifest(folder: Path) -> Found:
    """What our own export, or a checkpoint, says of a folder; empty for one of others, be a report of ours beside it or not.

    Raises ExportError for one that can't be read here.
    """
    path = folder / MANIFEST
    found = read(path) if path.exists() else {}
    if "kind" not in found:
        return {}
    _check_types(path, found, MANIFEST_TYPES)
    _check_types(path, found.get("target", {}), {"name": str, "precision": str}, "target.")
    _check_layers(path, found.get("taps"), "taps")
    version = found.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise ExportError(
            f"{path} is of version {_shown(version)}, this Outrider reads {VERSION}; use the release that wrote it"
        )
    return found


def config(folder: Path) -> Found:
    """config.json of a draft; empty where there is none.  Raises ExportError for what no draft says."""
    path = folder / CONFIG
    found = read(path) if path.exists() else {}
    _check_types(path, found, CONFIG_TYPES)
    _check_types(path, found.get("dflash_config") or {}, {"mask_token_id": int}, "dflash_config.")
    for key in {key for key, _ in LAYERS.values()}:
        _check_layers(path, _at(found, key), key)
    return found


def read(path: Path) -> Found:
    """A JSON object.  Raises ExportError where there is none."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} can't be read: {error}; copy the folder again") from None


def _check_types(path: Path, found: Mapping[str, Any], types: Mapping[str, type], within: str = "") -> None:
    for key, wanted in types.items():
        value = found.get(key)
        if value is None and key not in ("kind", "format"):  # null is what others write for nothing
            continue
        if key in found and type(value) is not wanted:  # true is no whole number
            raise ExportError(
                f"{path} has {_shown(value)} as {within}{key}, wanted {WANTED[wanted]}; export or copy the folder again"
            )


def _check_layers(path: Path, ids: Any, key: str) -> None:
    if ids is not None and (type(ids) is not list or any(type(layer) is not int for layer in ids)):
        raise ExportError(
            f"{path} has {_shown(ids)} as {key}, wanted a list of whole numbers, one a layer; export or copy the folder again"
        )


def _shown(value: Any) -> str:
    said = ascii(value)
    return said if len(said) <= 60 else said[:60] + "…"


def _at(found: Mapping[str, Any], key: str) -> Any:
    """The value under a key such as dflash_config.block; None where there is none."""
    outer, _, inner = key.rpartition(".")
    return ((found.get(outer) or {}) if outer else found).get(inner)


def layers(kind: str, format: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of the target whose output the draft reads, counted from 0; () where config.json does not tell."""
    key, shift = LAYERS.get((format, kind), ("", 0))
    return tuple(layer - shift for layer in _at(config, key) or ())


def length(kind: str, format: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Tokens that it drafts a step, by our settings or by the folder's own; None where nothing tells."""
    own = settings.get("block" if kind in BLOCKS else "heads" if kind == "medusa" else "length")
    if type(own) is int:
        return own
    if kind in BLOCKS and config.get("block_size") is not None:
        return int(config["block_size"]) - (not _anchor_predicts(kind, format, config))
    if kind == "medusa":
        return config.get("num_heads", config.get("medusa_num_heads"))
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    said = first.get("speculative_tokens")
    return said if type(said) is int else None


def _anchor_predicts(kind: str, format: str, config: Mapping[str, Any]) -> bool:
    """Whether a block drafts in the anchor's slot too: one token more."""
    if format == "speculators":
        return bool(config.get("sample_from_anchor", kind == "dspark"))
    if kind == "domino":
        return bool((config.get("dflash_config") or {}).get("shift_label"))
    return kind == "dspark" or format == "deepspec"
