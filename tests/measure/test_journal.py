"""An evaluation that was stopped goes on: with what policies and drafters had learnt, and with the same figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import load_drafter
from outrider.decoding.protocols import Drafter
from outrider.errors import DataError
from outrider.loading import Source
from outrider.measure.config import Config
from outrider.measure.journal import Journal, Record, first
from outrider.measure.run import evaluate
from outrider.measure.tasks.names import Prompt
from outrider.measure.tasks.prompts import digest
from outrider.report.parts import LeftOut
from outrider.report.schema import Report
from outrider.runs.baselines import _weights_hash
from outrider.runs.evaluation import COMPARED, NOT_TIMED
from outrider.targets.hf.transformers import TransformersTarget


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


def test_what_was_learnt_before_a_stop_is_known_after_it(talker, quiz, tmp_path) -> None:
    """Catches a drafter or a policy that begins again: its acceptance would be another after each stop."""
    config = Config(
        tasks=(quiz,), prompts=4, max_new_tokens=12, min_first_ngrams=0.0, repeats=0, policy="fixed", batch=2,
        traced_prompts=3, temperatures=(1.0,),
    )  # fmt: skip
    whole = measured(talker, config, tmp_path / "whole")
    assert measured(talker, config, tmp_path / "parts", stop_after=2) is None
    assert figures(measured(talker, config, tmp_path / "parts")) == figures(whole)
    # the planted fault: nothing of what was learnt is restored
    records = Journal(tmp_path / "whole", {"a": 1}).records
    assert [record.indices for record in records] == [[0, 1], [2, 3]]


def test_an_adaptive_policy_says_that_it_learns_again(talker, quiz, tmp_path, caplog) -> None:
    """Its drafts depend on measured times: texts are the same after a stop, acceptance need not be."""
    config = Config(
        tasks=(quiz,), prompts=3, max_new_tokens=12, min_first_ngrams=0.0, repeats=0, policy="auto",
        temperatures=(0.0,), traced_prompts=0,
    )  # fmt: skip
    assert measured(talker, config, tmp_path, stop_after=1) is None
    found = measured(talker, config, tmp_path)
    assert found is not None and all(row.exact for row in found.rows)
    assert "policy auto starts learning again" in caplog.text and "plain at temperature 0" in caplog.text


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


def test_records_of_other_prompts_are_not_used(tmp_path: Path) -> None:
    """Catches a file of prompts that was edited between two runs: the answers would be to other questions."""
    old, new = Prompt("q0", ("say xy",)), Prompt("q0", ("something else",))
    Journal(tmp_path).append(Record("quiz", [0], [digest(old)], LeftOut(id="q0")))
    assert list(Journal(tmp_path).by_index("quiz", [old])) == [0]
    assert not Journal(tmp_path).by_index("quiz", [new])


def test_measurements_under_another_setting_are_not_reused() -> None:
    """Catches an answer length, or another setting that changes what is measured, among those that change nothing."""
    assert set(Config.model_fields) >= NOT_TIMED
    assert not NOT_TIMED & {*COMPARED, "max_new_tokens", "temperatures", "traced_prompts", "repeats", "allow_lossy"}


def test_a_retrained_drafter_is_measured_anew(tmp_path: Path) -> None:
    """Catches measurements of old weights that count as the new one's; the optimiser's moments change nothing."""
    hashes = []
    for name, weights, moments in (("a", b"old", b"1"), ("b", b"new", b"1"), ("c", b"new", b"2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "training.safetensors").write_bytes(moments)
        hashes.append(_weights_hash(Source("d", folder, "dspark", None), {"length": 3}))
    assert hashes[0] != hashes[1] == hashes[2]
