"""Protocol of the processes that share a stage's work, and its implementation for a single process, `ALONE`.

`training.parallel.distributed.Group` implements it for several.
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
    """Raises ConfigError if `count` processes can't share texts in groups of `parts`."""
    if count % parts:
        raise ConfigError(
            f"train.sequence_parallel {parts} needs {parts} processes or a multiple of them, got {count}; start them "
            f"with torchrun --nproc-per-node {parts} -m outrider …, or set it to 1"
        )


class Weights(Protocol):
    """How weights, gradients and moments are distributed over the processes of a training run."""

    def spread(self, model: DraftModel) -> None:
        """Distribute a model, equal in every process, in place; before the optimiser is created."""

    def reduce(self, model: nn.Module, value: T) -> list[T]:
        """All-reduce the gradients.  Returns `value` of every process, by rank, sent along with them."""

    def full(self, value: Tensor) -> Tensor:
        """A weight, moment or norm as one plain tensor; collective."""

    def local(self, value: Tensor) -> Tensor:
        """The part of a tensor in this process."""

    def like(self, value: Tensor, weight: Tensor) -> Tensor:
        """A plain tensor, complete in every process, distributed like `weight`."""

    def load(self, folder: Path, model: DraftModel) -> None:
        """Load the weights of a checkpoint."""

    def whole(self, model: DraftModel) -> AbstractContextManager[DraftModel | None]:
        """The complete model in the first process, to measure or save it; None in the others.  Collective."""


class Whole:
    """All weights in one process."""

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
    """The processes of a training run, as seen by one of them."""

    rank: int
    """Rank of this process, from 0; rank 0 writes files and prints."""
    count: int
    weights: Weights
    """How the model is distributed over them."""

    @property
    def is_first(self) -> bool: ...

    def lay_out(self, way: Way) -> None:
        """Set `weights` to DDP or FSDP."""

    def gather(self, value: T) -> list[T]:
        """`value` of every process, by rank; collective."""

    def stripe(self, parts: int) -> Stripe | None:
        """This process's positions of each text if `parts` processes share a text; None for whole texts.

        Raises ConfigError if the number of processes is not a multiple of `parts`.
        """

    def agreed(self, asks: Callable[[], bool]) -> Callable[[], bool]:
        """A function that says whether `asks` was true in any process at the last collective."""

    def same(self, value: T) -> T:
        """`value` of the first process; collective."""


class Alone:
    """A single process."""

    rank = 0
    count = 1
    is_first = True

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
