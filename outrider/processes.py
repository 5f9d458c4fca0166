"""What a training and the other stages ask of the processes that share their work; `ALONE`, one, answers by itself.

Several are a `training.parallel.distributed.Group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from torch import Tensor, nn

from outrider import checkpoint
from outrider.errors import ConfigError
from outrider.nn.draft_model import DraftModel
from outrider.nn.sequence import Stripe

T = TypeVar("T")
Way = Literal["ddp", "fsdp"]


def check_parts(count: int, parts: int) -> None:
    """Raises ConfigError where `count` processes can't share texts in groups of `parts`."""
    if count % parts:
        raise ConfigError(
            f"train.sequence_parallel {parts} needs {parts} processes or a multiple of them, got {count}; start them "
            f"by torchrun --nproc-per-node {parts} -m outrider …, or set it to 1"
        )


class Weights(Protocol):
    """How weights, gradients and moments lie in the processes of a training."""

    def spread(self, model: DraftModel) -> None:
        """Lay a model, the same in every process, out for training, in its place; before there is an optimiser."""

    def reduce(self, model: nn.Module, value: T) -> list[T]:
        """Make the gradients of this process's rows those of all rows.  Returns what every process gives here, by
        rank: it travels along."""

    def full(self, value: Tensor) -> Tensor:
        """A weight, a moment or a norm as one plain tensor; all processes must ask."""

    def local(self, value: Tensor) -> Tensor:
        """What of it is in this process."""

    def like(self, value: Tensor, weight: Tensor) -> Tensor:
        """A plain tensor, whole in every process, laid out as a weight of its shape is."""

    def load(self, folder: Path, model: DraftModel) -> None:
        """Take the weights of a checkpoint."""

    def whole(self, model: DraftModel) -> AbstractContextManager[DraftModel | None]:
        """The model with all of its weights in the first process, to measure or to write; None in the others.  All must
        ask."""


class Whole:
    """All in one process."""

    def spread(self, model: DraftModel) -> None:
        pass

    def reduce(self, model: nn.Module, value: T) -> list[T]:
        return [value]

    def full(self, value: Tensor) -> Tensor:
        return value

    def local(self, value: Tensor) -> Tensor:
        return value

    def like(self, value: Tensor, weight: Tensor) -> Tensor:
        return value

    def load(self, folder: Path, model: DraftModel) -> None:
        checkpoint.load_weights(folder, model)

    @contextmanager
    def whole(self, model: DraftModel) -> Iterator[DraftModel | None]:
        yield model


class Processes(Protocol):
    """The processes of a training, as one of them sees them."""

    rank: int
    """Of this process, from 0; the first one writes files and prints."""
    count: int
    weights: Weights
    """How the model lies in them."""

    @property
    def is_first(self) -> bool: ...

    def lay_out(self, way: Way) -> None:
        """Set `weights`, as the run asks for it."""

    def gather(self, value: T) -> list[T]:
        """What every process gives here, by rank; all must ask, in the same order."""

    def stripe(self, parts: int) -> Stripe | None:
        """The positions of each text that this process has, where `parts` processes share it; None for whole texts.

        Raises ConfigError where the processes are no multiple of `parts`.
        """

    def agreed(self, asks: Callable[[], bool]) -> Callable[[], bool]:
        """Whether any process asks for something, as all know it from what was gathered last."""

    def same(self, value: T) -> T:
        """What the first process gives here; all must ask, in the same order."""


class Alone:
    """One process."""

    rank, count, is_first = 0, 1, True

    def __init__(self) -> None:
        self.weights: Weights = Whole()

    def lay_out(self, way: Way) -> None:
        pass

    def gather(self, value: T) -> list[T]:
        return [value]

    def stripe(self, parts: int) -> Stripe | None:
        check_parts(self.count, parts)
        return None

    def agreed(self, asks: Callable[[], bool]) -> Callable[[], bool]:
        return asks

    def same(self, value: T) -> T:
        return value


ALONE = Alone()
