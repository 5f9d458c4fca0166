"""`prepare.features: cached`: written once, trained on, and refused where it would not fit."""

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.data.features import encodings
from outrider.errors import ConfigError, DataError
from outrider.runs.reporter import Prepared, Reporter, Result, Stored, Trained
from outrider.runs.stages import plan

CACHED = ["prepare.features=cached", "prepare.shard_tokens=100", "prepare.recheck_every=1"]


class Recorder(Reporter):
    def __init__(self) -> None:
        self.results: list[Result] = []

    def finished(self, result: Result) -> None:
        self.results.append(result)


def run(file: Path, *overrides: str, stages: list[str] | None = None) -> Recorder:
    heard = Recorder()
    outrider.run(file, overrides, stages=stages or ["prepare", "train"], reporter=heard)  # type: ignore[arg-type]
    return heard


def test_a_run_trains_on_stored_features(written: Any, tmp_path: Path) -> None:
    """Catches a cache that is written and not read, or written again by each stage."""
    file = written(evaluate=None)
    heard = run(file, *CACHED)
    assert [type(result) for result in heard.results] == [Prepared, Stored, Trained]
    place = tmp_path / "runs/tiny/answers/features"
    shards = sorted(place.glob("features-*"))
    assert len(shards) > 1
    before = {path: path.stat().st_mtime_ns for path in shards}
    again = run(file, *CACHED, "name=again", "prepare.folder=runs/tiny/answers", stages=["train"])
    assert [type(result) for result in again.results] == [Trained]
    assert {path: path.stat().st_mtime_ns for path in place.glob("features-*")} == before
    with pytest.raises(DataError, match="has encoding 'int8', expected 'int4'"):
        run(file, *CACHED, "name=other", "prepare.folder=runs/tiny/answers", "prepare.feature_encoding=int4")


def test_what_can_not_work_is_refused(written: Any) -> None:
    """Catches a setting without effect, one found wrong after the answers are written, and medusa trained on
    nothing."""
    for overrides, wrong in (
        (["prepare.features=engine"], "prepare.features engine needs a vLLM server; give its URL"),
        (["prepare.feature_server=http://x"], "prepare.feature_server http://x has no effect with prepare.features"),
        ([*CACHED, "prepare.top_logprobs=900"], "prepare.top_logprobs 900 must be below the target's vocabulary of"),
        ([*CACHED, "drafter={kind: medusa, heads: 2}"], "stores no final states, but drafter 'medusa' reads them"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            run(written(evaluate=None), *["prepare.top_logprobs=8"] * ("drafter" in overrides[-1]), *overrides)
    medusa = written(evaluate=None, drafter={"kind": "medusa", "heads": 2})
    assert [type(result) for result in run(medusa, *CACHED).results] == [Prepared, Stored, Trained]


def test_a_plan_says_what_features_will_take(written: Any) -> None:
    """Catches a disk that fills without a word before."""
    file = written(evaluate=None)
    lines = {line.what: line.value for line in plan(file, CACHED)}
    assert lines["disk of a token's features, about"] == round(encodings.bytes_per_token("int8", 32, 1))
    assert "disk of a token's features, about" not in {line.what for line in plan(file)}
