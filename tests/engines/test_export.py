"""`export` in Python and `outrider export`: one function, which writes the folder and its model card."""

import json
from pathlib import Path

import pytest
from verbs import outrider_with

from outrider import load_target
from outrider.engines.export import export
from outrider.errors import ConfigError, ExportError
from outrider.targets.hf.transformers import TransformersTarget


def test_python_and_the_command_line_write_the_same_folder(home: Path, tmp_path: Path) -> None:
    """Catches a model card that only one of them writes, and an engine's name that only one of them knows."""
    name = str(home / "target")
    target: TransformersTarget = load_target(name, compile=False)
    folders = [
        export(home / "published", "vllm", tmp_path / f"python-{i}", given) for i, given in enumerate((target, name))
    ]
    words = ("export", str(home / "published"), "--to", "vllm", "--out", str(tmp_path / "cli"), "--target", name)
    assert outrider_with(*words) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "cli").iterdir()}
    manifest = json.loads(files["outrider.json"])
    assert "README.md" in files and (manifest["kind"], manifest["format"]) == ("dflash", "speculators")
    for folder in folders:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_an_export_that_can_not_be_is_refused_before_the_target_loads(home, tmp_path, capsys):
    with pytest.raises(ConfigError, match="does not name its target"):
        export(home / "published", "vllm", tmp_path / "out")
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        export(home / "published", "vlm", tmp_path / "out", "/none")
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="exists already"):
        export(home / "published", "vllm", tmp_path / "out", "/none")
    assert not list((tmp_path / "out").iterdir())
    words = ("export", str(home / "published"), "--to", "vllm", "--out")
    assert outrider_with(*words, str(tmp_path / "two")) == 2
    assert "does not name its target; name it with --target" in " ".join(capsys.readouterr().err.split())
    assert outrider_with(*words, str(tmp_path / "out"), "--target", "/none") == 1
    assert "exists already" in capsys.readouterr().err
