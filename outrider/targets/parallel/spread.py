"""Weights that are not complete in memory: split over processes, or on disk until their layer runs.

With tensor parallelism they are torch DTensors, of which a process has a part.  With a `device_map` they are on the
meta device, and accelerate's hooks load them for a pass.
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
    """A complete weight of a module; if it is split over processes, all of them must call this."""
    weight: Tensor = getattr(module, name)
    if isinstance(weight, DTensor):
        whole: Tensor = weight.full_tensor()
        return whole
    if not weight.is_meta:
        return weight
    from accelerate.utils import align_module_device  # its hook knows where the values are

    with align_module_device(module):
        return getattr(module, name).detach().clone()


def named(model: nn.Module, name: str) -> Tensor:
    """The complete weight with this name in a model, like `weight_of`."""
    owner, _, leaf = name.rpartition(".")
    return weight_of(model.get_submodule(owner), leaf)


def copied(module: nn.Module) -> nn.Module:
    """The module itself or, if its weights are not complete, a read-only copy with complete ones."""
    if all(not is_part(weight) and not weight.is_meta for weight in module.parameters()):
        return module
    there = copy.copy(module)
    there.__dict__.pop("forward", None)  # which communicates with other processes, or loads weights
    there._parameters = {
        name: None if weight is None else nn.Parameter(weight_of(module, name), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    there._modules = {name: None if part is None else copied(part) for name, part in module._modules.items()}
    return there


def device_of(model: Any, name: str) -> torch.device:
    """The devices on which a model's passes begin and end.  Raises TargetError if the embedding is on no device, or if
    the head is tied to it but placed elsewhere."""
    device = next(iter(model.parameters())).device
    if device.type == "meta":
        raise TargetError(
            f"this device_map puts the first weights of {name} on no device, but passes begin there; put the embedding "
            "on a device or on the CPU"
        )
    place = (getattr(model, "hf_device_map", None) or {}).get("lm_head", device)
    is_elsewhere = place == "disk" or torch.device(place) != device
    if is_elsewhere and model.config.get_text_config().tie_word_embeddings:
        raise TargetError(
            f"the output layer of {name} is its embedding, but this device_map puts lm_head elsewhere; put both on one "
            "device"
        )
    return device
