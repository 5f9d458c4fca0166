"""Engines and formats by name: the one list that `export`, `deploy` and `verify-export` use and `outrider formats`
prints.

An engine stands for the format it reads for a kind of drafter: for vLLM, speculators' layout of a DFlash, or
transformers' layout of a small model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from outrider.config import nearest
from outrider.engines.engine import ENGINES, engine_name, engine_of, method_of
from outrider.errors import ConfigError
from outrider.export import names as formats
from outrider.export.formats import find, matrix


class Chosen(NamedTuple):
    """The format in which a drafter is written, and the engine it is for."""

    format: str
    engine: str | None
    """Set if an engine was named."""

    @property
    def text(self) -> str:
        """The format and the engine in words."""
        if self.engine is None:
            return self.format
        return f"{self.format} for {engine_of(self.engine).title}"


def chosen(name: str, kind: str) -> Chosen:
    """The format in which a kind of drafter is written for an engine or a format of this name.

    Raises ConfigError for an unknown name, with the closest match, and for an engine that reads no folder of this kind.
    """
    word = name.lower()
    by_name = _engines()
    if word in formats() and (word not in by_name or kind in _written(word)):
        return Chosen(word, None)
    if word not in by_name:
        hint = nearest(word, [*formats(), *by_name])
        hint = hint if "did you mean" in hint else nearest(word, {*formats(), *ENGINES})
        raise ConfigError(f"unknown engine or format {name!r}{hint}")
    engine = engine_name(word)
    method, title = method_of(engine, kind), engine_of(engine).title
    written = [format for format in method.formats if kind in _written(format)]
    if not written:
        advice = f"{title} drafts by itself, with `outrider deploy {kind} --to {engine}`"
        raise ConfigError(f"Outrider writes no folder of {kind} for {title}; {advice}")
    return Chosen(written[0], engine)


def rows() -> list[dict[str, Any]]:
    """Which kinds can be written and read in which format, and which engines read it: `formats.matrix` plus
    `engines`."""
    return [row | {"engines": _readers(row["format"], row["kind"])} for row in matrix()]


def engines() -> list[dict[str, Any]]:
    """The engines: [{engine, title, version, names}]."""
    return [
        {
            "engine": name,
            "title": one.title,
            "version": one.version,
            "names": sorted({one.title.lower(), *one.names} - {name}),
        }
        for name, one in ENGINES.items()
    ]


def _engines() -> dict[str, str]:
    """Every name of an engine."""
    return {name: engine["engine"] for engine in engines() for name in (engine["engine"], *engine["names"])}


def _written(format: str) -> list[str]:
    """Kinds that can be written in a format."""
    return [kind for kind, layout in find(format).items() if layout.config is not None]


def _readers(format: str, kind: str) -> list[str]:
    return [name for name, one in ENGINES.items() if kind in one.methods and format in one.methods[kind].formats]
