"""An evaluation by drafters' names: stopped, killed, shared by processes, and into a folder that has a report."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs import outrider_with

from outrider.report.schema import Report, Row

PROMPTS = 6
DRAFTERS = ("ngram", "suffix", "recycle")


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task") / "quiz.jsonl"
    rows = [{"id": f"q{i}", "prompt": f"tell {i} {'xyz' * (i % 4)}"} for i in range(4 * PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(folder: Path, quiz: Path, out: Path, *more: str, drafters: tuple[str, ...] = DRAFTERS) -> list[str]:
    return [
        "evaluate", *drafters, "--target", str(folder), "--tasks", str(quiz), "--temperatures", "0,1",
        "--prompts", str(PROMPTS), "--max-new-tokens", "24", "--out", str(out), "target.dtype=float64",
        "evaluate.min_first_ngrams=0", "evaluate.repeats=0",
        "evaluate.traced_prompts=2", *more,
    ]  # fmt: skip


def shell(*command: str, log: Path) -> subprocess.Popen[bytes]:
    """The command as a shell starts it, in one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "outrider", *command], stdout=file, stderr=file, env=environment)


def fork(*command: str, log: Path, environment: dict[str, str] | None = None) -> multiprocessing.Process:
    """The command in a process of its own, which has torch already: half a second instead of ten."""
    child = multiprocessing.get_context("fork").Process(target=_call, args=(command, log, environment or {}))
    child.start()
    return child  # type: ignore[return-value]


