"""A part of every weight, gradient and moment in each process: torch's FSDP2.  Loaded where a training asks for it.

Each layer is a unit, gathered for its passes alone; what is outside the layers is one more, there during a batch.
Embedding and head of the target are no part of the model, and stay whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from outrider import checkpoint
from outrider.errors import ConfigError
from outrider.nn.draft_model import DraftModel
from outrider.training.parallel.replicas import Gather, T


class Shards:
    """A part in each process; gradients are summed and shared out while they are computed."""

    plain: DraftModel
    """The model with no weights in it, to hold them whole for a moment."""

    def __init__(self, gather: Gather):
        self._gather = gather

    def spread(self, model: DraftModel) -> None:
        """Raises ConfigError for a model without layers."""
        units = [
            layer for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and name.split(".")[-1] == "layers" for layer in module
        ]  # fmt: skip
        if not units:
            raise ConfigError(
                f"train.distributed: fsdp shares out layers, and drafter {model.config.kind!r} has none; use ddp"
            )
        for weight in model.parameters():
            distributed.broadcast(weight.data, 0)
        memo = {id(weight): nn.Parameter(weight.new_empty(0), weight.requires_grad) for weight in model.parameters()}
        self.plain = copy.deepcopy(model, {id(model.target): model.target, **memo})
        for unit in (*reversed(units), model):  # what lies within another comes first
            sharded = fully_shard(unit)
            sharded.set_gradient_divide_factor(1.0)  # gradients are summed: the loss is divided by all rows
            sharded.set_force_sum_reduction_for_comms(True)  # gloo can't divide
        register_fsdp_forward_method(model, "predict")

    def reduce(self, model: nn.Module, value: T) -> list[T]:
        return self._gather(value)  # gradients are summed already

    def full(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def local(self, value: Tensor) -> Tensor:
        return value.to_local() if isinstance(value, DTensor) else value

    def like(self, value: Tensor, weight: Tensor) -> Tensor:
        if not isinstance(weight, DTensor) or value.shape != weight.shape:
            return value
        return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)

    def load(self, folder: Path, model: DraftModel) -> None:
        for full_weight, weight in zip(self.plain.parameters(), _at_rest(model), strict=True):
            full_weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        checkpoint.load_weights(folder, self.plain)
        for full_weight, weight in zip(self.plain.parameters(), _at_rest(model), strict=True):
            self.local(weight.data).copy_(self.local(self.like(full_weight.data, weight)))
        self._empty()

    @contextmanager
    def whole(self, model: DraftModel) -> Iterator[DraftModel | None]:
        is_first = distributed.get_rank() == 0
        for full_weight, weight in zip(self.plain.parameters(), _at_rest(model), strict=True):
            full = self.full(weight.detach())
            if is_first:
                full_weight.data = full
        for ours, buffer in zip(self.plain.buffers(), model.buffers(), strict=True):
            ours.data = buffer.data
        try:
            yield self.plain if is_first else None
        finally:
            self._empty()

    def _empty(self) -> None:
        for full_weight in self.plain.parameters():
            full_weight.data = full_weight.data.new_empty(0)


def _at_rest(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights, each as its parts."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model.parameters()
