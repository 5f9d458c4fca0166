"""Training in which some processes run the target for the others, which train; see `data.features.sent`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from outrider.data.features import sent as sent_features
from outrider.data.features.sent import Link, SentFeatures
from outrider.errors import ConfigError, DataError
from outrider.processes import Processes
from outrider.runs.file import RunConfig
from outrider.training.config import Config as TrainConfig
from outrider.training.parallel.distributed import Group, signals_ignored

LEARNT, HELD_OUT = 0, 1
"""Indices of the two sources of a training."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The role of this process in a training with readers: the last processes read, the others train."""

    group: Group
    """All processes."""
    trainers: Processes | None
    """The processes that train; None in a reader."""
    readers: int
    most: int
    """Maximum number of texts in a request."""

    @property
    def count(self) -> int:
        """Number of trainers."""
        return self.group.count - self.readers

    @contextmanager
    def link(self) -> Iterator[Link]:
        """Link from this trainer to its reader."""
        link = Link(self.count + self.group.rank % self.readers, self.most, self.group.control)
        try:
            yield link
        except KeyboardInterrupt:
            link.close(is_stopped=True)
            raise
        link.close()

    def serve(self, learnt: Any, held_out: Callable[[], Any]) -> None:
        """Run the target for this process's trainers until they end."""
        sources = [learnt]
        with suppress(DataError):  # no held-out answers, or all are too short: no trainer requests them
            sources.append(held_out())
        trainers = range(self.group.rank - self.count, self.count, self.readers)
        with signals_ignored():  # the trainers finish their step and send the end
            sent_features.serve(sources, trainers, self.most, self.group.control)


def roles(settings: RunConfig, stages: Collection[str], processes: Processes) -> Roles | None:
    """None if every process of a training reads and trains.  Raises ConfigError for conflicting settings."""
    config = settings.train
    if config is None or not config.target_processes or "train" not in stages:
        return None
    readers = config.target_processes
    _check_stages(settings, config, stages)
    if not isinstance(processes, Group) or processes.count <= readers:
        raise ConfigError(
            f"train.target_processes {readers} needs at least {readers + 1} processes, got {processes.count}; start "
            f"them with torchrun --nproc-per-node {readers + 1} -m outrider …, or set it to 0"
        )
    if processes.count < 2 * readers:
        raise ConfigError(
            f"train.target_processes {readers} leaves {processes.count - readers} trainers, and each needs a reader "
            f"of its own; set at most {processes.count // 2}"
        )
    return Roles(processes, processes.trainers(readers), readers, config.batch * config.accumulate)


def _check_stages(settings: RunConfig, config: TrainConfig, stages: Collection[str]) -> None:
    """Raises ConfigError for stages and settings that don't work with readers."""
    readers = config.target_processes
    if list(stages) != ["train"]:
        raise ConfigError(
            f"train.target_processes {readers} works only for training alone; start `outrider prepare`, `outrider "
            "train` and `outrider evaluate` one after the other"
        )
    if settings.prepare.features != "live":
        raise ConfigError(
            f"train.target_processes {readers} has no effect with prepare.features: {settings.prepare.features}, since "
            "no target is read in training; set it to 0"
        )
    if config.calibrate and settings.evaluate is not None:
        raise ConfigError(
            f"train.calibrate {config.calibrate} drafts for the target, which trainers do not load; set it to 0, "
            "and calibrate afterwards"
        )


def sent(source: Any, number: int, link: Link | None) -> Any:
    """The source with states that come over the link; the source itself without a link."""
    return source if link is None else SentFeatures(source, number, link)
