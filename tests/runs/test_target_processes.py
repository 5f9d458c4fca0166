"""A training in several processes in which the last process reads the target for the others, which do not load it."""

import json
import random
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
from tests.runs.forks import fork_all

PREPARE = {"count": 18, "length": 48, "max_new_tokens": 16, "slots": 1}
TRAIN = {"steps": 5, "batch": 2, "lr": 1e-2, "dtype": "float32", "log_every": 1, "save_every": 2, "probe_every": 2}


@pytest.fixture
def file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run file."""
    monkeypatch.chdir(tmp_path)
    file = write_run_file(tmp_path / "tiny.yaml", folder, prepare=PREPARE, train=TRAIN)
    values = yaml.safe_load(file.read_text()) | {"target": {"name": str(folder), "dtype": "float64"}}
    values["prepare"] |= {"folder": str(tmp_path / "answers"), "conversations": str(tmp_path / "prompts.jsonl")}
    file.write_text(yaml.safe_dump(values))
    letters = random.Random(0)  # prompts that begin alike would all be held out, or none
    prompts = [{"id": f"p{i}", "prompt": "".join(letters.sample("abcdefghijklmnopqrst", 12))} for i in range(18)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return file


def rows(file: Path) -> list[dict[str, Any]]:
    metrics = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "tokens_per_s", "mfu")} for row in metrics
    ]


def test_a_trainer_learns_from_sent_states_what_it_learns_from_its_own(file: Path, tmp_path: Path) -> None:
    """Bit for bit, probes on held-out answers included. Catches states of another batch or text, a batch that is asked
    for twice, and a trainer that reads the target itself."""
    outrider.run(file, stages=["prepare", "train"])
    said = fork_all(2, "train", str(file), "train.target_processes=1", "name=two", log=tmp_path / "log")
    mine, theirs = tmp_path / "runs" / "two", tmp_path / "runs" / "tiny"
    wanted = rows(theirs / "metrics.jsonl")
    assert [row["held_out"]["answers"] for row in wanted if "held_out" in row] == [1, 1, 1]
    for row in wanted:
        row.pop("probe_tokens_per_step", None)  # a trainer has no layers to measure prompts with
    assert rows(mine / "metrics.jsonl") == wanted
    before, after = (load_file(each / "checkpoint" / checkpoint.WEIGHTS) for each in (theirs, mine))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert "served remotely, not loaded" in said
    assert checkpoint.manifest_of(mine / "checkpoint")["training"]["world_size"] == 1


def test_what_readers_can_not_do_is_refused(file: Path) -> None:
    """Catches readers without trainers, and settings that would have no effect with them."""
    outrider.run(file, ["prepare.count=2"], stages=["prepare"])
    for words, problem in (
        ([], "target_processes 1 needs at least 2 processes, got 1"),
        (["prepare.features=cached"], "has no effect with prepare.features: cached"),
        (["train.distributed=fsdp"], "is incompatible with train.distributed: fsdp"),
        (["train.calibrate=2"], "train.calibrate 2 drafts for the target"),
    ):
        with pytest.raises(ConfigError, match=problem):
            outrider.run(file, ["train.target_processes=1", *words], stages=["train"])
    with pytest.raises(ConfigError, match="works only for training alone"):
        outrider.run(file, ["train.target_processes=1"], stages=["prepare", "train"])
