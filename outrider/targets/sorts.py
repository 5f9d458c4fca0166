"""Kinds of targets other than single transformers models."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from outrider.registry import Registry

SORTS = Registry("target", ("outrider.lab.targets",), "outrider.targets")
"""By name; see `outrider.lab.targets`."""


def special(name: str) -> tuple[ModuleType, Any] | None:
    """The special kind of target that a folder describes, and its description; None for a transformers model.

    Imports every kind: those that are models register themselves with transformers.
    """
    sorts = [SORTS.find(sort) for sort in SORTS.all()]
    described = ((sort, sort.described(name)) for sort in sorts if "described" in vars(sort))
    try:
        return next((each for each in described if each[1] is not None), None)
    except OSError:  # no file can have this name; whoever reads it reports that
        return None
