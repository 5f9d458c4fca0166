"""Copies of the repository with one fault each, and the tests that run the changed lines.

A test run under `scripts/recording.py` records which test runs which line of the package and what it costs; a fault is
then tried only with the tests that can see it, cheapest first.  Used by `faults.py` and `mutants.py`.
"""

from __future__ import annotations

import ast
import atexit
import functools
import hashlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from recording import processor_seconds

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("outrider", "tests", "benchmarks", "recipes", "docs", "examples", "scripts", "pyproject.toml", "README.md")
IGNORED = shutil.ignore_patterns("__pycache__", "build", ".*")


class Edit(NamedTuple):
    """A replacement within one function, class or assigned name, wherever it is in the package."""

    name: str
    """Qualified within its module: `Draft.chain`, `accept`, `DEFAULTS`."""
    old: str
    """Must occur exactly once in all of the package's definitions of that name."""
    new: str


class Change(NamedTuple):
    """A file's new text, and which lines of the old one changed."""

    path: Path
    """Relative to the repository's root."""
    text: str
    lines: Sequence[int]


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Every function, class and constant of a module or class, and nested functions, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(tree, (ast.Module, ast.ClassDef)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + target.id, node) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.stmt):
            yield from definitions(node, prefix)


def sources(root: Path = ROOT) -> dict[Path, str]:
    """All Python files of the package, by their paths relative to the repository's root."""
    return {path.relative_to(root): path.read_text() for path in sorted((root / "outrider").rglob("*.py"))}


def locate(edit: Edit, files: Mapping[Path, str]) -> Change:
    """Where in these files the edit applies.  Raises ValueError unless its text occurs exactly once under its name."""
    places = []
    for path, source in files.items():
        if edit.old not in source:
            continue
        lines = source.splitlines(keepends=True)
        for name, node in _definitions_of(source):
            if name != edit.name:
                continue
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            body = "".join(lines[first - 1 : node.end_lineno])
            if edit.old in body:
                start = sum(map(len, lines[: first - 1])) + body.index(edit.old)
                places += [(path, source, start)] * body.count(edit.old)
    if len(places) != 1:
        raise ValueError(f"{edit.old!r} stands {len(places)} times in definitions named {edit.name}, expected once")
    [(path, source, start)] = places
    text = source[:start] + edit.new + source[start + len(edit.old) :]
    first = source.count("\n", 0, start) + 1
    return Change(path, text, range(first, first + edit.old.count("\n") + 1))


@functools.cache
def _definitions_of(source: str) -> list[tuple[str, ast.stmt]]:
    return list(definitions(ast.parse(source)))


def package_digest(root: Path) -> str:
    """Digest of all Python files of the package."""
    return hashlib.sha256("\n".join(f"{path}\n{text}" for path, text in sources(root).items()).encode()).hexdigest()


class Trial(NamedTuple):
    """The result of the tests for one fault."""

    failed: tuple[str, ...]
    """Tests that failed, in order; or, in brackets, why there is no result."""
    seconds: float
    """CPU seconds of the tests that ran."""
    tests: int
    """Number of tests that could have caught it."""


class Selected:
    """A pytest plugin: runs only the given tests, cheapest files first."""

    def __init__(self, tests: Sequence[str], costs: Mapping[str, float], limit_s: float) -> None:
        self.tests, self.costs, self.limit_s = frozenset(tests), costs, limit_s
        self.failed: list[str] = []
        self.seconds = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        selected = [item for item in items if item.nodeid in self.tests]
        # whole files one after the other, so that a file's fixtures are set up only once
        cost: dict[str, float] = defaultdict(float)
        for item in selected:
            cost[item.nodeid.split("::")[0]] += self.costs.get(item.nodeid, 1.0)
        items[:] = sorted(selected, key=lambda item: (cost[item.nodeid.split("::")[0]], item.nodeid.split("::")[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        began = processor_seconds()
        result = yield
        self.seconds += processor_seconds() - began
        if self.seconds > self.limit_s:
            item.session.shouldstop = "time is up"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"({report.nodeid} can't be imported)")


def preload() -> None:
    """Import what every test file imports and no fault changes, so that a forked child does not have to."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("torch", "transformers", "hypothesis", "pytest", "numpy", "pydantic", "datasets", "fastapi", "scipy"):
        importlib.import_module(name)
    from transformers import Gemma4AssistantForCausalLM, Qwen3ForCausalLM  # noqa: F401


def run_tests(
    copy: Path, tests: Sequence[str], costs: Mapping[str, float], limit_s: float, stops: bool = True
) -> Trial:
    """Run the tests of the copy in a forked child; if `stops`, until the first failure.

    Also catches a fault that makes the tests hang: the child is killed after 1.5 × `limit_s` of wall-clock time.
    """
    if not tests:
        return Trial((), 0.0, 0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        _be_tested(copy, Selected(tests, costs, limit_s), stops, writing)
    os.close(writing)
    ended, _, _ = select.select([reading], [], [], limit_s * 1.5 + 60)
    text = os.read(reading, 1 << 16).decode() if ended else ""
    os.close(reading)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(copy / "tmp", ignore_errors=True)
    if not ended:
        return Trial(("(hangs)",), limit_s, len(tests))
    failed, seconds = json.loads(text) if text else (["(crashes)"], 0.0)
    return Trial(tuple(failed), round(seconds, 2), len(tests))


def _be_tested(copy: Path, plugin: Selected, stops: bool, writing: int) -> NoReturn:
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy)}
    sys.path.insert(0, str(copy))
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    files = sorted({test.split("::")[0] for test in plugin.tests})
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(copy / "tmp"), "-o", "addopts="]
    try:
        code = pytest.main([*options, *(["-x"] if stops else []), *files], plugins=[plugin])
        failed = plugin.failed or ([] if code in (0, 2, 5) else [f"(pytest exits with {int(code)})"])
        os.write(writing, json.dumps([failed[:200], plugin.seconds]).encode())
    finally:
        os._exit(0)


class Bench:
    """A process's copy of the repository, in which changes are planted, tried and reverted one at a time."""

    def __init__(self, root: Path) -> None:
        preload()
        self.copy = Path(tempfile.mkdtemp(prefix="planted-"))
        atexit.register(self._remove, os.getpid())
        for part in COPIED:
            if (root / part).is_dir():
                shutil.copytree(root / part, self.copy / part, ignore=IGNORED)
            else:
                shutil.copy2(root / part, self.copy / part)

    def _remove(self, process: int) -> None:
        """A forked child may run this exit function too, so only the owner deletes the copy."""
        if os.getpid() == process:
            shutil.rmtree(self.copy, ignore_errors=True)

    @contextmanager
    def planted(self, changes: Iterable[tuple[Path, str]]) -> Iterator[None]:
        before: dict[Path, str] = {}
        try:
            for path, text in changes:
                before.setdefault(path, (self.copy / path).read_text())
                self._write(path, text)
            yield
        finally:
            for path, text in before.items():
                self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Bytecode counts as current if its source's mtime in seconds and size match, so it is deleted with every
        write."""
        (self.copy / path).write_text(text)
        for bytecode in (self.copy / path.parent / "__pycache__").glob(f"{path.stem}.*"):
            bytecode.unlink()
