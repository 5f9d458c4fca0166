"""A floor imports only floors beneath: the contracts in pyproject.toml, run with the tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).resolve().parent.parent

BROKEN = """
[importlinter]
root_package = outrider

[importlinter:contract:upside-down]
name = the run knows no config
type = forbidden
source_modules = outrider.runs
forbidden_modules = outrider.config
"""


def lint(path: Path) -> int:
    return lint_imports(config_filename=str(path), no_cache=True, verbose=False)


def test_the_floors_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an import that goes upward, sideways between drafters, or in a circle, inside functions too."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {"layers", "independence"} <= {contract["type"] for contract in contracts}
    status = lint(ROOT / "pyproject.toml")
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_a_broken_floor_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a linter that finds nothing because it looks at nothing."""
    (tmp_path / "broken.ini").write_text(BROKEN)
    assert lint(tmp_path / "broken.ini") != EXIT_STATUS_SUCCESS
    assert "the run knows no config BROKEN" in capsys.readouterr().out