def _call(command: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(outrider_with(*command))


def lines(out: Path) -> int:
    path = out / "prompts.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(happened: Callable[[], bool], process: multiprocessing.Process, log: Path) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert process.is_alive() and time.monotonic() < until, log.read_text()
        time.sleep(0.005)


TIMES = (
    "_ms", "_s", "_per_s", "speedup", "seconds", "overhead", "share", "memory", "under_load", "contention", "tpot",
    "itl",
    "ttft",
)  # fmt: skip


def without_times(row: Row) -> dict[str, Any]:
    """A row's acceptance, texts and counts."""
    values = row.model_dump(mode="json")
    values["per_prompt"] = [
        {key: prompt[key] for key in ("id", "tokens", "steps", "exact")} for prompt in values["per_prompt"]
    ]
    return {key: value for key, value in values.items() if not any(word in key for word in TIMES)}


def rows(out: Path) -> list[dict[str, Any]]:
    return [without_times(row) for row in Report.load(out).rows]


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


def test_an_evaluation_killed_twice_ends_as_one_that_was_not(
    whole: Path, folder: Path, quiz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a prompt that is lost or measured twice, a line that is cut, and a drafter that forgot what it had
    learnt.

    suffix and recycle learn from prompt to prompt: their acceptance depends on all prompts before.
    """
    out, log = tmp_path / "out", tmp_path / "log"
    for count in (3, 5):
        process = fork(*words(folder, quiz, out), log=log)
        wait_for(lambda count=count: lines(out) >= count, process, log)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (out / "report.json").exists()
        with (out / "prompts.jsonl").open("ab") as file:
            file.write(b'{"task": "quiz", "indices": [5')  # as a kill in the middle of a write leaves it
    before = (out / "prompts.jsonl").read_bytes()
    assert outrider_with(*words(folder, quiz, out)) == 0
    assert "prompts were measured before" in capsys.readouterr().out
    assert (out / "prompts.jsonl").read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert lines(out) == 1 + PROMPTS
    assert rows(out) == rows(whole)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(whole: Path, folder: Path, quiz: Path, tmp_path: Path) -> None:
    """Catches a share that is not merged, prompts in another order, and times of processes that shared cores
    unmarked."""
    out, log = tmp_path / "out", tmp_path / "log"
    process = shell(*words(folder, quiz, out, "--processes", "2", drafters=("ngram",)), log=log)
    assert process.wait() == 0, log.read_text()
    assert (out / "prompts.1.jsonl").exists() and lines(out) < 1 + PROMPTS
    found, wanted = rows(out), [row for row in rows(whole) if row["drafter"] == "ngram"]
    for row in (*found, *wanted):  # each process traces its own first prompts
        for key in ("traced", "rejections", "expected_acceptance"):
            del row[key]
    assert found == wanted
    assert all("2 processes shared this machine" in (row.under_load or "") for row in Report.load(out).rows)


def test_a_fuller_report_is_not_replaced_unasked(
    whole: Path, folder: Path, quiz: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches hours of measuring that a shorter evaluation overwrites."""
    before = (whole / "report.json").read_bytes()
    fewer = {
        "6 prompts per task, and this evaluation 2": ("--prompts", "2"),
        "temperature 1": ("--temperatures", "0"),
        "max_new_tokens 24, and this evaluation 8": ("--max-new-tokens", "8"),
        "task quiz": ("--tasks", "stdlib"),
    }
    for reason, more in fewer.items():
        capsys.readouterr()
        assert outrider_with(*words(folder, quiz, whole, *more)) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert reason in said and "--overwrite" in said and "--out" in said
    assert outrider_with(*words(folder, quiz, whole, drafters=("ngram",))) == 1
    assert "drafter suffix, recycle" in " ".join(capsys.readouterr().err.split())
    assert (whole / "report.json").read_bytes() == before


def test_a_changed_setting_begins_again_and_says_so(
    folder: Path, quiz: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches prompts of other settings that are mixed into one report; more prompts are no other settings."""
    out = tmp_path / "out"

    def measured(*more: str) -> Report:
        assert outrider_with(*words(folder, quiz, out, *more, drafters=("ngram",))) == 0
        return Report.load(out)

    measured("--prompts", "2", "--temperatures", "0")
    first = (out / "prompts.jsonl").read_bytes()
    assert measured("--prompts", "3", "--temperatures", "0").rows[0].prompts == 3
    assert (out / "prompts.jsonl").read_bytes().startswith(first)
    assert "all prompts are measured again" not in caplog.text
    found = measured("--prompts", "3", "--temperatures", "0,0.5")
    assert "all prompts are measured again" in caplog.text and "evaluate.temperatures" in caplog.text
    assert {row.temperature for row in found.rows} == {0.0, 0.5}
    assert (out / "prompts.old").exists()
    again = measured("--prompts", "1", "--temperatures", "0", "--overwrite")
    assert [row.prompts for row in again.rows] == [1]


def test_the_target_is_that_of_the_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path, quiz: Path) -> None:
    """Catches a drafter without a target, which has nothing to be measured on."""
    assert outrider_with("evaluate", "ngram", "--tasks", str(quiz), "--out", str(tmp_path)) == 2
    assert "ngram name no target; name one with --target" in " ".join(capsys.readouterr().err.split())


def test_a_batch_finds_the_same_texts_and_counts_its_whole_time(
    whole: Path, folder: Path, quiz: Path, tmp_path: Path
) -> None:
    """Catches prompts of a batch that are mixed up, and a speed-up of one slot's time."""
    out = tmp_path / "out"
    assert outrider_with(*words(folder, quiz, out, "--batch", "4", drafters=("ngram",))) == 0
    found, wanted = rows(out), [row for row in rows(whole) if row["drafter"] == "ngram"]
    for row in found:
        assert row.pop("batch") == 4
    for row in wanted:
        assert row.pop("batch") == 1
    assert found == wanted
    records = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()[1:]]
    assert [record["indices"] for record in records] == [[0, 1, 2, 3], [4, 5]]
    runs = [prompt["runs"][0] for prompt in records[0]["prompts"]]
    # all end together, and their parts add up to the time of the longest
    assert sum(run["seconds"] for run in runs) == pytest.approx(max(run["done_s"] for run in runs), rel=0.2)
    assert len({prompt.speedup for prompt in Report.load(out).rows[0].per_prompt[:4]}) == 1


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
    assert own == [{0, 2, 4}, {1, 3, 5}]
    texts = lambda found: [
        (row["drafter"], row["temperature"], row["accepted_histogram"], row["per_prompt"]) for row in found
    ]
    assert texts(rows(out)) == texts([row for row in rows(whole) if row["drafter"] == "ngram"])
    assert (out / "report.json").exists()
