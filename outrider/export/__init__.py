"""Export drafters to the formats of other programs and import them; each drafter defines its own layouts."""

from __future__ import annotations

from contextlib import suppress

from outrider import drafters
from outrider.errors import ConfigError


def kinds() -> dict[str, list[str]]:
    """The drafter kinds that each format can store, by format.  Imports no drafter."""
    formats_by_kind: dict[str, list[str]] = {}
    for kind in drafters.kinds():
        with suppress(ConfigError):  # a broken plug-in must not hide the other drafters
            for format in drafters.formats(kind):
                formats_by_kind.setdefault(format, []).append(kind)
    return dict(sorted(formats_by_kind.items()))


def names() -> list[str]:
    """The names of all formats."""
    return list(kinds())
