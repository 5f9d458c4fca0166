"""`outrider prepare`: samples, costs, and the question before much is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import write_run_file
from verbs import outrider_with

from outrider.cli import console, stages
from outrider.errors import ConfigError
from outrider.runs.file import load
from outrider.runs.forecast import cost
from outrider.runs.forecast.checks import check
from outrider.runs.stages import plan


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tree(path: Path) -> list[str]:
    return sorted(str(one) for one in path.rglob("*"))


def test_samples_show_what_trains(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a mask that nobody can look at before hours of training, and a look that writes or loads weights."""
    write_run_file(tmp_path / "tiny.yaml", folder)
    rows = [{"id": f"k{i}", "prompt": f"질문 {i}", "response": f"답 {i}"} for i in range(5)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = tree(tmp_path)
    given = ("prepare.conversations=talks.jsonl", "prepare.count=null", "prepare.regenerate=false")
    assert outrider_with("prepare", "tiny.yaml", "--look", "2", *given) == 0
    shown = capsys.readouterr().out
    assert "«답 0<|end|>»" in shown and "«답 1<|end|>»" in shown and "답 2" not in shown
    assert "<|user|>질문 0<|end|>" in shown and "k0: " in shown
    assert outrider_with("prepare", "tiny.yaml", "--look", "1") == 0
    assert "the target's answer follows here" in capsys.readouterr().out
    assert tree(tmp_path) == before
    assert outrider_with("prepare", "tiny.yaml") == 0
    capsys.readouterr()
    assert outrider_with("prepare", "tiny.yaml", "--look", "1") == 0
    assert "«" in capsys.readouterr().out, "the target's own answers are shown once they are there"


def test_much_is_not_written_unasked(folder, tmp_path, monkeypatch, capsys):
    """Catches a disk that is filled by a slip in a run file; and a job without a terminal that waits for an answer."""
    write_run_file(tmp_path / "tiny.yaml", folder)
    monkeypatch.setattr(stages, "MUCH_BYTES", 100)
    before = tree(tmp_path)
    assert outrider_with("prepare", "tiny.yaml") == 2
    assert "add --yes" in " ".join(capsys.readouterr().err.split())
    assert tree(tmp_path) == before
    assert outrider_with("prepare", "tiny.yaml", "--yes") == 0
    monkeypatch.setattr(console.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    for answer in (True, False):
        monkeypatch.setattr(console.typer, "confirm", lambda question, answer=answer: answer)
        if answer:
            console.confirm("12 GB will be written")
        else:
            with pytest.raises(ConfigError, match="nothing was written"):
                console.confirm("12 GB will be written")


def test_a_preview_says_what_features_cost(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 38 TB that nobody was told of, and features stored for one pass, or on a disk that is too small."""
    write_run_file(tmp_path / "tiny.yaml", folder)
    found = {(line.stage, line.what): line.value for line in plan("tiny.yaml")}
    settings, _ = load("tiny.yaml")
    inputs = check(settings, ["prepare", "train"])
    tokens = cost.tokens_of(settings, inputs)
    assert tokens.answers == 6 * 16
    assert tokens.source == sum(len(one.messages[0]["content"]) for one in inputs.conversations), "a token a byte"
    assert found["train", "tokens to read, at most"] == tokens.all
    assert found["train", "features live: disk, at most"] == 0
    assert found["train", "features cached: disk, at most"] > 0
    assert str(found["train", "best here"]).split(":")[0] in ("live", "cached", "engine")
    assert "features live: time of the target" in {line.what for line in plan("tiny.yaml")}
    ways = cost.ways(settings, inputs, cost.Tokens(1000, 1000), 10)
    assert [cost.choice(ways, settings, inputs, passes)[0] for passes in (10, 1)] == ["cached", "live"]
    with monkeypatch.context() as patch:
        patch.setattr(cost, "free_disk", lambda folder: 10)
        assert cost.choice(ways, settings, inputs, 10)[0] == "live"
    monkeypatch.setattr(cost.machine, "free_memory", lambda: 10)
    assert cost.choice(ways, settings, inputs, 10)[0] == "engine"


def test_several_sources_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a mixture that `prepare` and `train` read otherwise, and a missing file that is found late."""
    write_run_file(tmp_path / "tiny.yaml", folder, evaluate=None)
    values: dict[str, Any] = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"prompt": f"more {i}"}) + "\n" for i in range(9)))
    del values["prepare"]["conversations"], values["prepare"]["count"]
    values["prepare"]["sources"] = [{"path": "prompts.jsonl", "weight": 1}, {"path": "more.jsonl", "weight": 1}]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    assert outrider_with("run", "tiny.yaml") == 0
    written = json.loads((tmp_path / "runs/tiny/answers/sources.json").read_text())
    assert [one["used"] for one in written["sources"]] == [6, 6]
    assert json.loads((tmp_path / "runs/tiny/provenance.json").read_text())["texts"] == 12
    assert outrider_with("show", "runs/tiny/config.yaml") == 0, "the resolved file is a run file"
    values["prepare"]["sources"][1]["path"] = "gone.jsonl"
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    capsys.readouterr()
    assert outrider_with("run", "tiny.yaml") == 2
    assert "prepare.sources[1].path: no such file: gone.jsonl" in " ".join(capsys.readouterr().err.split())


def test_what_is_measured_does_not_train(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run whose training and evaluation share prompts unless somebody asks for that."""
    write_run_file(tmp_path / "tiny.yaml", folder)
    (tmp_path / "prompts.jsonl").open("a").write('{"id": "bad", "prompt": "Tell: 2 xyxy!"}\n')
    for more, wanted in (((), 6), (("prepare.decontaminate=false",), 7)):
        given = ("prepare.count=null", f"name=run{wanted}", "train.steps=1", *more)
        for verb in ("prepare", "train"):
            assert outrider_with(verb, "tiny.yaml", *given) == 0
        assert json.loads((tmp_path / f"runs/run{wanted}/provenance.json").read_text())["texts"] == wanted
        assert ("1 contaminated" in capsys.readouterr().out) == (wanted == 6)
