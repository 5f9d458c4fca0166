"""A run file under torchrun: all stages by two processes over gloo, with the files of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import write_run_file

import outrider
from outrider.report.schema import Report

ROOT = Path(__file__).resolve().parents[2]
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


def launch(place: Path, *words: str, count: int = 2) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*torchrun, "-m", "outrider", *words], cwd=place, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def written(place: Path) -> dict[str, bytes]:
    """Answers and features of a run."""
    answers = place / "runs" / "tiny" / "answers"
    files = [answers / "answers.jsonl", *sorted((answers / "features").glob("*"))]
    return {path.name: path.read_bytes() for path in files}


def steps(place: Path) -> list[dict[str, Any]]:
    """What the steps of a run's training found."""
    rows = [json.loads(line) for line in (place / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared by one process."""
    place = tmp_path_factory.mktemp("alone") / "work"
    file, before = run_file(place, folder), Path.cwd()
    os.chdir(place)
    try:
        outrider.run(file, stages=["prepare"])
    finally:
        os.chdir(before)
    return place


@pytest.mark.slow
def test_two_processes_run_all_stages_and_write_what_one_writes(alone: Path, folder: Path, tmp_path: Path) -> None:
    """Catches a stage that both do, a result that is there twice or not at all, two reports, two lines of output, and
    features or a training that begin before all answers are there."""
    place = tmp_path / "work"
    done = launch(place, "run", str(run_file(place, folder)))
    assert done.returncode == 0, done.stderr[-3000:]
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
    assert done.stdout.count("prepare  ") == 1 and done.stdout.count("evaluate ") == 1
    assert json.loads((run / "provenance.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_two_processes_share_one_target_through_all_stages(folder: Path, tmp_path: Path) -> None:
    """`target.tensor_parallel: 2`: the first process runs the stages, the other works for it.  Catches a stage that
    both do, and one that asks for weights which no process has whole."""
    one, two = tmp_path / "one" / "work", tmp_path / "two" / "work"
    for place in (one, two):
        run_file(place, folder)
    single = subprocess.run(
        [sys.executable, "-m", "outrider", "run", "tiny.yaml"], cwd=one, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    done = launch(two, "run", "tiny.yaml", "target.tensor_parallel=2")
    assert done.returncode == 0 and single.returncode == 0, done.stderr[-3000:] + single.stderr[-1000:]
    answers = [written(place)["answers.jsonl"] for place in (one, two)]
    assert answers[0] == answers[1]
    losses = [[row["loss"] for row in steps(place)] for place in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    reports = [Report.load(place / "runs" / "tiny" / "report.json") for place in (one, two)]
    rows = [[(row.drafter, row.temperature, row.prompts, row.exact) for row in report.rows] for report in reports]
    assert rows[0] == rows[1]
