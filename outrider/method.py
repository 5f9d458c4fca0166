"""What export, engines and plans need to know about a drafter.  Imports no torch.

A drafter's file defines it as `METHOD = Method(...)` with literals only, because it is parsed without importing the
file, which would import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Cost = Literal["each", "once", "lookup"]


@dataclass(frozen=True, slots=True)
class Method:
    """Facts about one kind of drafter."""

    cost: Cost | None = None
    """How it drafts, for time estimates: a pass per token, one pass per block, or a lookup without a model.  None: it
    must be timed."""
    usual: int = 0
    """Position among the methods that a plan compares by default; 0 if it is not among them."""
    is_added: bool = False
    """Whether a plan that can measure also considers it."""
    is_model: bool = False
    """Whether it drafts with another language model, chosen by the user."""
    is_untrained: bool = False
    """Whether engines run it without a folder, because it is not trained or is part of the target."""
    tokens: int = 4
    """Draft tokens per step in an engine, if neither folder nor settings specify them."""
    length: str = "length"
    """The setting with the draft length: length, block or heads."""
    chain: Mapping[str, Any] = field(default_factory=dict)
    """Settings that turn its tree into the chain that engines draft."""
    free: tuple[str, ...] = ()
    """Settings that its weights do not depend on, so a trained drafter can be loaded with other values.  The length can
    only be lowered."""
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Engine that runs it → the fields of `engines.engine.Method`, and `bad`, versions with bugs, with the fields of
    `engines.engine.Bad`."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Engine that does not run it → what to use instead."""
    layers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Format → the key of config.json or a GGUF file with the target's layers, and the offset of its layer numbers from
    ours."""

    read_only: tuple[str, ...] = ()
    """Formats that engines read but `outrider export` does not write."""
    guessed: tuple[str, ...] = ()
    """Formats whose folders may omit the layers, because engines guess them correctly."""
    in_anchor: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """For block drafters, format → the key that says whether the anchor's slot drafts too, and the default.  An empty
    format stands for all others, an empty key for a key that does not exist."""

    @property
    def is_fixed(self) -> bool:
        """Whether its draft length is limited by training."""
        return self.length != "length"
