"""One file a method, and the file's name is its kind.  `find` is the registry: a folder's listing, and entry points for others.

A drafter file offers `Config` (its `kind` a Literal of the file's name) and `build(config, target) -> Drafter`; one that trains
also `Model`, a `DraftModel` made by `Model(config, target)`.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType
from typing import get_args

from outrider.config import Config, nearest
from outrider.errors import ConfigError

GROUP = "outrider.drafters"


def kinds() -> dict[str, str]:
    """Every drafter found, own and of other distributions: kind to module name."""
    own = {module.name: f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)}
    return {point.name: point.value for point in entry_points(group=GROUP)} | own


def find(kind: str) -> ModuleType:
    """The module of a drafter.  Raises ConfigError with the nearest name for an unknown one, and for one that can't be used."""
    # The name is looked up before the import: a missing dependency inside a drafter must not read as an unknown drafter.
    known = kinds()
    if kind not in known:
        raise ConfigError(f"unknown drafter {kind!r}{nearest(kind, known)}")
    is_own = known[kind].startswith(f"{__name__}.")
    place = f"drafters/{kind}.py" if is_own else known[kind]
    try:
        module = importlib.import_module(known[kind])
    except Exception as error:  # whatever others' code raises
        raise ConfigError(f"{place}: can't be imported: {type(error).__name__}: {error}") from error
    _refuse_incomplete(module, kind, place, "file" if is_own else "entry point")
    return module


def _refuse_incomplete(module: ModuleType, kind: str, place: str, named: str) -> None:
    """Raises ConfigError for a module that is no drafter, or says another kind than its name."""
    offered = vars(module)
    config = offered.get("Config")
    if not (isinstance(config, type) and issubclass(config, Config)):
        raise ConfigError(f"{place} has no `Config`, a subclass of outrider.config.Config; see docs/write-a-drafter.md")
    if not callable(offered.get("build")):
        raise ConfigError(f"{place} has no `build(config, target)`; see docs/write-a-drafter.md")
    field = config.model_fields.get("kind")
    said = [] if field is None or field.is_required() else [*get_args(field.annotation), field.default]
    if said and set(said) == {kind}:
        return
    given = next((repr(own) for own in said if own != kind), "missing, or has no default")
    raise ConfigError(f"{place}: Config.kind is {given}; it must be the {named}'s name, {kind!r}")
