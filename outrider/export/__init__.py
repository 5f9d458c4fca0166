"""Drafters in the formats of others, both ways; how a method is stored it says itself."""

from __future__ import annotations

from contextlib import suppress

from outrider import drafters
from outrider.errors import ConfigError


def kinds() -> dict[str, list[str]]:
    """Of each format the kinds that can be stored in it.  No drafter is imported."""
    formats_by_kind: dict[str, list[str]] = {}
    for kind in drafters.kinds():
        with suppress(ConfigError):  # what others' code does wrong stops nobody else
            for format in drafters.formats(kind):
                formats_by_kind.setdefault(format, []).append(kind)
    return dict(sorted(formats_by_kind.items()))


def names() -> list[str]:
    """The names of all formats."""
    return list(kinds())
