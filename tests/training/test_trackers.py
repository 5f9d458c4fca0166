"""Metrics reach trackers; one that is missing is refused with the command that installs it; one that fails ends
nothing."""

from pathlib import Path
from typing import Any

import pytest

from outrider.config import build
from outrider.errors import ConfigError
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.progress import trackers
from outrider.training.trainer import train
from training.bench import SETTINGS, fit, make_model, make_source
from training.test_trainer import interrupt, metrics, same_training, stopper


class Noted:
    """A tracker that notes what it gets, and fails at one row where it is asked to."""

    name = "noted"

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.calls: list[str] = []
        self.settings: dict[str, Any] = {}
        self.rows: dict[int, dict[str, Any]] = {}

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route to host")
        assert step is not None
        self.rows[step] = values

    def finish(self) -> None:
        self.calls.append("finish")


def tracked(folder: Path, target: TransformersTarget, *given: Noted, **more: Any) -> None:
    config = Config(**SETTINGS)
    probe: Any = lambda model: {"held_out": {"overlap": [0.5, 0.25], "agreement": []}, "name": "x"}
    train(make_model(target), make_source(target), config, folder, track=given, probe=probe, **more)


def test_a_tracker_gets_every_row_its_settings_and_its_end(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches rows that only the file has, lists that are dropped, and a run that is never finished."""
    with pytest.raises(KeyboardInterrupt):
        tracked(tmp_path / "stopped", talker, early := Noted(), on_step=stopper(2, interrupt))
    assert early.calls == ["start", "finish"]
    tracker = Noted()
    tracked(tmp_path, talker, tracker)
    assert tracker.calls == ["start", "finish"] and list(tracker.rows) == [1, 2, 3, 4, 5, 6]
    assert tracker.settings["train/lr"] == 0.01 and tracker.settings["train/loss/tv"] == 1.8
    first = metrics(tmp_path)[0]
    assert tracker.rows[1]["train/loss"] == first["loss"]
    assert tracker.rows[1]["train/acceptance/2"] == first["acceptance"][2]
    assert tracker.rows[6] == {"train/held_out/overlap/0": 0.5, "train/held_out/overlap/1": 0.25}


def test_a_tracker_that_fails_ends_no_training(talker, tmp_path, caplog) -> None:
    """Catches a lost connection that costs hours, and a second tracker that loses its rows by the first."""
    lost, whole = Noted(fails_at=3), Noted()
    tracked(tmp_path / "tracked", talker, lost, whole)
    assert list(lost.rows) == [1, 2] and list(whole.rows) == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("tracker noted failed (no route to host) and is dropped") == 1
    tracked(tmp_path / "plain", talker)
    same_training(tmp_path / "tracked", tmp_path / "plain")


def test_a_missing_tracker_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError after the target has loaded."""
    name = "wandb"
    there = {"accelerate": object()}
    monkeypatch.setattr(trackers, "find_spec", there.get)
    with pytest.raises(ConfigError, match=f"train.track {name} needs {name}, .* pip install {name}"):
        trackers.check([name])
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=f"which are not installed; pip install accelerate {name}"):
        trackers.check([name])
    with pytest.raises(ConfigError, match="'wandbb' is not a tracker; did you mean 'wandb'"):
        build(Config, {"track": ["wandbb"]}, "train")


def test_tensorboard_shows_each_step_once_after_a_resume(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches curves that run back on themselves where a training was stopped, and curves that are not written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(ConnectionError):
        fit(tmp_path, talker, track=["tensorboard"], save_every=2, on_step=stopper(5, _crash))
    fit(tmp_path, talker, track=["tensorboard"], save_every=2)
    found = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    loss = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert [step for step, _ in loss] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in loss] == pytest.approx([row["loss"] for row in metrics(tmp_path)])


def _crash() -> None:
    raise ConnectionError


def test_trackers_of_every_process_may_write_their_own_log(tmp_path: Path) -> None:
    """Catches wandb and trackio left out of every run: accelerate's log wants a state."""
    import accelerate

    accelerate.PartialState._reset_state()
    trackers._made("wandb", tmp_path, 0)
    accelerate.logging.get_logger("accelerate.tracking").debug("of a tracker")
