"""A part of every weight, gradient and moment in each process: torch's FSDP2.  Imported only if configured.

Each layer is a unit that is gathered only for its own passes; everything outside the layers is one more unit, gathered
for the whole batch.  The target's embedding and head are not part of the model and are not sharded.
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
    """A part of the model in each process; gradients are reduce-scattered during the backward pass."""

    plain: DraftModel
    """A copy of the model with empty weights, to hold the unsharded ones temporarily."""

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
        for unit in (*reversed(units), model):  # nested modules first
            sharded = fully_shard(unit)
            sharded.set_gradient_divide_factor(1.0)  # sum, not mean: the loss is divided by all rows
            sharded.set_force_sum_reduction_for_comms(True)  # gloo can't divide
        register_fsdp_forward_method(model, "predict")

    def reduce(self, model: nn.Module, value: T) -> list[T]:
        return self._gather(value)  # gradients are already summed

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
    """The weights in their sharded state."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model.parameters()
