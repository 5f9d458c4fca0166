"""Sources are read twice by a run, to choose and to use, whatever its stages do with them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny import write_run_file

import outrider
from outrider.data import sources
from outrider.data.answers import ANSWERS, read_answers
from outrider.runs.stages import plan


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each source is read."""
    found, original = Counter[str](), sources.from_source

    def counted(source: Any, *given: Any) -> Any:
        found[Path(source.path).name] += 1
        return original(source, *given)

    monkeypatch.setattr(sources, "from_source", counted)
    return found


def test_a_run_reads_its_sources_twice(
    readings: Counter[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stage that reads them once more, for a count, a ledger, hashes or a split."""
    monkeypatch.chdir(tmp_path)
    file = write_run_file(tmp_path / "run.yaml", folder, evaluate=None)
    outrider.run(file, ["prepare.features=cached"])
    assert readings.pop("prompts.jsonl") == 2
    assert len(read_answers(tmp_path / "runs/run/answers" / ANSWERS)) == 6
    outrider.run(file, ["prepare.features=cached", "train.steps=6"], stages=["train"])
    assert readings.pop("prompts.jsonl") == 1
    plan(file)
    assert readings.pop("prompts.jsonl") == 1
    assert not list((tmp_path / "runs/run/answers").glob("tmp*"))


def test_ids_that_come_twice_cost_one_more(
    readings: Counter[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a plan that counts answers to prompts of one id twice, or not at all."""
    monkeypatch.chdir(tmp_path)
    file = write_run_file(tmp_path / "run.yaml", folder, evaluate=None, train=None)
    rows = [{"id": "p", "prompt": f"say {i}"} for i in (1, 2, 2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outrider.run(file)
    assert readings.pop("prompts.jsonl") == 3
    lines = {line.what: line.value for line in plan(file)}
    assert lines["answered before"] == 3
