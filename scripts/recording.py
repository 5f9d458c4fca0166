"""What each test costs, and which lines of the package it runs.

python scripts/recording.py FOLDER [options of pytest]    runs the tests under coverage and writes both into FOLDER

`Recording` reads the files back.  Times are CPU seconds, including child processes, so that other work on the machine
does not change them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COVERAGE = """\
[run]
source = {root}/outrider
data_file = {folder}/lines
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected,module-not-measured,module-not-imported,already-imported
"""
"""Child processes inherit the name of their test through pytest's own environment variable."""


class Recording:
    """A recorded run of the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = [json.loads(line) for path in sorted(folder.glob("costs-*.jsonl")) for line in path.open()]
        self.costs: dict[str, float] = {row["test"]: sum(row.get(p, 0.0) for p in PHASES) for row in rows}
        self.outcomes: dict[str, str] = {row["test"]: row["outcome"] for row in rows}

    @cached_property
    def tests_of(self) -> dict[str, dict[int, set[str]]]:
        """For each file of the package, relative to the root: the tests that run each of its lines; "" is an import.

        Lines run by a fixture of several tests count for all tests of the file.
        """
        import sqlite3

        from coverage.numbits import numbits_to_nums

        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        of_file: dict[str, set[str]] = defaultdict(set)
        for test in self.costs:
            of_file[test.split("::")[0]].add(test)
        for data in sorted(self.folder.glob("lines.*")):
            with sqlite3.connect(data) as connection:
                rows = connection.execute(
                    "select path, context, numbits from line_bits join file on file.id = file_id "
                    "join context on context.id = context_id"
                )
                for path, context, numbits in rows:
                    name = path[path.rindex("/outrider/") + 1 :]
                    test = context.rpartition(" (")[0] if context.endswith(")") and " (" in context else context
                    tests = of_file[test.split("::")[0]] if context.endswith(SHARED) else {test}
                    for line in numbits_to_nums(numbits):
                        lines[name][line] |= tests
        return lines

    def covering(self, path: Path, lines: Iterable[int]) -> list[str]:
        """Tests that run one of the lines; if they only run on import, the tests that run anything in the file."""
        of_file = self.tests_of.get(path.as_posix(), {})
        tests = set().union(*(of_file.get(line, set()) for line in lines)) & self.costs.keys()
        if not tests:
            tests = set().union(*of_file.values()) & self.costs.keys()
        return sorted(tests, key=lambda test: (self.costs[test], test))


PHASES = ("setup", "call", "teardown")
SHARED = " (shared)"
"""Ends the context of a fixture that serves several tests."""


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Recorder:
    """The plugin: writes a line of JSON per test, and passes the test's name to coverage if that is on."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"costs-{os.getpid()}.jsonl").open("a")
        self.row: dict[str, Any] = {}
        self.sharing = 0
        try:
            from coverage import Coverage

            self.coverage = Coverage.current()
        except ImportError:
            self.coverage = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.row = {"test": item.nodeid, "outcome": "passed"}
        if self.coverage:
            self.coverage.switch_context(item.nodeid)
        result = yield
        if self.coverage:
            self.coverage.switch_context("")
        self.file.write(json.dumps(self.row) + "\n")
        self.file.flush()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if not self.coverage or fixturedef.scope == "function":
            return (yield)
        self.coverage.switch_context(self.row["test"] + SHARED)
        self.sharing += 1
        try:
            return (yield)
        finally:
            self.sharing -= 1
            self.coverage.switch_context(self.row["test"] + SHARED * bool(self.sharing))

    def _phase(self, name: str) -> Generator[None, Any, Any]:
        began = processor_seconds()
        try:
            return (yield)
        finally:
            self.row[name] = round(processor_seconds() - began, 4)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        return (yield from self._phase("setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        return (yield from self._phase("call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        return (yield from self._phase("teardown"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        if report.outcome != "passed":
            self.row |= {"outcome": report.outcome, "why": str(report.longrepr)[-300:]}
        return report

    def pytest_sessionfinish(self) -> None:
        if self.coverage:
            self.coverage.stop()
            self.coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("OUTRIDER_RECORDING")
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder(Path(folder)), "test-recorder")


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    (folder / "coveragerc").write_text(COVERAGE.format(root=ROOT, folder=folder))
    environment = os.environ | {
        "OUTRIDER_RECORDING": str(folder),
        "COVERAGE_PROCESS_START": str(folder / "coveragerc"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
    }
    command = [sys.executable, "-m", "pytest", "-p", "recording", *sys.argv[2:]]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
