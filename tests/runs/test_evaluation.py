"""An evaluation by drafters' names: stopped, killed, shared by processes, and into a folder that has a report."""

import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs import outrider_with

from outrider.report.schema import Report
from outrider.storage.lock import held
from tests.runs.forks import fork

PROMPTS = 4
DRAFTERS = ("ngram", "suffix")


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task") / "quiz.jsonl"
    rows = [{"id": f"q{i}", "prompt": f"tell {i} {'xyz' * (i % 4)}"} for i in range(4 * PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(folder: Path, quiz: Path, out: Path, *more: str, drafters: tuple[str, ...] = DRAFTERS) -> list[str]:
    return [
        "evaluate", *drafters, "--target", str(folder), "--tasks", str(quiz), "--temperatures", "0,1",
        "--prompts", str(PROMPTS), "--max-new-tokens", "10", "--out", str(out), "target.dtype=float64",
        "evaluate.min_first_ngrams=0", "evaluate.repeats=0",
        "evaluate.traced_prompts=1", *more,
    ]  # fmt: skip


def lines(out: Path) -> int:
    path = out / "prompts.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(happened: Callable[[], bool], process: multiprocessing.Process, log: Path) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert process.is_alive() and time.monotonic() < until, log.read_text()
        time.sleep(0.005)


TIMES = ("_ms", "_s", "_per_s", "speedup", "seconds", "overhead", "share", "memory", "under_load", "contention", "tpot")


def rows(out: Path, drafter: str | None = None) -> list[dict[str, Any]]:
    """Each row's acceptance, texts and counts, without times."""
    found = [row.model_dump(mode="json") for row in Report.load(out).rows if drafter in (None, row.drafter)]
    for row in found:
        row["per_prompt"] = [
            [prompt[key] for key in ("id", "tokens", "steps", "exact")] for prompt in row["per_prompt"]
        ]
    return [
        {key: value for key, value in row.items() if not any(word in key for word in (*TIMES, "itl", "ttft"))}
        for row in found
    ]


@pytest.fixture(scope="module")
def whole(folder: Path, quiz: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert outrider_with(*words(folder, quiz, out)) == 0
    return out


def test_drafters_by_name_are_measured_at_every_temperature(whole: Path) -> None:
    """Catches a drafter that is measured at the first temperature alone, and answers that are not the target's."""
    found = Report.load(whole)
    assert [(row.drafter, row.temperature) for row in found.rows] == [
        (drafter, temperature) for drafter in DRAFTERS for temperature in (0.0, 1.0)
    ]
    assert all(row.prompts == PROMPTS and row.exact is (True if row.temperature == 0 else None) for row in found.rows)
    assert {found.training[drafter].seconds for drafter in DRAFTERS} == {0}
    assert found.provenance["config"]["drafters"] == list(DRAFTERS)
    assert (whole / "report.html").exists() and lines(whole) == 1 + PROMPTS


def test_an_evaluation_that_was_killed_ends_as_one_that_was_not(whole, folder, quiz, tmp_path, capsys):
    """Catches a prompt that is lost or measured twice, a line that is cut, and a drafter that forgot what it had
    learnt.

    suffix learns from prompt to prompt: its acceptance depends on all prompts before.
    """
    out, log = tmp_path / "out", tmp_path / "log"
    process = fork(*words(folder, quiz, out), log=log)
    wait_for(lambda: lines(out) >= 3, process, log)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (out / "report.json").exists()
    with (out / "prompts.jsonl").open("ab") as file:
        file.write(b'{"task": "quiz", "indices": [3')  # as a kill in the middle of a write leaves it
    before = (out / "prompts.jsonl").read_bytes()
    assert outrider_with(*words(folder, quiz, out)) == 0
    assert "prompts were measured before" in capsys.readouterr().out
    assert (out / "prompts.jsonl").read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert lines(out) == 1 + PROMPTS
    assert rows(out) == rows(whole)


def test_two_evaluations_do_not_write_to_one_folder(folder, quiz, tmp_path, capsys):
    """Catches prompts of two evaluations in one journal."""
    out = tmp_path / "out"
    out.mkdir()
    with held(out, AssertionError("the folder is new")):
        assert outrider_with(*words(folder, quiz, out)) == 1
    assert f"another evaluation is writing to {out}; wait until it ends" in " ".join(capsys.readouterr().err.split())
    assert not list(out.iterdir())


def test_a_fuller_report_is_not_replaced_unasked(whole, folder, quiz, capsys):
    """Catches hours of measuring that a shorter evaluation overwrites."""
    before = (whole / "report.json").read_bytes()
    fewer = {
        "4 prompts per task, but this evaluation has 2": ("--prompts", "2"),
        "temperature 1": ("--temperatures", "0"),
        "max_new_tokens 10, and this evaluation 8": ("--max-new-tokens", "8"),
        "task quiz": ("--tasks", "stdlib"),
    }
    for reason, more in fewer.items():
        capsys.readouterr()
        assert outrider_with(*words(folder, quiz, whole, *more)) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert reason in said and "--overwrite" in said and "--out" in said
    assert outrider_with(*words(folder, quiz, whole, drafters=("ngram",))) == 1
    assert "drafter suffix" in " ".join(capsys.readouterr().err.split())
    assert outrider_with("evaluate", "ngram", "--tasks", str(quiz), "--out", str(whole)) == 2
    assert "ngram name no target; name one with --target" in " ".join(capsys.readouterr().err.split())
    assert (whole / "report.json").read_bytes() == before


def test_a_changed_setting_begins_again_and_says_so(folder, quiz, tmp_path, caplog):
    """Catches prompts of other settings that are mixed into one report; more prompts are no other settings."""
    out = tmp_path / "out"

    def measured(*more: str) -> Report:
        assert outrider_with(*words(folder, quiz, out, *more, drafters=("ngram",))) == 0
        return Report.load(out)

    measured("--prompts", "1", "--temperatures", "0")
    first = (out / "prompts.jsonl").read_bytes()
    assert measured("--prompts", "2", "--temperatures", "0").rows[0].prompts == 2
    assert (out / "prompts.jsonl").read_bytes().startswith(first)
    assert "all prompts are measured again" not in caplog.text
    found = measured("--prompts", "2", "--temperatures", "0,0.5")
    assert "all prompts are measured again" in caplog.text and "evaluate.temperatures" in caplog.text
    assert {row.temperature for row in found.rows} == {0.0, 0.5}
    assert (out / "prompts.old").exists()
    again = measured("--prompts", "1", "--temperatures", "0", "--overwrite")
    assert [row.prompts for row in again.rows] == [1]


def test_processes_of_a_launcher_share_the_prompts(whole: Path, folder: Path, quiz: Path, tmp_path: Path) -> None:
    """Catches a second process of torchrun that measures everything too, or writes a report of its own."""
    out, log = tmp_path / "out", tmp_path / "log"
    command = words(folder, quiz, out, drafters=("ngram",))
    started = [fork(*command, log=log, environment={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in (1, 0)]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0], log.read_text()
    own = [
        {index for line in path.read_text().splitlines()[1:] for index in json.loads(line)["indices"]}
        for path in (out / "prompts.jsonl", out / "prompts.1.jsonl")
    ]
    assert own == [{0, 2}, {1, 3}]
    keys = ("drafter", "temperature", "accepted_histogram", "per_prompt")
    texts = lambda found: [[row[key] for key in keys] for row in found]
    assert texts(rows(out)) == texts(rows(whole, "ngram"))
    assert (out / "report.json").exists()
