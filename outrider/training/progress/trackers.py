"""Where metrics go besides metrics.jsonl: TensorBoard, W&B and trackio, through accelerate's trackers."""

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
"""Trackers; each needs the package of its name."""


class Tracker(Protocol):
    """What metrics are sent to; accelerate's `GeneralTracker` is one."""

    name: str

    def start(self) -> None:
        """Begin, or go on with, a run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Flat settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Numbers of a step."""

    def finish(self) -> None:
        """End the run."""


def known(names: list[str]) -> list[str]:
    """The names themselves.  Raises ConfigError for one that is no tracker's."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"{name!r} is not a tracker{nearest(name, NAMES)}")
    return names


def check(names: Sequence[str]) -> None:
    """Raises ConfigError, with the command that installs it, where a tracker's package is missing."""
    for name in names:
        missing = [package for package in ("accelerate", name) if find_spec(package) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ConfigError(
                f"train.track {name} needs {' and '.join(missing)}, which {verb} not installed; "
                f"pip install {' '.join(missing)}"
            )


def named(names: Sequence[str], folder: Path, step: int) -> list[Tracker]:
    """Trackers of the run in `folder`, which goes on after this step; none is started yet."""
    check(names)
    return [_made(name, folder, step) for name in names]


def _made(name: str, folder: Path, step: int) -> Tracker:
    from accelerate import PartialState, tracking  # a second to load, and not always there

    PartialState()  # without it trackers of every process, wandb and trackio, fail as they write their own log
    if name == "tensorboard":  # what lies behind the step is trained, and written, again
        return tracking.TensorBoardTracker("tensorboard", folder, purge_step=step + 1)
    if name == "wandb":
        more = {"name": folder.name, "id": folder.name, "dir": str(folder)}
        return tracking.WandBTracker("outrider", resume="allow", **more)
    return tracking.TrackioTracker("outrider", resume="allow", name=folder.name)


class Trackers:
    """Sends metrics to trackers.  One that fails is left out from then on: training is worth more than its curves."""

    def __init__(self, trackers: Sequence[Tracker], settings: Mapping[str, Any]):
        self.running = list(trackers)
        flat = dict(_flat("train", settings, _is_setting))
        self._each(lambda tracker: tracker.start())
        self._each(lambda tracker: tracker.store_init_configuration(flat))

    def log(self, row: Mapping[str, Any]) -> None:
        """A row of metrics, with its step."""
        values = dict(_flat("train", {key: value for key, value in row.items() if key != "step"}, _is_number))
        self._each(lambda tracker: tracker.log(values, step=row["step"]))

    def finish(self) -> None:
        self._each(lambda tracker: tracker.finish())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self.running):
            try:
                act(tracker)
            except Exception as error:  # of any library, over any network
                log.warning("tracker %s failed (%s) and is left out; metrics.jsonl has all rows", tracker.name, error)
                self.running.remove(tracker)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_setting(value: Any) -> bool:
    return isinstance(value, int | float | str | bool)


def _flat(key: str, value: Any, is_kept: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Leaves by their path, such as train/acceptance/0."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _flat(f"{key}/{name}", one, is_kept)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _flat(f"{key}/{number}", one, is_kept)
    elif is_kept(value):
        yield key, value
