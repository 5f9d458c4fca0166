"""kill -9 at any moment of `prepare` and `train`: the same command goes on and ends where an undisturbed run ends."""

import json
import random
import shutil
import sqlite3
import time
from contextlib import chdir, closing
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from tiny import write_run_file

from tests.runs.forks import fork

STAGES = {"prepare": "runs/tiny/answers", "train": "runs/tiny/config.yaml"}
"""The verbs, and what each writes first: moments are drawn from there to its end."""


def start(place: Path, verb: str) -> ForkProcess:
    with chdir(place):
        return fork(verb, "tiny.yaml", log=place / f"{verb}.log")


def undisturbed(place: Path, verb: str) -> float:
    """Run a verb to its end; seconds from its first file on."""
    child = start(place, verb)
    began = _first_file(place, verb)
    child.join()
    assert child.exitcode == 0, (place / f"{verb}.log").read_text()
    return time.monotonic() - began


def killed(place: Path, verb: str, after_s: float) -> bool:
    """Kill a verb -9 so long after its first file; whether it was still running."""
    child = start(place, verb)
    began = _first_file(place, verb)
    time.sleep(max(0.0, began + after_s - time.monotonic()))
    child.kill()
    child.join()
    assert child.exitcode in (0, -9), (place / f"{verb}.log").read_text()
    return child.exitcode == -9


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


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_an_undisturbed_one(folder: Path, tmp_path: Path) -> None:
    """Catches answers or steps that are lost or repeated, and weights that depend on where a run was stopped: it is
    killed at random moments, sometimes again when it goes on."""
    prepared = recipe(tmp_path / "prepared", folder)
    seconds = {"prepare": undisturbed(prepared, "prepare")}
    trained = recipe(tmp_path / "trained", folder, prepared)
    seconds["train"] = undisturbed(trained, "train")
    wanted, draw, hits = {"prepare": result(prepared), "train": result(trained)}, random.Random(1), 0
    for moment in range(12):
        verb = list(STAGES)[moment % 2]
        mine = recipe(tmp_path / str(moment), folder, prepared if verb == "train" else None)
        kills = [draw.uniform(0, seconds[verb]) for _ in range(draw.choice([1, 1, 2]))]
        hits += sum([killed(mine, verb, after_s) for after_s in kills])
        undisturbed(mine, verb)
        assert result(mine) == wanted[verb], f"moment {moment}: {verb} killed after {kills} s"
        shutil.rmtree(mine)
    assert hits, "no run was caught at work"
