"""One file a method, and the file's name is its kind.  `find` is the registry: a folder's listing, and entry points for others.

A drafter file offers `Config` (with a Literal `kind`) and `build(config, target) -> Drafter`; one that trains also `Model`, a
`DraftModel` made by `Model(config, target)`.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType

from outrider.config import nearest
from outrider.errors import ConfigError

GROUP = "outrider.drafters"


def kinds() -> dict[str, str]:
    """Every drafter found, own and of other distributions: kind to module name."""
    own = {module.name: f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)}
    return {point.name: point.value for point in entry_points(group=GROUP)} | own


def find(kind: str) -> ModuleType:
    """The module of a drafter.  Raises ConfigError with the nearest name for an unknown one."""
    # The name is looked up before the import: a missing dependency inside a drafter must not read as an unknown drafter.
    known = kinds()
    if kind not in known:
        raise ConfigError(f"unknown drafter {kind!r}{nearest(kind, known)}")
    return importlib.import_module(known[kind])
