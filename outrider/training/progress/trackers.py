"""Experiment trackers besides metrics.jsonl: TensorBoard, W&B and trackio, through accelerate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from outrider.config import nearest
from outrider.errors import ConfigError

log = logging.getLogger(__name__)
NAMES = ("tensorboard", "wandb", "trackio")
"""Supported trackers; each needs the package of its name."""


class Tracker(Protocol):
    """A receiver of metrics, such as accelerate's `GeneralTracker`."""

    name: str

    def start(self) -> None:
        """Start or resume a run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the flattened settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log the numbers of a step."""

    def finish(self) -> None:
        """End the run."""


def known(names: list[str]) -> list[str]:
    """Returns the names.  Raises ConfigError for an unknown tracker."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"{name!r} is not a tracker{nearest(name, NAMES)}")
    return names


def check(names: Sequence[str]) -> None:
    """Raises ConfigError, with the install command, if a tracker's package is missing."""
    for name in names:
        missing = [package for package in ("accelerate", name) if find_spec(package) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ConfigError(
                f"train.track {name} needs {' and '.join(missing)}, which {verb} not installed; "
                f"pip install {' '.join(missing)}"
            )


def named(names: Sequence[str], folder: Path, step: int) -> list[Tracker]:
    """Trackers for the run in `folder`, which resumes after this step; none is started yet."""
    check(names)
    return [_made(name, folder, step) for name in names]


def _made(name: str, folder: Path, step: int) -> Tracker:
    from accelerate import PartialState, tracking  # takes a second to import, and is optional

    PartialState()  # without it wandb and trackio, which run in every process, fail when they write their own log
    if name == "tensorboard":  # later steps will be trained and written again
        return tracking.TensorBoardTracker("tensorboard", folder, purge_step=step + 1)
    if name == "wandb":
        more = {"name": folder.name, "id": folder.name, "dir": str(folder)}
        return tracking.WandBTracker("outrider", resume="allow", **more)
    return tracking.TrackioTracker("outrider", resume="allow", name=folder.name)


class Trackers:
    """Sends metrics to trackers.  A tracker that fails is dropped: it must not stop training."""

    def __init__(self, trackers: Sequence[Tracker], settings: Mapping[str, Any]):
        self.running = list(trackers)
        flat = dict(_flat("train", settings, _is_setting))
        self._each(lambda tracker: tracker.start())
        self._each(lambda tracker: tracker.store_init_configuration(flat))

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics, which includes its step."""
        values = dict(_flat("train", {key: value for key, value in row.items() if key != "step"}, _is_number))
        self._each(lambda tracker: tracker.log(values, step=row["step"]))

    def finish(self) -> None:
        self._each(lambda tracker: tracker.finish())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self.running):
            try:
                act(tracker)
            except Exception as error:  # any library may fail, over any network
                log.warning("tracker %s failed (%s) and is dropped; metrics.jsonl has all rows", tracker.name, error)
                self.running.remove(tracker)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_setting(value: Any) -> bool:
    return isinstance(value, int | float | str | bool)


def _flat(key: str, value: Any, is_kept: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping by path, such as train/acceptance/0."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _flat(f"{key}/{name}", one, is_kept)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _flat(f"{key}/{number}", one, is_kept)
    elif is_kept(value):
        yield key, value
