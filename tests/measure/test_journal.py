"""An evaluation that was stopped goes on: with what policies and drafters had learnt, and with the same figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import load_drafter
from outrider.decoding.protocols import Drafter
from outrider.errors import DataError
from outrider.measure.config import Config
from outrider.measure.journal import Journal, Record, first
from outrider.measure.run import evaluate
from outrider.report.parts import LeftOut
from outrider.report.schema import Report
from outrider.targets.transformers import TransformersTarget


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "quiz.jsonl"
    rows = [{"id": f"q{i}", "prompt": f"say {'xy' * (1 + i % 3)} {i}"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def drafters(talker: TransformersTarget) -> dict[str, Drafter]:
    """Two that learn from prompt to prompt, and one that does not; new ones, as a new process has them."""
    return {
        "ngram": load_drafter("ngram", talker, shortest=1, shared="all"),
        "suffix": load_drafter("suffix", talker, shared="tenant"),
        "plain": load_drafter("ngram", talker, shortest=1),
    }


class Stopped(Exception):
    pass


def measured(talker: TransformersTarget, config: Config, folder: Path, stop_after: int | None = None) -> Report | None:
    def stop(count: int, *_: int) -> None:
        if count == stop_after:
            raise Stopped

    try:
        return evaluate(talker, drafters(talker), config, done=Journal(folder, {"a": 1}), on_prompt=stop)
    except Stopped:
        return None


def figures(report: Report | None) -> list[Any]:
    assert report is not None
    return [
        (
            row.drafter, row.temperature, row.accepted_histogram, row.tokens, row.steps, row.exact,
            [(prompt.id, prompt.tokens, prompt.steps) for prompt in row.per_prompt], row.traced, row.rejections,
        )
        for row in report.rows
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "policy"),
    [
        (2, "by_confidence"),
        pytest.param(1, "fixed", marks=pytest.mark.slow),
        pytest.param(1, "by_confidence", marks=pytest.mark.slow),
        pytest.param(2, "fixed", marks=pytest.mark.slow),
    ],
)
def test_what_was_learnt_before_a_stop_is_known_after_it(
    talker: TransformersTarget, quiz: str, tmp_path: Path, policy: str, batch: int
) -> None:
    """Catches a drafter or a policy that begins again: its acceptance would be another after each stop."""
    config = Config(
        tasks=(quiz,), prompts=4, max_new_tokens=16, min_first_ngrams=0.0, repeats=0, policy=policy, batch=batch,
        traced_prompts=3,
    )  # fmt: skip
    whole = measured(talker, config, tmp_path / "whole")
    assert measured(talker, config, tmp_path / "parts", stop_after=2) is None
    assert figures(measured(talker, config, tmp_path / "parts")) == figures(whole)
    # the planted fault: nothing of what was learnt is restored
    records = Journal(tmp_path / "whole", {"a": 1}).records
    assert [record.indices for record in records] == ([[0], [1], [2], [3]] if batch == 1 else [[0, 1], [2, 3]])


def test_an_adaptive_policy_says_that_it_learns_again(
    talker: TransformersTarget, quiz: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its drafts depend on measured times: texts are the same after a stop, acceptance need not be."""
    config = Config(
        tasks=(quiz,), prompts=3, max_new_tokens=12, min_first_ngrams=0.0, repeats=0, policy="adaptive",
        temperatures=(0.0,),
        traced_prompts=0,
    )  # fmt: skip
    assert measured(talker, config, tmp_path, stop_after=1) is None
    found = measured(talker, config, tmp_path)
    assert found is not None and all(row.exact for row in found.rows)
    assert "policy adaptive learns again" in caplog.text and "plain at temperature 0" in caplog.text


def test_a_line_that_was_cut_is_measured_again(tmp_path: Path) -> None:
    """Catches half a line that is taken for a record, or that the next record is appended to."""
    journal = Journal(tmp_path, {"a": 1})
    journal.append(Record("quiz", [0], ["d"], LeftOut(id="q0")))
    path = tmp_path / "prompts.jsonl"
    whole = path.read_bytes()
    for cut in (1, 10, len(whole.splitlines()[1])):
        path.write_bytes(whole + whole.splitlines()[1][:cut])
        again = Journal(tmp_path, {"a": 1})
        assert [record.indices for record in again.records] == [[0]]
        assert path.read_bytes() == whole


def test_a_damaged_line_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """Catches a prompt that is dropped in silence."""
    Journal(tmp_path, {"a": 1})
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(path.read_bytes() + b'{"task": 1}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl has a line that can't be read .*; delete the file"):
        Journal(tmp_path, {"a": 1})


def test_other_facts_put_the_file_aside_and_are_named(tmp_path: Path) -> None:
    """Catches measurements of another target or machine in one report."""
    Journal(tmp_path, {"evaluate": {"seed": 0}, "target": "x"}).append(Record("quiz", [0], ["d"], LeftOut(id="q0")))
    again = Journal(tmp_path, {"evaluate": {"seed": 1}, "target": "x"})
    assert (again.records, again.changed) == ([], ["evaluate.seed 1, was 0"])
    assert (tmp_path / "prompts.old").exists()
    assert Journal(tmp_path, {"evaluate": {"seed": 1}, "target": "x"}, again=True).changed == []


def test_the_first_prompts_count_whoever_measured_them() -> None:
    """Catches prompts of another process that are taken out of order, and a gap that is passed over."""
    out = Record("quiz", [1], ["d"], LeftOut(id="q1"))
    known = {index: Record("quiz", [index], ["d"]) for index in (0, 2, 3, 5)} | {1: out}
    assert first(known, 3, 9) == ([0, 2, 3], True)
    assert first(known, 4, 9) == ([0, 2, 3], False)
    assert first(known, 9, 4) == ([0, 2, 3], True)


def test_records_of_other_prompts_are_not_used(tmp_path: Path, quiz: str, talker: TransformersTarget) -> None:
    """Catches a file of prompts that was edited between two runs: the answers would be to other questions."""
    config = Config(
        tasks=(quiz,),
        prompts=2,
        max_new_tokens=6,
        min_first_ngrams=0.0,
        repeats=0,
        temperatures=(0.0,),
        traced_prompts=0,
    )
    only = {"plain": drafters(talker)["plain"]}
    evaluate(talker, only, config, done=Journal(tmp_path))
    path = Path(quiz)
    before = path.read_text()
    try:
        path.write_text(before.replace('"say xyxy 1"', '"something else"'))
        told: list[tuple[int, ...]] = []
        evaluate(talker, only, config, done=Journal(tmp_path), on_prompt=lambda *counts: told.append(counts))
    finally:
        path.write_text(before)
    assert told == [(1, 2, 0), (2, 2, 0)]
