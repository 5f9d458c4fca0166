"""Weights that a model does not have whole in memory: a part in each process, or on disk until their layer runs.

Tensor parallelism leaves torch's DTensors, of which a process has its part.  A `device_map` leaves tensors without
values on the meta device, which accelerate's hooks fill for a pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from outrider.errors import TargetError


def is_part(weight: object) -> bool:
    """Whether other processes have parts of this weight."""
    return isinstance(weight, DTensor)


def is_whole(model: nn.Module) -> bool:
    """Whether all weights are in this process's memory, on one device."""
    return len({weight.device for weight in model.parameters()}) <= 1 and not any(
        is_part(weight) or weight.is_meta for weight in model.parameters()
    )


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A weight of a module, whole; where others have parts of it, all must ask."""
    weight: Tensor = getattr(module, name)
    if isinstance(weight, DTensor):
        whole: Tensor = weight.full_tensor()
        return whole
    if not weight.is_meta:
        return weight
    from accelerate.utils import align_module_device  # it wrote the hook that knows where the values are

    with align_module_device(module):
        return getattr(module, name).detach().clone()


def named(model: nn.Module, name: str) -> Tensor:
    """The weight of this name in a model, whole, as `weight_of`."""
    owner, _, leaf = name.rpartition(".")
    return weight_of(model.get_submodule(owner), leaf)


def copied(module: nn.Module) -> nn.Module:
    """The module itself; where its weights are not whole, a copy with whole ones, for reading."""
    if all(not is_part(weight) and not weight.is_meta for weight in module.parameters()):
        return module
    there = copy.copy(module)
    there.__dict__.pop("forward", None)  # it speaks to other processes, or fills weights
    there._parameters = {
        name: None if weight is None else nn.Parameter(weight_of(module, name), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    there._modules = {name: None if part is None else copied(part) for name, part in module._modules.items()}
    return there


def device_of(model: Any, name: str) -> torch.device:
    """Where a model's passes begin and end.  Raises TargetError for an embedding that is on no device, and for a head
    that shares its weights from another place."""
    device = next(iter(model.parameters())).device
    if device.type == "meta":
        raise TargetError(
            f"the first weights of {name} are on no device by this device_map, but passes begin there; put the "
            "embedding on a device or on the CPU"
        )
    place = (getattr(model, "hf_device_map", None) or {}).get("lm_head", device)
    is_elsewhere = place == "disk" or torch.device(place) != device
    if is_elsewhere and model.config.get_text_config().tie_word_embeddings:
        raise TargetError(
            f"the output layer of {name} is its embedding, but this device_map puts lm_head elsewhere; put both on one "
            "device"
        )
    return device
