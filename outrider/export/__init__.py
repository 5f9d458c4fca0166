"""Drafters in the formats of others, both ways: one file a format, and the file's name is its name."""

from __future__ import annotations

import pkgutil

MACHINERY = (
    "card", "folder", "formats", "gguf_drafters", "gguf_file", "gguf_model", "gguf_mtp", "gguf_read", "gguf_refusals",
    "gguf_settings", "gguf_target", "gguf_tokenizer", "layout", "manifest", "reading", "released", "writing",
)  # fmt: skip
"""Files of this folder that are not formats."""


def names() -> list[str]:
    """The names of all formats."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in MACHINERY)
