"""Read single facts from the config of a draft folder: taps, tokens per step, target.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config import read_object
from outrider.errors import ExportError
from outrider.method import Method

MANIFEST, CONFIG = "outrider.json", "config.json"
OURS = "outrider.kind"
"""A key in GGUF files that we write: the kind of drafter, which the architecture alone does not determine."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.  Raises ExportError if it can't be read or has a duplicate key, since readers differ in which
    value they use."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} can't be read: {error}; copy the folder again") from None


def at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key such as dflash_config.block, or GGUF's dflash.block_size; None if missing."""
    if key in config:
        return config[key]
    outer, _, inner = key.rpartition(".")
    return ((config.get(outer) or {}) if outer else config).get(inner)


def layers(method: Method, format: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of the target whose output the draft reads, counted from 0; () if config.json does not name them."""
    key, shift = method.layers.get(format, ("", 0))
    return tuple(layer - shift for layer in at(config, key) or ())


def length(method: Method, format: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Tokens drafted per step, from our settings or else the folder's own; None if neither has it."""
    tokens = settings.get(method.length)
    if type(tokens) is int:
        return tokens
    size = config.get("dflash.block_size" if format == "gguf" else "block_size", at(config, "dflash_config.block_size"))
    if method.length == "block" and size is not None:
        return int(size) - (not anchor_predicts(method, format, config))
    if method.length == "heads":
        return config.get("num_heads", config.get("medusa_num_heads"))
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    count = first.get("speculative_tokens")
    return count if type(count) is int else None


def anchor_predicts(method: Method, format: str, config: Mapping[str, Any]) -> bool:
    """Whether a block drafts in the anchor's slot too, which gives one more token."""
    key, unless_given = method.in_anchor.get(format) or method.in_anchor.get("", ("", False))
    if format == "gguf" and not unless_given and OURS not in config:  # only our own files set it for such a method
        return False
    value = at(config, key) if key else None
    return unless_given if value is None else bool(value)


def target_of(config: Mapping[str, Any]) -> str | None:
    """The target named in another program's config.json; None if it names none."""
    verifier = at(config, "speculators_config.verifier") or {}
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    name = name or config.get("target_model_name_or_path") or config.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None
