"""A training that goes on where settings changed: what needs --force, what it does, and what it can't do."""

import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import checkpoint
from outrider.errors import CheckpointError
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.trainer import train
from training.bench import SETTINGS, fit, make_model, make_source
from training.test_trainer import same_training, stopped


def facts(folder: Path) -> dict[str, Any]:
    return checkpoint.manifest_of(folder / "checkpoint")["training"]


def test_forced_settings_are_trained_with_and_written_down(talker, tmp_path, caplog) -> None:
    """Catches --force that lets the old settings stay, that starts again, or whose weights do not say so."""
    stopped(tmp_path, talker)
    seen: list[int] = []
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, talker, lr=2e-2, clip=0.5, force=True, on_step=lambda step, _: seen.append(step))
    assert seen == [4, 5, 6]
    assert "from step 3 with other settings: train.clip was 1.0, is 0.5; train.lr was 0.01, is 0.02" in caplog.text
    found = facts(tmp_path)
    assert (found["config"]["lr"], found["config"]["clip"]) == (0.02, 0.5)
    assert found["changed"] == [{"step": 3, "settings": {"train.clip": [1.0, 0.5], "train.lr": [0.01, 0.02]}}]
    fit(tmp_path / "plain", talker)
    mine, theirs = (load_file(place / "checkpoint" / checkpoint.WEIGHTS) for place in (tmp_path, tmp_path / "plain"))
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)


def test_settings_that_change_nothing_learnt_need_no_force(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a run that can't be logged more often, or a change that is free by mistake."""
    stopped(tmp_path, talker)
    fit(tmp_path, talker, save_every=3, log_every=2, keep=1)
    assert facts(tmp_path)["step"] == 6 and "changed" not in facts(tmp_path)


def test_force_changes_neither_kind_nor_optimiser(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches moments of AdamW that Muon takes for its own, and weights of one method or size loaded into another."""
    stopped(tmp_path, talker)
    with pytest.raises(CheckpointError, match=r"train.optimizer was adamw, is muon; .* \(train.optimizer can't change"):
        fit(tmp_path, talker, optimizer="muon", lr=1e-3, force=True)
    with pytest.raises(CheckpointError, match=r"drafter.kind was dspark, is dflash; .* \(drafter.kind can't change"):
        fit(tmp_path, talker, "dflash", force=True)
    model = make_model(talker, rank=4)
    with pytest.raises(CheckpointError, match=r"do not fit the new settings \(drafter.rank was 8, is 4\)"):
        train(model, make_source(talker), Config(**SETTINGS), tmp_path, force=True)


def test_a_spoilt_file_is_found_and_an_earlier_checkpoint_goes_on(talker, tmp_path) -> None:
    """Catches one flipped bit in a copy, from which a training goes on to other weights; the advice must work."""
    fit(tmp_path / "whole", talker)
    place = stopped(tmp_path / "spoilt", talker, at=5) / "checkpoint"
    for name in (checkpoint.WEIGHTS, checkpoint.TRAINING):
        good = (place / name).read_bytes()
        (place / name).unlink()  # linked files are those of checkpoints/, too
        (place / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=rf"{name} is corrupt: its checksum is .*step-2 ") as caught:
            fit(tmp_path / "spoilt", talker)
        if name == checkpoint.WEIGHTS:
            (place / name).write_bytes(good)
    advice = str(caught.value).rpartition("(")[2].rstrip(")")
    subprocess.run(advice, shell=True, check=True)
    fit(tmp_path / "spoilt", talker)
    same_training(tmp_path / "spoilt", tmp_path / "whole")


def test_amended_weights_go_on_with_their_own_checksum(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a calibrated checkpoint that a longer training refuses as spoilt."""
    fit(tmp_path, talker)
    weights = load_file(tmp_path / "checkpoint" / checkpoint.WEIGHTS)
    checkpoint.amend(tmp_path / "checkpoint", {name: weight + 1 for name, weight in weights.items()}, {})
    fit(tmp_path, talker, steps=8)
    assert facts(tmp_path)["step"] == 8
