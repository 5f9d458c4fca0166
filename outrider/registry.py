"""What a name stands for: a file or folder of a package of ours, or an entry point of another distribution.

Knows no torch.  Names are looked up before anything is imported: a dependency that is missing inside a module must not
read as an unknown name.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.config import nearest
from outrider.errors import ConfigError

HERE = Path(__file__).parent


class Registry:
    """Modules of one sort, by name."""

    def __init__(self, what: str, packages: Sequence[str], group: str):
        """what: such a module is called in errors.  packages: whose files and folders are modules.  group: of entry
        points."""
        self.what, self.packages, self.group = what, packages, group

    def own(self) -> dict[str, str]:
        """What ships with Outrider: name to module."""
        found = {}
        for package in self.packages:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                found[module.name] = f"{package}.{module.name}"
        return dict(sorted(found.items()))

    def all(self) -> dict[str, str]:
        """Everything found, own and of other distributions."""
        return {point.name: point.value for point in entry_points(group=self.group)} | self.own()

    def find(self, name: str) -> ModuleType:
        """The module of this name.  Raises ConfigError for an unknown one, with the nearest, and for one that can't be
        imported."""
        module = self._module(name)
        try:
            return importlib.import_module(module)
        except Exception as error:  # whatever others' code raises
            raise ConfigError(
                f"{self.place(name)} can't be imported ({type(error).__name__}: {error}); correct it, or uninstall it"
            ) from error

    def _module(self, name: str) -> str:
        known = self.all()
        if name not in known:
            raise ConfigError(f"unknown {self.what} {name!r}{nearest(name, known)}")
        return known[name]

    def place(self, name: str) -> str:
        """Where it is defined, for errors."""
        own = self.own().get(name)
        if own is None:
            return self.all()[name]
        path = own.removeprefix("outrider.").replace(".", "/")
        return f"{path}/__init__.py" if (HERE / path).is_dir() else f"{path}.py"


def literals(module: str, constant: str) -> dict[str, Any]:
    """The arguments, all literals, with which a module makes this constant; empty where it has none.

    The module is read and not imported.  Raises ConfigError for one that can't be read so.
    """
    made = _assigned(module, _file(module), constant)
    try:
        keywords = [given for call in made if isinstance(call, ast.Call) for given in call.keywords]
        return {str(given.arg): ast.literal_eval(given.value) for given in keywords}
    except ValueError as error:
        raise _unreadable(module, constant, error) from error


def keys(module: str, constant: str, beside: str) -> tuple[str, ...]:
    """The keys, all texts, of a mapping that a module makes: in the file `beside` of its folder where there is one,
    else in its own.  Empty where it makes none.

    The module is read and not imported.  Raises ConfigError for one that can't be read so.
    """
    own = _file(module)
    path = own.with_name(f"{beside}.py") if own is not None and own.name == "__init__.py" else own
    made = _assigned(module, path if path is not None and path.exists() else own, constant)
    found = [
        key.value for one in made if isinstance(one, ast.Dict) for key in one.keys if isinstance(key, ast.Constant)
    ]
    return tuple(key for key in found if isinstance(key, str))


def _file(module: str) -> Path | None:
    """Raises ConfigError for a module that is not there."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{module} can't be found ({error}); correct its entry point, or uninstall it") from error
    return None if spec is None or not spec.origin else Path(spec.origin)


def _assigned(module: str, path: Path | None, constant: str) -> list[ast.expr]:
    """What a file assigns to this name at its top."""
    try:
        body = ast.parse("" if path is None else path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        raise _unreadable(module, constant, error) from error
    named = [(node, node.targets) if isinstance(node, ast.Assign) else (node, [node.target])
             for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]  # fmt: skip
    return [node.value for node, targets in named if node.value and [ast.unparse(one) for one in targets] == [constant]]


def _unreadable(module: str, constant: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{constant} of {module} can't be read ({type(error).__name__}: {error}); write it of literals alone, such "
        "as 3, 'text' and {'key': 'value'}"
    )
