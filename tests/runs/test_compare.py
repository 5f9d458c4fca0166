"""`outrider compare`: a method from outside the package against one of Outrider's."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from verbs import outrider_with

from outrider.errors import ConfigError
from outrider.runs import compare as comparing
from outrider.runs.compare import Options
from outrider.runs.file import load

TOY = '''"""DFlash under another name."""

from typing import Literal

from outrider.drafters import dflash


class Config(dflash.Config):
    kind: Literal["toy_method"] = "toy_method"


class Model(dflash.Model):
    pass


build = Model.build
'''
SIZES = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 3, "taps": [0, 1]}


def test_a_method_of_a_file_is_compared_at_equal_steps(written: Callable[..., Path], tmp_path: Path) -> None:
    """Catches a method that needs an installation, seeds that are mixed up, and a comparison that starts again."""
    (tmp_path / "toy_method.py").write_text(TOY)
    prompts = "".join(json.dumps({"id": f"h{i}", "prompt": f"tell {i} {'xy' * i}"}) + "\n" for i in range(6))
    file = written(drafter={"kind": "dflash", **SIZES})
    (tmp_path / "held_out.jsonl").write_text(prompts)
    settings = ["target.compile=false", "evaluate.prompts=6", "evaluate.temperatures=[0.0]"]
    lines, _ = comparing.compare(file, ["toy_method.py", "dflash"], Options(steps=2, seeds=(0, 1)), settings)
    assert [(line.method, len(line.seeds)) for line in lines] == [("toy_method", 2), ("dflash", 2)]
    assert lines[0].ratio is None and lines[1].ratio is not None
    assert lines[1].ratio.center == pytest.approx(lines[0].tokens_per_step / lines[1].tokens_per_step)
    trained = sorted((tmp_path / "runs" / "tiny").glob("*-*/checkpoint/model.safetensors"))
    assert [path.parent.parent.name for path in trained] == ["dflash-0", "dflash-1", "toy_method-0", "toy_method-1"]
    rows = [{"draft": "default", "temperature": 0.0, "kind": "held_out", "tokens_per_step": 1.0,
             "per_prompt": [[f"h{i}", 12, 12] for i in range(6)]}]  # fmt: skip
    cell = {"target": load(file)[0].target.name, "method": "other", "steps": 2, "seed": 0, "rows": rows}
    (tmp_path / "cells.jsonl").write_text(json.dumps(cell) + "\n")
    before = [path.stat().st_mtime_ns for path in trained]
    stored = Options(steps=2, seeds=(0, 1), cells=tmp_path / "cells.jsonl")
    *_, last = comparing.compare(file, ["toy_method.py", "dflash"], stored, settings)[0]
    assert last.method == "other (stored)"
    assert last.ratio is not None and last.ratio.center == pytest.approx(lines[0].tokens_per_step)
    assert [path.stat().st_mtime_ns for path in trained] == before


def test_what_can_not_be_compared_is_refused_before_anything_is_written(
    written, tmp_path, capsys, monkeypatch
) -> None:  # fmt: skip
    """Catches an hour of training before an unknown name."""
    file = str(written(drafter={"kind": "dflash", **SIZES}))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "json.py").write_text(TOY)
    for words, sentence in (
        (("dflash", "dflash"), "at least two different methods"), (("dflash", "ngram"), "ngram is not a method"),
        (("gone.py", "dflash"), "no such file"), (("json.py", "dflash"), "the name of another module"),
    ):  # fmt: skip
        assert outrider_with("compare", file, *words, "--steps", "2") != 0
        assert sentence in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="either minutes or steps"):
        comparing.compare(file, ["dflash", "eagle3"], Options())
    assert not (tmp_path / "runs").exists()
