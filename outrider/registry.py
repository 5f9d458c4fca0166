"""Modules by name: files or folders of an Outrider package, or entry points of other distributions.

Imports no torch.  Names are looked up before anything is imported, so that a missing dependency inside a module is not
reported as an unknown name.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
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
    """Modules of one kind, by name."""

    def __init__(self, what: str, packages: Sequence[str], group: str):
        """what: name of the kind in errors.  packages: those whose files and folders are modules.  group: the entry
        points' group."""
        self.what = what
        self.packages = packages
        self.group = group
        self._files: dict[str, str] = {}

    def add_file(self, path: Path) -> str:
        """Register the module in a file for this process; returns its name.

        Raises ConfigError for a missing file, and for a name already taken by another module.
        """
        name, path = path.stem, path.expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"no such file: {path}; name the Python file of a {self.what}")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
            importlib.invalidate_caches()
        if name in self.own() or not name.isidentifier() or (_file(name) or path).resolve() != path:
            raise ConfigError(f"{path} has the name of another module, {name}; rename it, and its kind")
        self._files[name] = name
        return name

    def own(self) -> dict[str, str]:
        """Modules that ship with Outrider, by name."""
        modules = {}
        for package in self.packages:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                modules[module.name] = f"{package}.{module.name}"
        return dict(sorted(modules.items()))

    def all(self) -> dict[str, str]:
        """All modules, including those of other distributions."""
        return {point.name: point.value for point in entry_points(group=self.group)} | self._files | self.own()

    def find(self, name: str) -> ModuleType:
        """The module of this name.  Raises ConfigError for an unknown one, with the nearest, and for one that can't be
        imported."""
        module = self._module(name)
        try:
            return importlib.import_module(module)
        except Exception as error:  # third-party code may raise anything
            raise ConfigError(
                f"{self.place(name)} can't be imported ({type(error).__name__}: {error}); correct it, or uninstall it"
            ) from error

    def _module(self, name: str) -> str:
        modules = self.all()
        if name not in modules:
            raise ConfigError(f"unknown {self.what} {name!r}{nearest(name, modules)}")
        return modules[name]

    def place(self, name: str) -> str:
        """Where a module is defined, for errors."""
        module = self.own().get(name)
        if module is None:
            return self.all()[name]
        path = module.removeprefix("outrider.").replace(".", "/")
        return f"{path}/__init__.py" if (HERE / path).is_dir() else f"{path}.py"


def literals(module: str, constant: str) -> dict[str, Any]:
    """The literal keyword arguments of the call that a module assigns to this constant; empty without one.

    The module is parsed, not imported.  Raises ConfigError if that fails.
    """
    values = _assigned(module, _file(module), constant)
    try:
        keywords = [keyword for call in values if isinstance(call, ast.Call) for keyword in call.keywords]
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    except ValueError as error:
        raise _unreadable(module, constant, error) from error


def keys(module: str, constant: str, beside: str) -> tuple[str, ...]:
    """The string keys of a mapping in a module: in the file `beside` of its folder if there is one, otherwise in the
    module's own file.  Empty without one.

    The module is parsed, not imported.  Raises ConfigError if that fails.
    """
    file = _file(module)
    path = file.with_name(f"{beside}.py") if file is not None and file.name == "__init__.py" else file
    values = _assigned(module, path if path is not None and path.exists() else file, constant)
    constants = [key for mapping in values if isinstance(mapping, ast.Dict) for key in mapping.keys]
    names = [key.value for key in constants if isinstance(key, ast.Constant)]
    return tuple(name for name in names if isinstance(name, str))


def _file(module: str) -> Path | None:
    """The file of a module, without importing it.  Raises ConfigError if there is no such module."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{module} can't be found ({error}); correct its entry point, or uninstall it") from error
    return None if spec is None or not spec.origin else Path(spec.origin)


def _assigned(module: str, path: Path | None, constant: str) -> list[ast.expr]:
    """Values that a file assigns to this name at module level."""
    try:
        body = ast.parse("" if path is None else path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        raise _unreadable(module, constant, error) from error
    named = [(node, node.targets) if isinstance(node, ast.Assign) else (node, [node.target])
             for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]  # fmt: skip
    return [node.value for node, targets in named if node.value and [ast.unparse(one) for one in targets] == [constant]]


def _unreadable(module: str, constant: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{constant} of {module} can't be read ({type(error).__name__}: {error}); use only literals in it, such as "
        "3, 'text' and {'key': 'value'}"
    )
