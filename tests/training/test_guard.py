"""Steps that would harm a draft model: spikes of the loss, and which module made a value that is not finite."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import checkpoint
from outrider.errors import TrainingError
from outrider.nn.draft_model import Batch
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training import trainer
from outrider.training.config import Config
from outrider.training.guard import Guard
from outrider.training.step import optimise
from outrider.training.trainer import train
from training.bench import SETTINGS, fit, make_model, make_source
from training.test_trainer import same_training, stopped

LONG = {"steps": 16, "lr": 1e-3, "save_every": 2, "loss": {"kl": 1.0}, "spike": 3.0}


class Loud:
    """A source whose batches of some steps have hidden states of another scale, so that the loss there is a spike."""

    def __init__(self, source: Any, steps: tuple[int, ...], scale: float = 500.0):
        self.source, self.steps, self.scale = source, steps, scale
        self.manifest, self.counts, self.steps_per_pass = source.manifest, source.counts, source.steps_per_pass

    def batch(self, step: int) -> Batch:
        batch = self.source.batch(step)
        return dataclasses.replace(batch, hidden=batch.hidden * self.scale) if step in self.steps else batch


def test_a_spike_is_skipped_and_a_stop_around_it_changes_nothing(talker, tmp_path, caplog) -> None:
    """Catches a spike that moves weights or moments, one that raises the median, and losses a resume forgets."""
    source = lambda: Loud(make_source(talker), (10, 12))
    seen: list[dict[str, Any]] = []
    fit(tmp_path / "whole", talker, source=source(), on_step=lambda _, found: seen.append(dict(found)), **LONG)
    assert [number for number, found in enumerate(seen) if "bad" in found] == [10, 12]
    assert "step 11: the loss is" in caplog.text and "times the median of the last 10" in caplog.text
    assert "largest gradient: " in caplog.text
    stopped(tmp_path / "stopped", talker, 11, source=source(), **LONG)
    before = load_file(tmp_path / "stopped" / "checkpoint" / checkpoint.WEIGHTS)
    fit(tmp_path / "stopped", talker, source=source(), **LONG)
    same_training(tmp_path / "stopped", tmp_path / "whole")
    stopped(tmp_path / "ten", talker, 10, **LONG)
    ten = load_file(tmp_path / "ten" / "checkpoint" / checkpoint.WEIGHTS)
    assert all(torch.equal(before[name], ten[name]) for name in ten)


def test_a_guard_without_bad_steps_changes_nothing(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a step that waits for the verdict and is taken at another rate, twice, or with other gradients."""
    settings = Config(**SETTINGS)
    fit(tmp_path, talker)
    torch.manual_seed(settings.seed)
    model, source = make_model(talker).float().train(), make_source(talker)
    torch.manual_seed(settings.seed)
    optimizer = trainer.Optimizers(model, "adamw", talker.spec.vocabulary, 0.0)
    for step in range(6):
        optimise(model, optimizer, [source.batch(step)], settings, step, False)
    guarded = load_file(tmp_path / "checkpoint" / checkpoint.WEIGHTS)
    assert all(torch.equal(guarded[name], weight) for name, weight in model.named_parameters())


def test_spikes_in_a_row_take_the_last_checkpoint_and_then_end(talker, tmp_path, caplog) -> None:
    """Catches a training on weights that went astray between two checkpoints, and one that never ends."""
    model, astray = make_model(talker), [11]

    def spoil(step: int, found: Mapping[str, Any]) -> None:
        if step in astray:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(40)

    settings = Config(**SETTINGS | LONG | {"save_every": 5, "skip": 2, "steps": 20})
    train(model, make_source(talker), settings, tmp_path / "once", on_step=spoil)
    assert "step 14: " in caplog.text and "weights of the last checkpoint are restored" in caplog.text
    assert checkpoint.manifest_of(tmp_path / "once" / "checkpoint")["training"]["step"] == 20
    astray += [14]
    model = make_model(talker)
    with pytest.raises(TrainingError, match=r"^step 17: the loss is .* times the median .*last checkpoint is intact"):
        train(model, make_source(talker), settings, tmp_path / "ever", on_step=spoil)


def test_the_last_checkpoint_is_taken_again_with_its_moments(talker, tmp_path) -> None:
    """Catches moments of the bad steps that go on with the weights of before them."""
    fit(tmp_path, talker)
    model, settings = make_model(talker), Config(**SETTINGS)
    optimizer = trainer.Optimizers(model, "adamw", talker.spec.vocabulary, 0.0)
    optimise(model, optimizer, [make_source(talker).batch(0)], settings, 0, False)
    assert Guard(settings, tmp_path / "checkpoint", model, optimizer)._restore()
    wanted = checkpoint.load_state(tmp_path / "checkpoint")
    for name, weight in model.named_parameters():
        assert torch.equal(optimizer.state_of(weight)["exp_avg"], wanted[f"{name}/exp_avg"]), name


def test_moments_that_are_not_finite_are_never_written(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a checkpoint of good weights whose first step after a resume makes them bad."""
    taken: list[Any] = []

    class Watched(trainer.Optimizers):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            taken.append(self)

    def spoil(step: int, found: Mapping[str, Any]) -> None:
        if step == 4:
            for weight in model.parameters():
                taken[0].state_of(weight)["exp_avg_sq"].fill_(float("inf"))

    model = make_model(talker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "Optimizers", Watched)
        with pytest.raises(TrainingError, match=r"step 4: .*/exp_avg_sq.* is not finite, so no checkpoint is written"):
            train(model, make_source(talker), Config(**SETTINGS), tmp_path, on_step=spoil)
    assert checkpoint.manifest_of(tmp_path / "checkpoint")["training"]["step"] == 2
