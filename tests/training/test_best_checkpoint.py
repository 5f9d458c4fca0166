"""Checkpoints that stay beside the newest, and a training that is measured while it runs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import checkpoint
from outrider.config import build
from outrider.errors import ConfigError
from outrider.nn.draft_model import DraftModel
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.progress.checkpoints import BEST, FOLDER, chosen, keep, tokens_per_step
from training.bench import fit, make_model
from training.test_trainer import same_training, stopped


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


def test_of_more_than_ten_steps_the_newest_stay(talker, tmp_path) -> None:
    """Catches steps that are sorted as text."""
    checkpoint.save(tmp_path / "checkpoint", make_model(talker))
    for step in (9, 10, 11):
        keep(tmp_path, step, 2)
    assert kept(tmp_path) == ["step-10", "step-11"]


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


def test_a_stop_between_probes_changes_neither_the_best_nor_what_is_written(talker, tmp_path) -> None:
    """Catches a probe that is left out, or made twice, after a resume."""
    values, settings = {2: 1.5, 4: 1.9, 6: 1.7}, {"save_every": 100, "probe_every": 2}

    def of_step(folder: Path) -> Any:
        return lambda model: {"probe_tokens_per_step": values[step_of(folder / "checkpoint")]}

    whole, part = tmp_path / "whole", tmp_path / "part"
    fit(whole, talker, **settings, probe=of_step(whole))
    stopped(part, talker, 3, **settings, probe=of_step(part))
    fit(part, talker, **settings, probe=of_step(part))
    same_training(part, whole)
    assert step_of(chosen(part)) == 4


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


def test_held_out_answers_count_before_a_few_prompts() -> None:
    row = {"held_out": {"agreement": [0.5, 0.5]}, "probe_tokens_per_step": 9.0}
    assert tokens_per_step(row) == 1.75 and tokens_per_step({"probe_tokens_per_step": 2.0}) == 2.0
    assert tokens_per_step({"held_out": {"agreement": []}}) is None
    with pytest.raises(ConfigError, match="train.patience 3 counts measurements; set train.probe_every"):
        build(Config, {"patience": 3}, "train")
