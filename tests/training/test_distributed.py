"""Several processes learn what one learns, write what one writes, and end together.

They are real ones, over gloo.  One start trains all jobs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_run_file
from torch.distributed import HashStore

import outrider
from outrider import checkpoint
from outrider.data.features.live import LiveFeatures
from outrider.errors import ConfigError, DataError, TrainingError
from outrider.processes import Alone
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.training.config import Config
from outrider.training.parallel import alive
from outrider.training.parallel.distributed import _end
from outrider.training.trainer import train
from tests.runs.forks import together
from training import ranks
from training.bench import TAPS, make_answers, make_model, make_source
from training.long_text import gradients

ROOT = Path(__file__).resolve().parents[2]
JOBS: list[dict[str, Any]] = [
    {"name": "padded"},
    {"name": "accumulated", "kind": "rnn", "batch": 3, "accumulate": 2},
    {"name": "packed", "batch": 2, "accumulate": 2, "tokens": 70},
    {"name": "one_row", "batch": 2},
    {"name": "drawn_later", "kind": "domino", "batch": 3},
    {"name": "fsdp", "distributed": "fsdp", "probe": True, "probe_every": 2, "patience": 2},
    {"name": "muon", "distributed": "fsdp", "optimizer": "muon", "batch": 3},
    {"name": "split_packed", "kind": "dflash_grouped", "sequence_parallel": 2, "batch": 2, "tokens": 70},
    {"name": "split_fsdp", "kind": "grouped", "sequence_parallel": 2, "distributed": "fsdp", "batch": 3},
]
"""Domino draws once more, for the blocks under its anchors.  7 texts: with `one_row` a pass ends in a batch that leaves
a process without a row of its own."""
NOISE = 2e-6
"""Relative error of a loss: sums in another order, in float32, through six steps of Adam; 2e-7 was found."""


def launch(count: int, *words: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*torchrun, "-m", *words], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def found(folder: Path, name: str, rank: int) -> list[dict[str, Any]]:
    return json.loads((folder / f"{name}.{rank}.json").read_text())


def tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Of a job's last checkpoint."""
    place = folder / name / "checkpoint"
    return load_file(place / checkpoint.WEIGHTS) | load_file(place / checkpoint.TRAINING)


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs, trained by two processes; `padded` once more with a stop."""
    work = tmp_path_factory.mktemp("two")
    stopped = [{"name": f"{way}_again", "distributed": way, "stop_at": 3} for way in ("ddp", "fsdp")]
    once = {"name": "fsdp_once", "distributed": "fsdp"}
    resumed = [{key: value for key, value in job.items() if key != "stop_at"} for job in stopped]
    jobs = [*JOBS, once, *stopped, *resumed]
    together(2, lambda: ranks.main(load_target(folder, dtype="float64"), work, jobs), work / "log")
    return work


@pytest.fixture(scope="module")
def one(talker: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A job trained by one process: its folder, and what its steps found."""
    work, made = tmp_path_factory.mktemp("one"), dict[str, Any]()

    def find(name: str) -> tuple[Path, Any]:
        if name not in made:
            job = next(job for job in JOBS if job["name"] == name)
            made[name] = ranks.trained(talker, work, {key: job[key] for key in job if key != "sequence_parallel"})
        return work, made[name]

    return find


