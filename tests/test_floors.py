"""A layer imports only the layers beneath it: the contracts in pyproject.toml, run with the tests."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).resolve().parent.parent


def lint(path: Path) -> int:
    return lint_imports(config_filename=str(path), no_cache=True, verbose=False)


COMES_WITH = {"markupsafe": "jinja2", "tokenizers": "transformers", "starlette": "fastapi", "pydantic_core": "pydantic",
              "fsspec": "datasets", "huggingface_hub": "transformers"}  # fmt: skip
"""Another's part, which is there where the other is."""
OPTIONAL = {
    "lm_eval": ("gate/harness.py", "gate/language_model.py"),
    "triton": ("kernels/gpu.py", "kernels/decoder_layer.py", "kernels/gpu_acceptance.py", "kernels/logits.py"),
}
"""The only files that need an extra, or what comes with torch for a GPU; only what these are for loads them."""


def imported(file: Path) -> set[str]:
    """Other distributions' modules that a file imports when it is loaded."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"outrider"}


def test_what_a_file_imports_is_a_dependency() -> None:
    """Catches a wheel that loads here, among the tools of the developers, and nowhere else."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", one)[0].lower().replace("-", "_").replace("pyyaml", "yaml") for one in asked}
    for file in sorted((ROOT / "outrider").rglob("*.py")):
        allowed = names | {name for name, places in OPTIONAL.items() if file.as_posix().endswith(places)}
        needed = {COMES_WITH.get(name, name) for name in imported(file)}
        assert needed <= allowed, f"{file} needs {needed - allowed}"


def test_the_floors_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an import that goes upward, sideways between drafters, or in a circle, inside functions too."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {"layers", "independence"} <= {contract["type"] for contract in contracts}
    status = lint(ROOT / "pyproject.toml")
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out
