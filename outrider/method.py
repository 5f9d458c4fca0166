"""What export, engines and plans must know of a drafter, which says it itself.  Knows no torch.

A drafter's file has it as `METHOD = Method(...)`, of literals alone: it is read without importing the file, which would
bring torch along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Cost = Literal["each", "once", "lookup"]


@dataclass(frozen=True, slots=True)
class Method:
    """One drafter, seen from outside."""

    cost: Cost | None = None
    """How it drafts, from which its seconds are known on paper: a token a pass, a block in one, or without a model.
    None: it must be timed."""
    usual: int = 0
    """Its place among those that a plan compares unless others are named; 0 for none."""
    is_added: bool = False
    """A plan that may measure looks at it beside these."""
    is_model: bool = False
    """It drafts with another language model, which the user names."""
    is_untrained: bool = False
    """Engines run it without a folder: nothing was trained, or the target has it."""
    tokens: int = 4
    """Tokens that an engine drafts a step where neither folder nor settings say."""
    length: str = "length"
    """The setting that says how many it drafts: length, block or heads."""
    chain: Mapping[str, Any] = field(default_factory=dict)
    """Settings that make its tree the chain that engines draft."""
    free: tuple[str, ...] = ()
    """Settings on which its weights do not depend: a trained drafter can be loaded with others.  That of its length can
    only be lowered."""
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By engine that runs it: the fields of `engines.engine.Method`, and `bad`, versions that draft it wrongly, with
    those of `engines.engine.Bad`."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """By engine that does not run it: what to use."""
    layers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By format: the key of config.json, or of a GGUF file, that names the target's layers, and their layer number less
    ours."""

    read_only: tuple[str, ...] = ()
    """Formats of others that engines read and `outrider export` does not write."""
    guessed: tuple[str, ...] = ()
    """Formats whose folders need not name the layers: engines guess them right."""
    in_anchor: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Of a block drafter, by format: the key that says whether it drafts in the anchor's slot too, and what holds
    without it.  An empty format is any other; an empty key is never there."""

    @property
    def is_fixed(self) -> bool:
        """It was trained to draft so many at most."""
        return self.length != "length"
