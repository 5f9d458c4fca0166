"""Drafters in the formats of others, both ways: one file a format, and the file's name is its name."""

from __future__ import annotations

import pkgutil

MACHINERY = ("card", "folder", "formats", "layout", "manifest", "reading", "released", "writing")
"""Files of this folder that are not formats."""


def names() -> list[str]:
    """The names of all formats."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in MACHINERY)
