"""The public names, and what may be loaded to show them."""

import ast
import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import outrider
from outrider import drafters, errors
from outrider.cli import main
from scripts import public_stub

ROOT = Path(__file__).resolve().parent.parent

LIGHT = (
    "outrider", "outrider.config", "outrider.errors", "outrider.demo", "outrider.report.schema",
    "outrider.gate.verdict", "outrider.client", "outrider.traffic.replay.run", "outrider.traffic.watch", "outrider.cli",
)  # fmt: skip

IMPORTS = f"""
import importlib, io, json, sys
from contextlib import redirect_stdout
loaded = {{}}
for name in {LIGHT}:
    importlib.import_module(name)
    loaded[name] = sorted({{"torch", "transformers", "datasets"}} & set(sys.modules))
sys.argv = ["outrider", "--help"]
text = io.StringIO()
code = 0
try:
    with redirect_stdout(text):
        importlib.import_module("outrider.cli").main()
except SystemExit as done:
    code = done.code or 0
loaded["--help"] = sorted({{"torch", "transformers", "datasets"}} & set(sys.modules))
print(json.dumps({{"loaded": loaded, "code": code, "help": text.getvalue(), "modules": list(sys.modules)}}))
"""


def test_the_public_names_are_exactly_those_that_load_on_first_use() -> None:
    """Catches a name that is promised and can't be imported, that works but is not promised, or is not documented."""
    assert outrider.__all__ == sorted(set(outrider.__all__)) == sorted(outrider._MODULES)
    for name in outrider.__all__:
        assert callable(getattr(outrider, name)) and inspect.getdoc(getattr(outrider, name)), name
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="no attribute 'verifier'$"):
        outrider.verifier  # noqa: B018
    with pytest.raises(AttributeError, match="EvaluateConfig for evaluate, TrainConfig for train"):
        outrider.Config  # noqa: B018


def test_editors_are_told_every_name_and_setting() -> None:
    """Catches a setting or a kind that a type checker calls unknown, and a name that it finds nothing of."""
    assert public_stub.PATH.read_text() == public_stub.stub(), "run `python scripts/public_stub.py`"
    tree = ast.parse(public_stub.PATH.read_text())
    overloads = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    offered = {each.args.args[0].annotation.slice.value: each.args.kwonlyargs for each in overloads[:-1]}
    assert offered.keys() == {
        path.stem for path in ROOT.glob("outrider/**/drafters/[a-z]*") if path.suffix == ".py" or path.is_dir()
    }
    for kind, given in offered.items():
        assert {each.arg for each in given} == {*drafters.find(kind).Config.model_fields, "device", "quantize"} - {
            "kind"
        }
    imported = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*outrider.__all__} <= imported | {"load_drafter"}


def test_a_program_that_generates_prints_nothing_but_what_it_prints() -> None:
    """Catches bars over weights, and warnings of torchao and torch about extensions for other machines."""
    lines = "import outrider", "print(len(outrider.generate('demo', 'import json', 'ngram', max_new_tokens=4)))"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=600, env=plain
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_imports_and_help_need_no_torch() -> None:
    """Catches a heavy import at the top of a light module, which makes `outrider --help` take seconds."""
    screen = os.environ | {"COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, env=screen)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["code"] == 0
    assert {name: modules for name, modules in report["loaded"].items() if modules} == {}
    assert {name for name in report["modules"] if name.startswith("outrider.cli.")} == {"outrider.cli.console"}
    assert report["help"].count("\n") <= 48
    assert max(map(len, report["help"].splitlines())) <= 80
    first = ("plan", "init", "decode", "prepare", "train", "evaluate", "run", "export", "deploy", "serve", "corpus")
    order = [report["help"].index(f"│ {verb} ") for verb in first]
    assert order == sorted(order)


def test_every_error_is_an_outrider_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error class that `except OutriderError` lets through, and a version that is written twice."""
    for value in vars(errors).values():
        if inspect.isclass(value):
            assert issubclass(value, errors.OutriderError) and value.__name__ in (errors.__doc__ or "")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    monkeypatch.setattr(sys, "argv", ["outrider", "--version"])
    main()
    assert capsys.readouterr().out == f"outrider {outrider.__version__}\n" == f"outrider {version}\n"
