"""A run file from Python: its stages, what it tells, what it gives back."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.errors import CheckpointError, ConfigError
from outrider.runs.reporter import Evaluated, Plan, Prepared, Reporter, Result, Trained, TrainingPlan, Update


class Recorder(Reporter):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.updates: dict[str, list[int]] = {}
        self.results: list[Result] = []

    @contextmanager
    def working(self, plan: Plan) -> Iterator[Update]:
        self.plans.append(plan)
        mine = self.updates.setdefault(type(plan).__name__, [])
        yield lambda done, **facts: mine.append(done)

    def finished(self, result: Result) -> None:
        self.results.append(result)


def test_a_run_file_is_one_call(written: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a stage that only the command line has, one that prints, and a plan whose count is never reached."""
    file, heard = written(), Recorder()
    report = outrider.run(file, ["evaluate.prompts=1"], reporter=heard)
    assert report is not None and {row.drafter for row in report.rows} == {"ngram", "dspark"}
    assert report == outrider.Report.load(tmp_path / "runs/tiny")
    done = {plan: own[-1] for plan, own in heard.updates.items()}
    assert done == {"Preparing": 6, "TrainingPlan": 4, "Evaluating": 1}
    assert [plan.total for plan in heard.plans] == [6, 4, 1]
    assert [type(result) for result in heard.results] == [Prepared, Trained, Evaluated]
    assert capsys.readouterr().out == ""
    # and what is there is not done again
    again = Recorder()
    assert outrider.run(file, stages=["prepare", "train"], reporter=again) is None
    assert again.updates == {"Preparing": [], "TrainingPlan": []} and again.plans[0].done == 6


def test_a_run_holds_answers_out_and_is_compared_with_them(written: Any, tmp_path: Path) -> None:
    """Catches a held-out answer that trains, and rows compared with answers that were colder than their texts."""
    file, heard = written(), Recorder()
    prompts = "".join(f'{{"id": "p{i}", "prompt": "say {i}"}}\n' for i in range(33))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    settings = ["prepare.count=33", "prepare.temperature=0.6", "prepare.top_p=1", "prepare.top_k=0"]
    report = outrider.run(
        file,
        [*settings, "prepare.max_new_tokens=8", "evaluate.temperatures=[0, 1]", "evaluate.prompts=1"],
        reporter=heard,
    )
    training = next(plan for plan in heard.plans if isinstance(plan, TrainingPlan))
    found = report.training["dspark"]
    assert (training.source.manifest.texts + found.held_out, found.temperature) == (33, 0.6)
    assert found.held_out == 2 and len(found.acceptance) == len(found.agreement) > 0
    by_temperature = {row.temperature: row.predicted_by_depth for row in report.rows if row.drafter == "dspark"}
    assert len(by_temperature[0]) == len(found.agreement) and by_temperature[1] == ()


def test_a_training_with_other_settings_is_refused_before_anything_is_written(written: Any, tmp_path: Path) -> None:
    """Catches a config.yaml that names settings which nothing was trained with, a --force that no stage hears, and a
    checkpoint that is copied away and can't say from which data, code and machine it came."""
    file, place = written(), tmp_path / "runs/tiny"
    outrider.run(file, ["train.probe_every=2"], stages=["prepare", "train"])
    for name in ("checkpoint", "checkpoints/step-2", "checkpoints/best"):
        found = json.loads((place / name / "provenance.json").read_text())
        wanted = {"commit", "outrider", "torch", "command", "device", "cpus", "memory_bytes", "config", "texts"}
        assert wanted <= found.keys() and found["config"]["train"]["lr"] == 0.01
        assert found["data"]["conversations"] == 6 and len(found["data"]["sources"][0]["files"][0]["sha256"]) == 64
    before = (place / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match="train.lr was 0.01, is 0.02; .*--force"):
        outrider.run(file, ["train.lr=2e-2", "train.steps=6"], stages=["train"])
    assert (place / "config.yaml").read_text() == before
    outrider.run(file, ["train.lr=2e-2", "train.steps=6"], stages=["train"], force=True)
    found = json.loads((place / "checkpoint/outrider.json").read_text())["training"]
    assert found["step"] == 6 and found["changed"][0]["settings"] == {"train.lr": [0.01, 0.02]}


def test_a_stage_that_is_named_must_be_in_the_file(written: Any, tmp_path: Path) -> None:
    """Catches a stage that is left out in silence, and one that is found missing after others have worked."""
    file = written(train=None, evaluate=None)
    with pytest.raises(ConfigError, match="tiny.yaml has no `train:` section"):
        outrider.run(file, stages=["prepare", "train"])
    assert not (tmp_path / "runs").exists()


def test_processes_that_can_not_find_each_other_are_refused(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two processes that do everything twice, since each is alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for stages in (["prepare"], ["prepare", "train"], None):
        with pytest.raises(ConfigError, match="WORLD_SIZE says 2 processes, but .* start them with torchrun"):
            outrider.run(written(), stages=stages)
