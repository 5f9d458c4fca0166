"""Data parallelism: every process has the whole model, and gradients are summed over all.

The alternative, a part of the model in each process, is in `training/parallel/shards.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn

from outrider.nn.draft_model import DraftModel
from outrider.processes import Whole

T = TypeVar("T")
BUCKET_BYTES = 2**26
"""Approximate size of the buckets in which gradients are summed."""


class Gather(Protocol):
    """As `Processes.gather`."""

    def __call__(self, value: T) -> list[T]: ...


class Replicas:
    """The whole model in each process; gradients are summed, and every process takes the same step."""

    def __init__(self, gather: Gather, group: Any = None):
        """group: torch process group; all processes by default."""
        self._gather, self._group, self._alone = gather, group, Whole()
        self.full, self.local, self.like, self.load = (
            self._alone.full, self._alone.local, self._alone.like, self._alone.load,
        )  # fmt: skip

    def spread(self, model: DraftModel) -> None:
        for weight in model.parameters():
            distributed.broadcast(weight.data, 0, self._group)

    def reduce(self, model: nn.Module, value: T) -> list[T]:
        weights = list(model.parameters())
        gathered = self._gather(([weight.grad is not None for weight in weights], value))
        # a weight may have a gradient only in another process
        there = [any(column) for column in zip(*(flags for flags, _ in gathered), strict=True)]
        for bucket in _buckets([weight for weight, is_there in zip(weights, there, strict=True) if is_there]):
            flat = torch.cat([_gradient(weight).flatten() for weight in bucket])
            distributed.all_reduce(flat, group=self._group)
            for weight, part in zip(bucket, flat.split([weight.numel() for weight in bucket]), strict=True):
                weight.grad = part.view_as(weight)  # a copy would read and write all gradients again
        return [theirs for _, theirs in gathered]

    @contextmanager
    def whole(self, model: DraftModel) -> Iterator[DraftModel | None]:
        yield model if distributed.get_rank() == 0 else None


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _buckets(weights: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups of weights of the same type, each of about `BUCKET_BYTES` at most."""
    bucket: list[nn.Parameter] = []
    for weight in weights:
        if bucket and (weight.dtype != bucket[0].dtype or sum(map(_size, bucket)) + _size(weight) > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(weight)
    if bucket:
        yield bucket


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
