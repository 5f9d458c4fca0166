"""A training some of whose processes read the target for the others, which train; see `data.features.sent`."""

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
"""Numbers of the two sources of a training."""


@dataclass(frozen=True, slots=True)
class Roles:
    """What this process does in a training with readers: the last processes read, the others train."""

    group: Group
    """All of them."""
    trainers: Processes | None
    """Those that train; None in one that reads."""
    readers: int
    most: int
    """Texts of a request."""

    @property
    def count(self) -> int:
        """Of those that train."""
        return self.group.count - self.readers

    @contextmanager
    def link(self) -> Iterator[Link]:
        """From this process, which trains, to the one that reads for it."""
        link = Link(self.count + self.group.rank % self.readers, self.most, self.group.control)
        try:
            yield link
        except KeyboardInterrupt:
            link.close(is_stopped=True)
            raise
        link.close()

    def serve(self, learnt: Any, held_out: Callable[[], Any]) -> None:
        """Read for the trainers that ask this process, until they have ended."""
        sources = [learnt]
        with suppress(DataError):  # none is held out, or all are too short: nobody asks
            sources.append(held_out())
        trainers = range(self.group.rank - self.count, self.count, self.readers)
        with signals_ignored():  # the trainers finish their step, and say so
            sent_features.serve(sources, trainers, self.most, self.group.control)


def roles(settings: RunConfig, stages: Collection[str], processes: Processes) -> Roles | None:
    """None where every process of a training reads and trains.  Raises ConfigError for what does not go together."""
    config = settings.train
    if config is None or not config.target_processes or "train" not in stages:
        return None
    readers = config.target_processes
    _check_stages(settings, config, stages)
    if not isinstance(processes, Group) or processes.count <= readers:
        raise ConfigError(
            f"train.target_processes {readers} needs at least {readers + 1} processes, got {processes.count}; start "
            f"them by torchrun --nproc-per-node {readers + 1} -m outrider …, or set it to 0"
        )
    if processes.count < 2 * readers:
        raise ConfigError(
            f"train.target_processes {readers} leaves {processes.count - readers} processes that train, and each is "
            f"read for by one; set at most {processes.count // 2}"
        )
    return Roles(processes, processes.trainers(readers), readers, config.batch * config.accumulate)


def _check_stages(settings: RunConfig, config: TrainConfig, stages: Collection[str]) -> None:
    """Raises ConfigError for stages and settings that readers have no use for."""
    readers = config.target_processes
    if list(stages) != ["train"]:
        raise ConfigError(
            f"train.target_processes {readers} is for a training alone; start `outrider prepare`, `outrider train` and "
            "`outrider evaluate` one after the other"
        )
    if settings.prepare.features != "live":
        raise ConfigError(
            f"train.target_processes {readers} has no effect with prepare.features: {settings.prepare.features}, since "
            "no target is read in training; set it to 0"
        )
    if config.calibrate and settings.evaluate is not None:
        raise ConfigError(
            f"train.calibrate {config.calibrate} drafts for the target, which those that train do not have; set it to "
            "0, and calibrate afterwards"
        )


def sent(source: Any, number: int, link: Link | None) -> Any:
    """A source whose states come over the link; itself without one."""
    return source if link is None else SentFeatures(source, number, link)
