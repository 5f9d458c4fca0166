"""kill -9 at any moment of `prepare` and `train`: the same command goes on and ends where an undisturbed run ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import pytest
from tiny import write_run_file

from outrider import cli

STAGES = {"prepare": "runs/tiny/answers", "train": "runs/tiny/config.yaml"}
"""The verbs, and what each writes first: moments are drawn from there to its end."""


class Started(Protocol):
    """A process that runs a verb."""

    pid: int | None

    def kill(self) -> None: ...


Start = Callable[[Path, str], tuple[Started, Callable[[], int | None]]]
"""Folder and verb to the process, and a function that waits for its exit code."""


def fork(place: Path, verb: str) -> tuple[Started, Callable[[], int | None]]:
    """A process of its own that need not import torch again: half a second instead of ten."""
    child = multiprocessing.get_context("fork").Process(target=_call, args=(place, verb))
    child.start()

    def wait() -> int | None:
        child.join()
        return child.exitcode

    return child, wait


def _call(place: Path, verb: str) -> None:
    os.chdir(place)
    with (place / f"{verb}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = ["outrider", verb, "tiny.yaml"]
    cli.main()


def launch(place: Path, verb: str) -> tuple[Started, Callable[[], int | None]]:
    """The command as a shell starts it."""
    words = [sys.executable, "-c", "from outrider.cli import main; main()", verb, "tiny.yaml"]
    with (place / f"{verb}.log").open("a") as log:
        child = subprocess.Popen(words, cwd=place, stdout=log, stderr=log)
    return child, child.wait


def undisturbed(start: Start, place: Path, verb: str) -> float:
    """Run a verb to its end; seconds from its first file on."""
    _, wait = start(place, verb)
    began = _first_file(place, verb)
    assert wait() == 0, (place / f"{verb}.log").read_text()
    return time.monotonic() - began


def killed(start: Start, place: Path, verb: str, after_s: float) -> bool:
    """Kill a verb -9 so long after its first file; whether it was still running."""
    child, wait = start(place, verb)
    began = _first_file(place, verb)
    time.sleep(max(0.0, began + after_s - time.monotonic()))
    child.kill()
    code = wait()
    assert code in (0, -9), (place / f"{verb}.log").read_text()
    return code == -9


def _first_file(place: Path, verb: str) -> float:
    give_up = time.monotonic() + 120
    while not (place / STAGES[verb]).exists() and time.monotonic() < give_up:
        time.sleep(0.002)
    return time.monotonic()


def result(place: Path) -> dict[str, Any]:
    """All files that the stages left, but for clocks and for what says how and where they were called."""
    folder, found = place / "runs/tiny", {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, content = str(path.relative_to(folder)), path.read_bytes()
        if path.name == "provenance.json":
            assert json.loads(content)
        elif name.endswith(".sqlite"):  # its pages differ with the moments at which they were written
            found[name] = _entries(path)
        elif name == "metrics.jsonl" or name.endswith("outrider.json"):
            rows = content.splitlines() if path.suffix == ".jsonl" else [content]
            found[name] = [_without_clocks(json.loads(row)) for row in rows]
        else:
            found[name] = content.replace(str(place).encode(), b"PLACE")
    return found


def _entries(ledger: Path) -> list[Any]:
    with closing(sqlite3.connect(f"file:{ledger}?immutable=1", uri=True)) as db:
        return db.execute("SELECT * FROM prompts ORDER BY prompt_hash").fetchall()


def _without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in ("seconds", "tokens_per_s", "mfu")}
    return kept | ({"training": _without_clocks(row["training"])} if "training" in row else {})


def recipe(place: Path, folder: Path, prepared: Path | None = None) -> Path:
    """A folder with a run file of enough prompts and steps that a stage has many moments, and with answers of another
    one."""
    place.mkdir()
    if prepared is not None:
        shutil.copytree(prepared / "runs", place / "runs")
    train = {"steps": 12, "batch": 2, "lr": 1e-2, "dtype": "float32", "log_every": 1, "save_every": 2}
    write_run_file(place / "tiny.yaml", folder, evaluate=None, train=train)
    return place


def check_moments(start: Start, folder: Path, place: Path, moments: int, seed: int) -> None:
    """Kill a stage so often, at random, and sometimes the run that goes on; every end must be the undisturbed one."""
    prepared = recipe(place / "prepared", folder)
    seconds = {"prepare": undisturbed(start, prepared, "prepare")}
    trained = recipe(place / "trained", folder, prepared)
    seconds["train"] = undisturbed(start, trained, "train")
    wanted, draw, hits = {"prepare": result(prepared), "train": result(trained)}, random.Random(seed), 0
    for moment in range(moments):
        verb = list(STAGES)[moment % 2]
        mine = recipe(place / str(moment), folder, prepared if verb == "train" else None)
        kills = [draw.uniform(0, seconds[verb]) for _ in range(draw.choice([1, 1, 2]))]
        hits += sum([killed(start, mine, verb, after_s) for after_s in kills])
        undisturbed(start, mine, verb)
        found = result(mine)
        differs = sorted(
            name for name in wanted[verb].keys() | found.keys() if wanted[verb].get(name) != found.get(name)
        )
        assert not differs, f"moment {moment}: {verb} killed after {kills} s: {differs}"
        shutil.rmtree(mine)
    assert hits, "no run was caught at work"


def test_a_run_killed_at_three_moments_ends_as_an_undisturbed_one(folder: Path, tmp_path: Path) -> None:
    """Catches answers or steps that are lost or repeated, and weights that depend on where a run was stopped."""
    check_moments(fork, folder, tmp_path, 3, seed=1)


@pytest.mark.slow
def test_a_run_killed_at_fifty_moments_ends_as_an_undisturbed_one(folder: Path, tmp_path: Path) -> None:
    """The same at moments that three do not meet, such as between two renames."""
    check_moments(fork, folder, tmp_path, 50, seed=2)


@pytest.mark.slow
def test_a_command_killed_from_a_shell_ends_as_an_undisturbed_one(folder: Path, tmp_path: Path) -> None:
    """Catches what a forked process has from its parent: modules that are imported, settings that are set."""
    check_moments(launch, folder, tmp_path, 4, seed=3)
