"""How a model lies in the processes that train it: whole in one, or whole in each with gradients summed over all.

The third way, a part in each, is in `training/shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, distributed, nn

from outrider import checkpoint
from outrider.nn.draft_model import DraftModel

BUCKET_BYTES = 2**25
"""Gradients are summed in pieces of about this size."""


class Weights(Protocol):
    """How weights, gradients and moments lie in the processes of a training."""

    def spread(self, model: DraftModel) -> None:
        """Lay a model, the same in every process, out for training, in its place; before there is an optimiser."""

    def reduce(self, model: nn.Module) -> None:
        """Make the gradients of this process's rows those of all rows."""

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

    def reduce(self, model: nn.Module) -> None:
        pass

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


class Replicas:
    """All in each process; a step sums the gradients, and every process takes it."""

    def __init__(self, gather: Callable[[list[bool]], list[list[bool]]]):
        self._gather, self._alone = gather, Whole()
        self.full, self.local, self.like, self.load = (
            self._alone.full, self._alone.local, self._alone.like, self._alone.load,
        )  # fmt: skip

    def spread(self, model: DraftModel) -> None:
        for weight in model.parameters():
            distributed.broadcast(weight.data, 0)

    def reduce(self, model: nn.Module) -> None:
        weights = list(model.parameters())
        there = [any(column) for column in zip(*self._gather([w.grad is not None for w in weights]), strict=True)]
        gradients = []
        for weight, is_there in zip(weights, there, strict=True):
            if is_there:  # in another process, perhaps
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.append(weight.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            distributed.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    @contextmanager
    def whole(self, model: DraftModel) -> Iterator[DraftModel | None]:
        yield model if distributed.get_rank() == 0 else None


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one type, at most about `BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or sum(map(_size, bucket)) + _size(gradient) > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
