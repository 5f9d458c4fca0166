"""Checkpoints that stay beside the newest, and a training that is measured while it runs."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import checkpoint
from outrider.config import build
from outrider.errors import ConfigError
from outrider.nn.draft_model import DraftModel
from outrider.targets.transformers import TransformersTarget
from outrider.training.checkpoints import BEST, FOLDER, chosen, tokens_per_step
from outrider.training.config import Config
from training.bench import fit
from training.test_trainer import Stop, interrupt, same_training, stopper


def probing(values: list[float]) -> Any:
    """A probe that says these tokens per step, one after the other, and draws noise as a real one may."""

    def probe(model: DraftModel) -> dict[str, float]:
        assert not model.training
        torch.rand(7)
        return {"probe_tokens_per_step": values.pop(0)}

    return probe


def step_of(place: Path) -> int:
    return checkpoint.manifest_of(place)["training"]["step"]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).iterdir()) if (folder / FOLDER).exists() else []


def test_the_last_few_stay_and_a_training_can_go_on_from_each(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a kept checkpoint that lacks its moments, or changes with the newest."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    fit(whole, talker, save_every=1, keep=3)
    assert kept(whole) == ["step-3", "step-4", "step-5"] and step_of(whole / "checkpoint") == 6
    again.mkdir()
    shutil.copytree(whole / FOLDER / "step-3", again / "checkpoint")
    shutil.copy(whole / "metrics.jsonl", again)
    fit(again, talker, save_every=1, keep=3)
    same_training(again, whole)
    fit(tmp_path / "none", talker, save_every=1, keep=0)
    assert kept(tmp_path / "none") == []


def test_the_best_stays_and_is_the_one_that_is_used(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches the last one taken for the best, and weights of a step other than the one that was measured."""
    fit(tmp_path, talker, save_every=100, probe_every=2, keep=0, probe=probing([1.5, 1.9, 1.7]))
    place = chosen(tmp_path)
    assert place == tmp_path / FOLDER / BEST and step_of(place) == 4
    assert not (place / checkpoint.TRAINING).exists() and step_of(tmp_path / "checkpoint") == 6
    other = tmp_path / "other"
    fit(other, talker, steps=6, save_every=4, keep=1)
    mine, theirs = load_file(place / checkpoint.WEIGHTS), load_file(other / FOLDER / "step-4" / checkpoint.WEIGHTS)
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)


def test_probes_change_nothing_of_the_training(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a probe that moves the random state on, or leaves the model in its other mode."""
    fit(tmp_path / "probed", talker, "dflash", probe_every=1, probe=probing([1.0] * 6))
    fit(tmp_path / "plain", talker, "dflash")
    mine, theirs = (load_file(tmp_path / name / "checkpoint" / checkpoint.WEIGHTS) for name in ("probed", "plain"))
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_stop_between_probes_changes_neither_the_best_nor_what_is_written(
    at: int, talker: TransformersTarget, tmp_path: Path
) -> None:
    """Catches a probe that is left out, or made twice, after a resume."""
    values = {2: 1.5, 4: 1.9, 6: 1.7}

    def of_step(folder: Path) -> Any:
        return lambda model: {"probe_tokens_per_step": values[step_of(folder / "checkpoint")]}

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    fit(whole, talker, save_every=100, probe_every=2, probe=of_step(whole))
    with pytest.raises(KeyboardInterrupt):
        fit(
            stopped, talker, save_every=100, probe_every=2, probe=of_step(stopped),
            on_step=stopper(at, lambda: interrupt(signal.SIGTERM)),
        )  # fmt: skip
    fit(stopped, talker, save_every=100, probe_every=2, probe=of_step(stopped))
    same_training(stopped, whole)
    assert step_of(chosen(stopped)) == 4


def test_a_training_that_gets_no_better_ends(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches patience that counts from the last probe, and an ended training that goes on when it is run again."""
    settings = {"steps": 40, "save_every": 100, "probe_every": 2, "patience": 2}
    fit(tmp_path, talker, probe=probing([1.5, 1.4, 1.6, 1.5, 1.6]), **settings)
    assert step_of(tmp_path / "checkpoint") == 10 and step_of(chosen(tmp_path)) == 6
    fit(tmp_path, talker, probe=probing([]), **settings)
    assert step_of(tmp_path / "checkpoint") == 10


def test_the_best_of_an_earlier_training_is_not_used(talker: TransformersTarget, tmp_path: Path) -> None:
    fit(tmp_path, talker, probe_every=2, probe=probing([1.5, 1.9, 1.7]))
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "metrics.jsonl").unlink()
    fit(tmp_path, talker, lr=1e-3)
    assert chosen(tmp_path) == tmp_path / "checkpoint"


def test_a_crash_while_the_best_is_copied_leaves_a_whole_one(
    talker: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, real = [], checkpoint.copy

    def crashing(source: Path, folder: Path, without: Any = ()) -> None:
        copied.append(folder.name)
        if copied.count(BEST) == 2:
            (folder.with_name(BEST + ".part")).mkdir(exist_ok=True)
            raise Stop
        real(source, folder, without)

    monkeypatch.setattr(checkpoint, "copy", crashing)
    with pytest.raises(Stop):
        fit(tmp_path, talker, save_every=100, probe_every=2, probe=probing([1.5, 1.9, 1.7]))
    assert step_of(chosen(tmp_path)) == 2
    monkeypatch.undo()
    fit(tmp_path, talker, save_every=100, probe_every=2, probe=probing([1.9, 1.7]))
    assert step_of(chosen(tmp_path)) == 4
    probes = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in probes if "probe_tokens_per_step" in row] == [2, 4, 6]


def test_held_out_answers_count_before_a_few_prompts() -> None:
    row = {"held_out": {"agreement": [0.5, 0.5]}, "probe_tokens_per_step": 9.0}
    assert tokens_per_step(row) == 1.75 and tokens_per_step({"probe_tokens_per_step": 2.0}) == 2.0
    assert tokens_per_step({"held_out": {"agreement": []}}) is None


def test_patience_without_probes_is_refused() -> None:
    with pytest.raises(ConfigError, match="train.patience 3 counts measurements; set train.probe_every"):
        build(Config, {"patience": 3}, "train")
