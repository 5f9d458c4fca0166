"""A training under torchrun in which the last process reads the target for the others, which do not load it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import write_run_file

import outrider
from outrider import checkpoint
from outrider.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PREPARE = {"count": 18, "length": 48, "max_new_tokens": 16, "slots": 1}
TRAIN = {"steps": 5, "batch": 2, "lr": 1e-2, "dtype": "float32", "log_every": 1, "save_every": 2, "probe_every": 2}


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared, and trained by one process: the run file."""
    place = tmp_path_factory.mktemp("alone")
    file = write_run_file(place / "tiny.yaml", folder, prepare=PREPARE, train=TRAIN)
    values = yaml.safe_load(file.read_text()) | {"target": {"name": str(folder), "dtype": "float64"}}
    values["prepare"] |= {"folder": str(place / "answers"), "conversations": str(place / "prompts.jsonl")}
    file.write_text(yaml.safe_dump(values))
    letters = random.Random(0)  # prompts that begin alike would all be held out, or none
    prompts = [{"id": f"p{i}", "prompt": "".join(letters.sample("abcdefghijklmnopqrst", 12))} for i in range(18)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    before = Path.cwd()
    os.chdir(place)
    try:
        outrider.run(file, stages=["prepare", "train"])
    finally:
        os.chdir(before)
    return file


def launch(place: Path, count: int, *words: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*torchrun, "-m", "outrider", "train", *words], cwd=place, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def trained(place: Path, count: int, *words: str) -> str:
    """Train in so many processes; what they said."""
    process = launch(place, count, *words)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return errors


def rows(file: Path) -> list[dict[str, Any]]:
    metrics = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "tokens_per_s", "mfu")} for row in metrics
    ]


def test_a_trainer_learns_from_sent_states_what_it_learns_from_its_own(alone: Path, tmp_path: Path) -> None:
    """Bit for bit, probes on held-out answers included.  Catches states of another batch or text, a batch that is asked
    for twice, and a trainer that reads the target itself."""
    said = trained(tmp_path, 2, str(alone), "train.target_processes=1")
    mine, theirs = tmp_path / "runs" / "tiny", alone.parent / "runs" / "tiny"
    wanted = rows(theirs / "metrics.jsonl")
    assert [row["held_out"]["answers"] for row in wanted if "held_out" in row] == [1, 1, 1]
    for row in wanted:
        row.pop("probe_tokens_per_step", None)  # a trainer has no layers to measure prompts with
    assert rows(mine / "metrics.jsonl") == wanted
    before, after = (load_file(each / "checkpoint" / checkpoint.WEIGHTS) for each in (theirs, mine))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert "is not loaded here" in said
    assert checkpoint.manifest_of(mine / "checkpoint")["training"]["world_size"] == 1


@pytest.mark.slow
def test_two_trainers_share_one_reader(alone: Path, tmp_path: Path) -> None:
    """Packed, with two batches a step.  Catches states that go to the other trainer."""
    words = ("train.accumulate=2", "train.tokens=96", "train.probe_every=0", "train.steps=4")
    trained(tmp_path, 3, str(alone), "train.target_processes=1", *words, "name=three")
    trained(tmp_path, 2, str(alone), *words, "name=two")
    both = [rows(tmp_path / "runs" / name / "metrics.jsonl") for name in ("three", "two")]
    assert [row["loss"] for row in both[0] if "loss" in row] == [row["loss"] for row in both[1] if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_where_the_reader_or_the_trainer_dies_both_end_with_one_message(rank: int, alone: Path, tmp_path: Path) -> None:
    """Catches a reader that waits for ever for one that is gone, and the other way round."""
    process = launch(tmp_path, 2, str(alone), "train.target_processes=1", "train.steps=1000000", "train.probe_every=0")
    place, until = tmp_path / "runs" / "tiny" / "checkpoint", time.monotonic() + 200
    while not checkpoint.is_there(place) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(process_of(process.pid, rank), signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode
    said = [line for line in errors.splitlines() if line.startswith("error")]
    assert len(said) == 1 and said[0].startswith(f"error process {rank} of 2 died"), errors
    checkpoint.check_files(place)


def process_of(launcher: int, rank: int) -> int:
    """The id of a process that torchrun started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
        except OSError:  # it has ended
            continue
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "target_processes 1 needs at least 2 processes, got 1"),
        (["prepare.features=cached"], "has no effect with prepare.features: cached"),
        (["train.distributed=fsdp"], "does not go with train.distributed: fsdp"),
        (["train.calibrate=2"], "train.calibrate 2 drafts for the target"),
    ],
)
def test_what_readers_can_not_do_is_refused(words: list[str], problem: str, alone: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        outrider.run(alone, ["train.target_processes=1", *words], stages=["train"])
    with pytest.raises(ConfigError, match="is for a training alone|does not go with"):
        outrider.run(alone, ["train.target_processes=1", *words], stages=["prepare", "train"])
