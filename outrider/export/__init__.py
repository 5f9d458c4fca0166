"""Drafters in the formats of others, both ways; how a method is stored it says itself."""

from __future__ import annotations

from contextlib import suppress

from outrider import drafters
from outrider.errors import ConfigError


def names() -> list[str]:
    """The names of all formats.  No drafter is imported."""
    found: set[str] = set()
    for kind in drafters.kinds():
        with suppress(ConfigError):  # what others' code does wrong stops nobody else
            found |= {*drafters.formats(kind)}
    return sorted(found)
