"""`prepare.features: cached`: written once, trained on, and refused where it would not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_run_file

import outrider
from outrider.data import encodings
from outrider.errors import ConfigError, DataError
from outrider.runs.reporter import Plan, Prepared, Reporter, Result, Stored, Trained
from outrider.runs.stages import plan

CACHED = ["prepare.features=cached", "prepare.shard_tokens=100", "prepare.recheck_every=1"]


class Recorder(Reporter):
    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.results: list[Result] = []

    def finished(self, result: Result) -> None:
        self.results.append(result)


def run(file: Path, *overrides: str, stages: list[str] | None = None) -> Recorder:
    heard = Recorder()
    outrider.run(file, overrides, stages=stages or ["prepare", "train"], reporter=heard)  # type: ignore[arg-type]
    return heard


def test_a_run_trains_on_stored_features(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that is written and not read, or written again by each stage."""
    monkeypatch.chdir(tmp_path)
    file = write_run_file(tmp_path / "tiny.yaml", folder, evaluate=None)
    heard = run(file, *CACHED)
    assert [type(result) for result in heard.results] == [Prepared, Stored, Trained]
    place = tmp_path / "runs/tiny/answers/features"
    shards = sorted(place.glob("features-*"))
    assert len(shards) > 1
    before = {path: path.stat().st_mtime_ns for path in shards}
    again = run(file, *CACHED, "name=again", "prepare.folder=runs/tiny/answers", stages=["train"])
    assert [type(result) for result in again.results] == [Trained]
    assert {path: path.stat().st_mtime_ns for path in place.glob("features-*")} == before
    with pytest.raises(DataError, match="has encoding 'int8', wanted 'int4'"):
        run(file, *CACHED, "name=other", "prepare.folder=runs/tiny/answers", "prepare.feature_encoding=int4")


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["prepare.features=engine"], "prepare.features engine needs a vLLM server; give its URL"),
        (["prepare.feature_server=http://x"], "prepare.feature_server http://x has no effect with prepare.features"),
        ([*CACHED, "prepare.top_logprobs=900"], "prepare.top_logprobs 900 must be below the target's vocabulary of"),
    ],
)
def test_what_can_not_work_is_refused(
    overrides: list[str], wrong: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a setting without effect, and one found wrong after the answers are written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=wrong):
        run(write_run_file(tmp_path / "tiny.yaml", folder, evaluate=None), *overrides)


def test_a_drafter_that_reads_final_states_refuses_to_lose_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches medusa trained on nothing."""
    monkeypatch.chdir(tmp_path)
    file = write_run_file(tmp_path / "tiny.yaml", folder, evaluate=None, drafter={"kind": "medusa", "heads": 2})
    with pytest.raises(ConfigError, match="top_logprobs 8 stores no final states, but drafter 'medusa' reads them"):
        run(file, *CACHED, "prepare.top_logprobs=8")
    assert [type(result) for result in run(file, *CACHED).results] == [Prepared, Stored, Trained]


def test_a_plan_says_what_features_will_take(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a disk that fills without a word before."""
    monkeypatch.chdir(tmp_path)
    file = write_run_file(tmp_path / "tiny.yaml", folder, evaluate=None)
    lines = {line.what: line.value for line in plan(file, CACHED)}
    assert lines["disk of a token's features, about"] == round(encodings.bytes_per_token("int8", 32, 1))
    assert "disk of a token's features, about" not in {line.what for line in plan(file)}