@pytest.mark.parametrize("name", [job["name"] for job in JOBS])
def test_two_processes_learn_what_one_learns(name: str, two: Path, one: Callable[[str], tuple[Path, Any]]) -> None:
    """Catches a loss divided by a process's own rows, anchors drawn by process, rows that are learnt twice or never."""
    folder, alone = one(name)
    mine, theirs = found(two, name, 0), found(two, name, 1)
    assert [row["loss"] for row in mine] == [row["loss"] for row in theirs]
    assert [row["step"] for row in mine] == [row["step"] for row in alone]
    for row, other in zip(mine, alone, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=NOISE)
        assert row["acceptance"] == pytest.approx(other["acceptance"], abs=1e-4)
    before, after = tensors(folder, name), tensors(two, name)
    assert torch.equal(before["rng"], after["rng"])
    counted = [checkpoint.manifest_of(place / name / "checkpoint")["training"]["tokens"] for place in (folder, two)]
    assert counted[0] == counted[1]
    assert {key: (v.shape, v.dtype) for key, v in before.items()} == {k: (v.shape, v.dtype) for k, v in after.items()}
    assert max(float((before[key] - after[key]).abs().max()) for key in before if key != "rng") < 1e-3
    files = [
        {path.name: path.stat().st_size for path in (place / name / "checkpoint").iterdir()} for place in (folder, two)
    ]
    assert files[0].pop(checkpoint.MANIFEST) and files[1].pop(checkpoint.MANIFEST) and files[0] == files[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_with_half_of_a_text_each_find_its_gradient(rank, two, talker) -> None:
    """In float64. Catches a key, a block or a head that another process's row does not see, or sees twice."""
    mine, whole = torch.load(two / f"split.{rank}.pt"), gradients(talker)
    assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    assert mine["gradients"].keys() == whole["gradients"].keys()
    for name, gradient in whole["gradients"].items():
        assert torch.allclose(mine["gradients"][name], gradient, rtol=1e-9, atol=1e-12), name
    assert mine["saved_bytes"] < 0.56 * whole["saved_bytes"]
    assert mine["taps"] == -(-whole["taps"] // 2)


@pytest.mark.parametrize(("again", "whole"), [("ddp_again", "padded"), ("fsdp_again", "fsdp_once")])
def test_a_stop_of_two_processes_changes_no_bit(again: str, whole: str, two: Path) -> None:
    """Catches a process that goes on where only the last was asked to stop, after step 3; the others know in step 4."""
    first, second = tensors(two, again), tensors(two, whole)
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert [row["step"] for row in found(two, again, 0)] == [5, 6] == [row["step"] for row in found(two, again, 1)]


@pytest.mark.parametrize("name", ["padded", "accumulated", "packed", "drawn_later"])
def test_a_step_speaks_to_the_others_twice(name: str, two: Path) -> None:
    """Catches a question that takes a call of its own in every step; the first row has those of the beginning, too."""
    rows = found(two, name, 1)
    assert all(row["calls"] == ["all_gather", "all_reduce"] for row in rows[1:-1]), [row["calls"] for row in rows]


def test_the_first_process_alone_writes(two) -> None:
    """Catches lines of metrics for each process, one that patience does not end, and bytes of another process."""
    rows = [json.loads(line) for line in (two / "padded" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    facts = checkpoint.manifest_of(two / "padded" / "checkpoint")["training"]
    assert (facts["world_size"], facts["tokens"]) == (2, rows[-1]["tokens"])
    steps = [[row["step"] for row in found(two, "fsdp", rank)] for rank in range(2)]
    assert steps[0] == steps[1]
    assert (two / "fsdp" / "checkpoints" / "best" / checkpoint.MANIFEST).exists()
    for row in (json.loads((two / f"gathered.{rank}.json").read_text()) for rank in range(2)):
        assert row["small"] == [["given by", 0], ["given by", 1]] and row["small_calls"] == 1
        assert row["large"] == [0, 100_000] and row["large_calls"] == 2


@pytest.mark.slow
def test_where_one_dies_all_end_and_one_message_says_which(folder: Path, tmp_path: Path) -> None:
    """Catches a process that waits for ever, two messages, none, and a checkpoint that is spoilt by the end."""
    prompts = [{"messages": [{"role": "user", "content": f"the cat sat on mat number {i}"}]} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    settings = {"steps": 10**6, "batch": 4, "lr": 1e-4, "dtype": "float32", "log_every": 1, "save_every": 2}
    file = write_run_file(tmp_path / "run.yaml", folder, train=settings, evaluate=None)
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        outrider.run(file, stages=["prepare"])
        process = launch(2, "outrider", "train", str(file))
        place, until = tmp_path / "runs" / "run", time.monotonic() + 120
        while not checkpoint.is_there(place / "checkpoint") and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(_process(process.pid, rank=1), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        os.chdir(before)
    assert process.returncode
    said = [line for line in errors.splitlines() if line.startswith("error")]
    assert len(said) == 1 and said[0].startswith("error process 1 of 2 died"), errors
    checkpoint.check_files(place / "checkpoint")
    assert checkpoint.manifest_of(place / "checkpoint")["training"]["world_size"] == 2
    assert json.loads((place / "provenance.json").read_text())["world_size"] == 2


def _process(launcher: int, rank: int) -> int:
    """The id of a process that torchrun started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
        except OSError:  # it has ended
            continue
    raise AssertionError(f"no process of rank {rank}")


def test_a_process_whose_beat_stands_still_is_named(monkeypatch) -> None:
    """Catches the living named for the dead, two that say so, and a wait where one has said why all end."""
    monkeypatch.setattr(alive, "BEAT_S", 0.01)
    monkeypatch.setattr(alive, "STILL_S", 0.3)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    store = HashStore()
    watches = [alive.Watch(store, rank, 3) for rank in range(3)]
    while len(watches[0]._beats) < 2:
        time.sleep(0.01)
    watches[2].close()
    assert watches[0].lost(60) == []
    with pytest.raises(TrainingError, match=r"^process 2 of 3 died"):
        _end(watches[0], RuntimeError("connection reset"))
    assert watches[0]._has_spoken()
    for error, code in ((KeyboardInterrupt(), 130), (ValueError(), 1)):
        with pytest.raises(SystemExit) as caught:
            _end(watches[1], error)
        assert caught.value.code == code
    for watch in watches:
        watch.close()
    assert "processes 1, 2 of 3" in watches[0].obituary([1, 2])


class Two(Alone):
    """Says that there are two."""

    count = 2


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("vanilla", {"batch": 1}, "train.batch 1 is less than the 2 processes"),
        ("specblock", {}, "weighs a row by the other rows of its batch"),
        ("vanilla", {"sequence_parallel": 3}, "sequence_parallel 3 needs 3 processes or a multiple of them, got 2"),
        ("vanilla", {"sequence_parallel": 2}, "sequence_parallel 2 splits heads, but the drafter has kv_heads 1"),
        ("domino", {"sequence_parallel": 2}, "drafter 'domino' needs whole texts"),
    ],
)
def test_what_can_not_be_shared_is_refused(kind, settings, problem, talker, tmp_path, monkeypatch) -> None:
    """Catches a process without a row in every batch, and a method that would learn something else."""
    model = make_model(talker, "vanilla" if kind == "specblock" else kind)
    monkeypatch.setattr(model, "rows_are_independent", kind != "specblock")
    with pytest.raises(ConfigError, match=problem):
        train(model, make_source(talker), Config(steps=2, **settings), tmp_path, processes=Two())


@pytest.mark.parametrize("budget", [None, 70])
def test_the_rows_of_all_processes_are_those_of_one(budget: int | None, talker: TransformersTarget) -> None:
    """Catches texts that are read twice or left out, states of another text, and another padding."""
    whole, *parts = (LiveFeatures(talker, make_answers(), TAPS, batch=3, length=64, budget=budget) for _ in range(3))
    for rank, part in enumerate(parts):
        part.share(rank, 2)
    for step in range(5):
        steps = range(step, step + 1)
        sources = [[each.batch(step)] if budget is None else list(each.packed(steps)) for each in (whole, *parts)]
        for batch, *shared in zip(*sources, strict=True):
            for own in shared:
                assert own.share is not None
                for name in ("tokens", "loss_mask", "documents", "taps", "hidden"):
                    assert torch.equal(getattr(own, name), getattr(batch, name)[own.share.rows])
            assert sum(len(own.tokens) for own in shared if own.share.counts) == len(batch.tokens)
    source = LiveFeatures(talker, make_answers(), TAPS, batch=4, length=64, budget=70)
    with pytest.raises(DataError, match=r"train.tokens 70 holds 2 texts .* 3 processes share"):
        source.share(0, 3)
