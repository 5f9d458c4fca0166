"""Write outrider/__init__.pyi: the public names, and `load_drafter` with the settings of every kind, so that editors
can complete them.

$ python scripts/public_stub.py
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import outrider
from outrider.drafters import find, own

PATH = Path(outrider.__file__).with_suffix(".pyi")
HEAD = '''\
"""Public names for type checkers and editors.  Written by scripts/public_stub.py; a test compares."""

# ruff: noqa: I001
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch

from outrider.targets.protocol import Target'''
COMMON = ["device: str | torch.device | None = None", "quantize: str | None = None"]
"""Settings of `load_drafter` itself."""
OF_ALL = ("kind", "device", "quantize")
PLAIN = (bool, int, float, str, tuple, type(None))
"""Types whose defaults are written out."""


def type_text(annotation: Any) -> str:
    """The type accepted for a setting: a sequence for a tuple, a mapping for a nested config."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(type_text, args)))
    if origin in (tuple, list, Sequence):
        return f"Sequence[{' | '.join(dict.fromkeys(type_text(each) for each in args if each is not Ellipsis))}]"
    if origin in (dict, Mapping):
        return f"Mapping[{', '.join(map(type_text, args))}]"
    if annotation in (None, type(None)):
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, outrider.DrafterConfig):
        return "Mapping[str, Any]"
    return annotation.__name__ if annotation in (bool, int, float, str) else "Any"


def settings_of(kind: str) -> list[str]:
    """Every setting of a kind that is not one of `load_drafter` itself, with its type and default."""
    fields = {name: field for name, field in find(kind).Config.model_fields.items() if name not in OF_ALL}
    plain = {name: repr(field.default) for name, field in fields.items() if isinstance(field.default, PLAIN)}
    return [f"{name}: {type_text(field.annotation)} = {plain.get(name, '...')}" for name, field in fields.items()]


def overload(kind: str, settings: Sequence[str]) -> str:
    """The signature for one kind, filled to full lines that break only between settings."""
    given = [f"kind_or_path: {kind}", "target: Target", "*", *COMMON, *settings]
    lines = textwrap.wrap(" ".join(f"{each},".replace(" ", "\0") for each in given), 116, break_long_words=False)
    whole = ["@overload", "def load_drafter(", *(f"    {line}" for line in lines), ") -> Drafter: ...\n"]
    return "\n".join(whole).replace("\0", " ")


def stub() -> str:
    """The text of the file."""
    homes = {name: home.partition(":") for name, home in outrider._MODULES.items() if name != "load_drafter"}
    imports = [f"from outrider.{module} import {other or name} as {name}" for name, (module, _, other) in homes.items()]
    public = textwrap.indent(textwrap.fill(", ".join(f'"{name}"' for name in outrider.__all__), 112), "    ")
    parts = ["\n".join([HEAD, *sorted(imports), "", f"__all__ = [\n{public},\n]\n__version__: str\n"])]
    for kind in own():
        parts.append(overload(f'Literal["{kind}"]', settings_of(kind)))
    return "\n".join([*parts, overload("str | Path", ["**config: Any"])])


if __name__ == "__main__":
    PATH.write_text(stub())
