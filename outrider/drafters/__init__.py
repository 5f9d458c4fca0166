"""One module per method, named after its kind.  `find` looks here, in `outrider.lab.drafters` and among entry points.

A drafter's module defines `Config` (its `kind` is a Literal of the module's name) and `build(config, target) ->
Drafter`.  If it can be trained, it also defines `Model`, a `DraftModel` made by `Model(config, target)`; if training
changes the target's own weights, it defines `TargetModel` instead, whose `save_target(folder)` writes the new target.
`METHOD` has the facts needed for exports, engines and plans.  `FORMATS`, in the module or in `formats.py` next to it,
lists the file formats of other programs.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import AfterValidator

from outrider import config as configs
from outrider.config import Config
from outrider.errors import ConfigError
from outrider.method import Method
from outrider.registry import Registry, keys, literals

if TYPE_CHECKING:
    from outrider.decoding.protocols import Drafter
    from outrider.formats.layout import Layout
    from outrider.targets.protocol import Target

REGISTRY = Registry("drafter", ("outrider.drafters", "outrider.lab.drafters"), "outrider.drafters")


def kinds() -> dict[str, str]:
    """All drafters, of Outrider and of other distributions: kind → module name."""
    return REGISTRY.all()


def own() -> list[str]:
    """The kinds that ship with Outrider."""
    return list(REGISTRY.own())


def add_file(path: str | Path) -> str:
    """Register the drafter in a Python file for this process; returns its kind, which is the file's name.

    Raises ConfigError for a missing file, and for a name already taken by another module.
    """
    return REGISTRY.add_file(Path(path))


def find(kind: str) -> ModuleType:
    """The module of a drafter.  Raises ConfigError for an unknown kind, with the nearest name, and for an incomplete
    module."""
    module = REGISTRY.find(kind)
    _refuse_incomplete(module, kind, REGISTRY.place(kind), "file" if kind in REGISTRY.own() else "entry point")
    return module


def method(kind: str) -> Method:
    """The METHOD of a kind; the default for an unknown kind.  Imports no drafter.

    Raises ConfigError for an invalid METHOD.
    """
    module = kinds().get(kind)
    return Method() if module is None else _method_of(module)


def methods() -> dict[str, Method]:
    """The METHOD of every kind; invalid ones are left out and logged."""
    by_kind = {}
    for kind, module in kinds().items():
        try:
            by_kind[kind] = _method_of(module)
        except ConfigError as error:
            logging.getLogger(__name__).warning("%s", error)
    return by_kind


@functools.cache
def _method_of(module: str) -> Method:
    try:
        return Method(**literals(module, "METHOD"))
    except TypeError as error:
        raise ConfigError(f"METHOD of {module} is not valid: {error}; see outrider.method.Method") from error


@functools.cache
def formats(kind: str) -> tuple[str, ...]:
    """The formats of other programs that a kind has; none for an unknown kind.  Imports no drafter.

    Raises ConfigError for a module that can't be read.
    """
    module = kinds().get(kind)
    return () if module is None else keys(module, "FORMATS", "formats")


def layouts(kind: str) -> Mapping[str, Layout]:
    """The layouts of a kind, by format."""
    module = find(kind)
    beside = f"{module.__name__}.formats"
    holder = importlib.import_module(beside) if hasattr(module, "__path__") and find_spec(beside) else module
    return vars(holder).get("FORMATS", {})


def trained(kind: str) -> Any:
    """The `Model` or `TargetModel` of a drafter; None if it can't be trained."""
    offered = vars(find(kind))
    return offered.get("Model") or offered.get("TargetModel")


def trains_target(kind: str) -> bool:
    """Whether training changes the target; the saved target is then the one to measure."""
    return "TargetModel" in vars(find(kind))


def _refuse_incomplete(module: ModuleType, kind: str, place: str, named: str) -> None:
    """Raises ConfigError for a module that is not a drafter, or whose kind differs from its name."""
    offered = vars(module)
    config = offered.get("Config")
    if not (isinstance(config, type) and issubclass(config, Config)):
        raise ConfigError(f"{place} has no `Config`, a subclass of outrider.config.Config; see docs/write-a-drafter.md")
    if not callable(offered.get("build")):
        raise ConfigError(f"{place} has no `build(config, target)`; see docs/write-a-drafter.md")
    field = config.model_fields.get("kind")
    declared = [] if field is None or field.is_required() else [*get_args(field.annotation), field.default]
    if declared and set(declared) == {kind}:
        return
    actual = next((repr(value) for value in declared if value != kind), "no field, or one without a default")
    raise ConfigError(f"{place}: Config.kind must be the {named}'s name, {kind!r}, got {actual}")


# ── members of a drafter that combines others ─────────────────────────────────────────────────────────────────────────


def _checked(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """The choice with all settings filled in.  Raises ConfigError for an unknown kind or setting."""
    if isinstance(choice, str):
        if "/" in choice or Path(choice).exists():
            return choice
        choice = {"kind": choice}
    if not isinstance(choice.get("kind"), str):
        raise ConfigError(f"member {choice!r} has no kind; write {{kind: ngram}}, or the folder of a checkpoint")
    return configs.build(find(choice["kind"]).Config, choice).model_dump()


Choice = Annotated[str | dict[str, Any], AfterValidator(_checked)]
"""A kind, a kind with its settings, or the folder of a checkpoint."""
Load = Callable[..., "Drafter"]
"""(folder, target) → the drafter of a checkpoint: `load_drafter`, passed in from a layer above."""


def built(choice: Choice, target: Target, load: Load | None) -> Drafter:
    """The chosen drafter.  Raises ConfigError for a checkpoint if `load` is None."""
    if not isinstance(choice, str):
        module = find(choice["kind"])
        return module.build(configs.build(module.Config, choice), target)
    if load is None:
        raise ConfigError(
            f"member {choice!r} is a checkpoint, and `build` got no function to open it with; "
            "call build(config, target, load=outrider.load_drafter)"
        )
    return load(choice, target)
