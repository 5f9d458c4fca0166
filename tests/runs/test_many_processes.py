"""A run file in several processes: all stages by two processes over gloo, with the files of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import write_run_file

import outrider
from outrider.report.schema import Report
from tests.runs.forks import fork_all

PREPARE = {"count": 6, "length": 48, "max_new_tokens": 16, "slots": 1, "features": "cached", "shard_tokens": 100}
TRAIN = {"steps": 2, "batch": 2, "lr": 1e-2, "dtype": "float32", "log_every": 1}


def run_file(place: Path, target: Path) -> Path:
    """A run file in `place`; texts do not depend on their batch, and the prompts lie beside the folder."""
    place.mkdir(parents=True, exist_ok=True)
    prepare = PREPARE | {"conversations": str(place.parent / "prompts.jsonl")}
    file = write_run_file(place / "tiny.yaml", target, prepare=prepare, train=TRAIN)
    values = yaml.safe_load(file.read_text()) | {"target": {"name": str(target), "dtype": "float64"}}
    file.write_text(yaml.safe_dump(values))
    (place / "prompts.jsonl").replace(place.parent / "prompts.jsonl")
    return file


def written(place: Path, name: str = "tiny") -> dict[str, bytes]:
    """Answers and features of a run."""
    answers = place / "runs" / name / "answers"
    files = [answers / "answers.jsonl", *sorted((answers / "features").glob("*"))]
    return {path.name: path.read_bytes() for path in files}


def steps(place: Path, name: str = "tiny") -> list[dict[str, Any]]:
    """What the steps of a run's training found."""
    rows = [json.loads(line) for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.mark.slow
def test_two_processes_run_all_stages_and_write_what_one_writes(folder, tmp_path, monkeypatch):
    """Catches a stage that both do, a result that is there twice or not at all, two reports, two lines of output, and
    features or a training that begin before all answers are there."""
    place, alone = tmp_path / "two" / "work", tmp_path / "one" / "work"
    file = run_file(alone, folder)
    monkeypatch.chdir(alone)
    outrider.run(file, stages=["prepare", "train"])
    file = run_file(place, folder)
    monkeypatch.chdir(place)
    said = fork_all(2, "run", str(file), log=tmp_path / "log")
    assert written(place) == written(alone)
    assert len(written(place)) > 3  # answers, cache.json, and more than one shard
    run = place / "runs" / "tiny"
    assert [row["step"] for row in steps(place)] == [1, 2]
    report = Report.load(run / "report.json")
    assert {row.drafter for row in report.rows} >= {"ngram"} and all(row.prompts == 2 for row in report.rows)
    measured = [
        index for path in run.glob("prompts*.jsonl") for line in path.read_text().splitlines()[1:]
        for index in json.loads(line)["indices"]
    ]  # fmt: skip
    assert sorted(measured) == [0, 1]
    assert said.count("prepare  ") == 1 and said.count("evaluate ") == 1
    assert json.loads((run / "provenance.json").read_text())["processes"] == 2
    # and one target that both share, for which the second works only
    fork_all(2, "run", "tiny.yaml", "target.tensor_parallel=2", "name=shared", log=tmp_path / "shared")
    assert written(place, "shared")["answers.jsonl"] == written(alone)["answers.jsonl"]
    losses = [[row["loss"] for row in steps(*one)] for one in ((place, "shared"), (alone,))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
