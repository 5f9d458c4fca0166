"""A `Layout`: how one format of another program stores one method: weight names, settings, and what it can't express.

A drafter defines `FORMATS`, its layouts by format name, in its own file or in `formats.py` beside it; the set of
formats is the set of names used there.  Our layer numbers count decoder layers from 0 and mean their outputs; `shift`
is what a format adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.formats import folder as folders
from outrider.nn.draft_model import DraftModel
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import LayerSizes

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to be exported."""

    model: DraftModel
    target: TransformersTarget
    precision: str | None = None
    """Requested number type, for formats that have a choice."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """Measurements stored in the checkpoint; empty if there are none."""

    @property
    def settings(self) -> Any:
        """The drafter's Config."""
        return self.model.config

    @property
    def sizes(self) -> LayerSizes:
        """Sizes of its decoder layers."""
        held: Any = getattr(self.model, "backbone", self.model)
        return held.shape

    @property
    def mask_token(self) -> int | None:
        """The mask token of block drafters and P-EAGLE; None if the mask is a learnt vector."""
        held: Any = getattr(self.model, "backbone", self.model)
        return held.mask_token


Answer = Callable[[Source], str | None]
"""A sentence about a drafter, or None."""


def only(setting: str, value: Any, reason: str) -> Answer:
    """Gives `reason` if a setting has any other value; {} in it is replaced by that value."""
    return lambda source: None if (current := getattr(source.settings, setting)) == value else reason.format(current)


def first(answers: Iterable[Answer], source: Source) -> str | None:
    """The first answer that is not None, else None."""
    return next((answered for answer in answers if (answered := answer(source)) is not None), None)


@dataclass(frozen=True, slots=True)
class Layout:
    """One method in one format."""

    names: Sequence[tuple[str, str]]
    """(our name, their name) pairs; the first match applies, and * matches anything."""
    config: Callable[[Source], dict[str, Any]] | None = None
    """The content of config.json; None if this method can only be imported."""
    settings: Callable[[Config, TransformersTarget], dict[str, Any]] | None = None
    """Our settings for a config.json; None if this method can only be exported."""
    duplicates: Callable[[Source], Sequence[str]] = lambda source: ()
    """Names, as in `export.formats.BORROWED`, of the target's matrices that the format stores a copy of."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Default settings of an imported folder, used if config.json does not set them."""
    files: Callable[[Source, Path], None] = lambda source, folder: None
    """Writes additional files, such as a tokenizer, to the folder."""
    translates: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    """Renames weights with older names to those in `names`."""
    refuses: Sequence[Answer] = ()
    """Why this drafter can't be written in the format."""
    inferred: Callable[[Config, Collection[str]], dict[str, Any]] = lambda config, names: {}
    """Settings inferred from the names of the weights; ExportError if config.json requires a weight that is missing."""
    notes: Sequence[Answer] = ()
    """Notes on an export that succeeds, such as which engine can't load it."""
    shift: int = 0
    """Their layer number minus ours."""
    is_of: Callable[[Config, Collection[str]], bool] = lambda config, names: False
    """Whether a config.json with weights of these names is this method in this format."""
    writes: Callable[[Path, Config, Mapping[str, Tensor], Source], None] = lambda folder, config, weights, source: (
        folders.write(folder, config, weights)
    )
    """Writes the config, and the weights by the format's names; config.json and safetensors by default."""
    reads: Callable[[Path], Mapping[str, Tensor]] = lambda folder: folders.read_weights(folder)
    """Reads the weights of such a folder, by the same names."""
    precisions: tuple[str, ...] = ()
    """Number types to choose from; if empty, weights keep the target's type."""
    rounded: Callable[[str, Tensor, Source], Tensor] = lambda name, weight, source: weight
    """A weight, by its name in the layout, as it reads back."""
