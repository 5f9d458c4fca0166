"""A `Layout`: one method in one format of other programs, with names of weights, settings, and what it has no key for.

A drafter offers `FORMATS`, its layouts by the name of the format, in its file or in a file `formats.py` beside it; a
format is what has a layout.  Layer numbers: ours count decoder layers from 0 and mean what comes out of them; `shift`
is what is added there.
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
    """A checkpoint about to be written elsewhere."""

    model: DraftModel
    target: TransformersTarget
    precision: str | None = None
    """Type of number that was asked for, in a format that has a choice."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What was measured with it, as the checkpoint has it; empty where nothing was."""

    @property
    def settings(self) -> Any:
        """The drafter's Config."""
        return self.model.config

    @property
    def sizes(self) -> LayerSizes:
        """Of its decoder layers."""
        held: Any = getattr(self.model, "backbone", self.model)
        return held.shape

    @property
    def mask_token(self) -> int | None:
        """The mask token of block drafters and P-EAGLE; None where the mask is a learnt vector."""
        held: Any = getattr(self.model, "backbone", self.model)
        return held.mask_token


Answer = Callable[[Source], str | None]
"""A sentence about a drafter, or None."""


def only(setting: str, value: Any, reason: str) -> Answer:
    """`reason` where a setting has another value; {} in it becomes that value."""
    return lambda source: None if (current := getattr(source.settings, setting)) == value else reason.format(current)


def first(answers: Iterable[Answer], source: Source) -> str | None:
    """The first of these sentences that is not None, else None."""
    return next((answered for answer in answers if (answered := answer(source)) is not None), None)


@dataclass(frozen=True, slots=True)
class Layout:
    """One method in one format."""

    names: Sequence[tuple[str, str]]
    """Ours and theirs, the first that fits counts; * is anything."""
    config: Callable[[Source], dict[str, Any]] | None = None
    """The content of config.json; None where this method is only read."""
    settings: Callable[[Config, TransformersTarget], dict[str, Any]] | None = None
    """Our settings for a config.json; None where this method is only written."""
    duplicates: Callable[[Source], Sequence[str]] = lambda source: ()
    """Names, as in `export.formats.BORROWED`, of what the format wants a copy of although it is the target's."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a folder that comes from elsewhere, where config.json does not name them."""
    files: Callable[[Source, Path], None] = lambda source, folder: None
    """Writes what else belongs into the folder, such as a tokenizer."""
    translates: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    """Makes older names of theirs those of `names`."""
    refuses: Sequence[Answer] = ()
    """Why this drafter can't be written in the format."""
    inferred: Callable[[Config, Collection[str]], dict[str, Any]] = lambda config, names: {}
    """Settings that follow from the names of their weights; ExportError where config.json names a missing weight."""
    notes: Sequence[Answer] = ()
    """Notes on a folder that can be written, such as which engine won't load it."""
    shift: int = 0
    """Their layer number less ours."""
    is_of: Callable[[Config, Collection[str]], bool] = lambda config, names: False
    """Whether a config.json with weights of these names is of this method in this format."""
    writes: Callable[[Path, Config, Mapping[str, Tensor], Source], None] = lambda folder, config, weights, source: (
        folders.write(folder, config, weights)
    )
    """Writes the config and the weights by their names; safetensors unless given."""
    reads: Callable[[Path], Mapping[str, Tensor]] = lambda folder: folders.read_weights(folder)
    """The weights of such a folder under the same names."""
    precisions: tuple[str, ...] = ()
    """Types of number to choose from; without any, weights have the target's."""
    rounded: Callable[[str, Tensor, Source], Tensor] = lambda name, weight, source: weight
    """A weight, by its name in the layout, as it reads back."""
