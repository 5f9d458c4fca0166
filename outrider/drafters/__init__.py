"""One file per method; the file's name is its kind.  `find` looks in this folder, in `outrider.lab.drafters` and
among entry points of others.

A drafter file offers `Config` (its `kind` is a Literal of the file's name) and `build(config, target) -> Drafter`.  One
that trains also offers `Model`, a `DraftModel` made by `Model(config, target)`; one whose weights are the target's,
trained further, offers `TargetModel` instead, whose `save_target(folder)` writes the target that it drafts for.  What
export, engines and plans must know of it is its `METHOD`; how other programs store it are its `FORMATS`, in its file or
in `formats.py` of its folder.
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
    """Every drafter found, own and of other distributions: kind to module name."""
    return REGISTRY.all()


def own() -> list[str]:
    """The kinds that ship with Outrider."""
    return list(REGISTRY.own())


def find(kind: str) -> ModuleType:
    """The module of a drafter.  Raises ConfigError for an unknown kind, with the nearest name, and for one that can't
    be used."""
    module = REGISTRY.find(kind)
    _refuse_incomplete(module, kind, REGISTRY.place(kind), "file" if kind in REGISTRY.own() else "entry point")
    return module


def method(kind: str) -> Method:
    """What a kind says of itself; nothing of one that is not known here.  No drafter is imported.

    Raises ConfigError for a METHOD that can't be read.
    """
    module = kinds().get(kind)
    return Method() if module is None else _said(module)


def methods() -> dict[str, Method]:
    """Of every kind whose METHOD can be read; what others' code does wrong is logged, and stops nobody else."""
    found = {}
    for kind, module in kinds().items():
        try:
            found[kind] = _said(module)
        except ConfigError as error:
            logging.getLogger(__name__).warning("%s", error)
    return found


@functools.cache
def _said(module: str) -> Method:
    try:
        return Method(**literals(module, "METHOD"))
    except TypeError as error:
        raise ConfigError(f"METHOD of {module} is none: {error}; see outrider.method.Method") from error


@functools.cache
def formats(kind: str) -> tuple[str, ...]:
    """The formats of others that a kind can be stored in; none of one that is not known here.  No drafter is imported.

    Raises ConfigError for a file that can't be read.
    """
    module = kinds().get(kind)
    return () if module is None else keys(module, "FORMATS", "formats")


def layouts(kind: str) -> Mapping[str, Layout]:
    """How a kind is stored, by format."""
    module = find(kind)
    beside = f"{module.__name__}.formats"
    own = importlib.import_module(beside) if hasattr(module, "__path__") and find_spec(beside) else module
    return vars(own).get("FORMATS", {})


def trained(kind: str) -> Any:
    """The class of what is trained of a drafter, its `Model` or `TargetModel`; None where there is nothing to train."""
    offered = vars(find(kind))
    return offered.get("Model") or offered.get("TargetModel")


def trains_target(kind: str) -> bool:
    """Whether training changes the target: what is measured afterwards is the target that was saved."""
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
    given = next((repr(own) for own in declared if own != kind), "none, or one without a default")
    raise ConfigError(f"{place}: Config.kind must be the {named}'s name, {kind!r}, got {given}")


# ── parts of a drafter that is made of others ─────────────────────────────────────────────────────────────────────────


def _checked(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """The choice with all settings of its kind.  Raises ConfigError for an unknown kind or setting."""
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
"""(folder, target) to the drafter of a checkpoint, as `load_drafter` does.  A room above the drafters passes it in."""


def built(choice: Choice, target: Target, load: Load | None) -> Drafter:
    """The chosen drafter.  Raises ConfigError for a checkpoint where `load` is None."""
    if not isinstance(choice, str):
        module = find(choice["kind"])
        return module.build(configs.build(module.Config, choice), target)
    if load is None:
        raise ConfigError(
            f"member {choice!r} is a checkpoint, and `build` got no function to open it with; "
            "call build(config, target, load=outrider.load_drafter)"
        )
    return load(choice, target)
