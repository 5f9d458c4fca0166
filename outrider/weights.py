"""Weights of a model by name, and checks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers for a checkpoint, by name; tied ones once, under their first name."""
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, weight in state.items():
        names.setdefault(id(weight), name)
    return {name: state[name] for name in names.values()}


def described(build: Callable[[], nn.Module]) -> dict[str, Tensor] | None:
    """The weights of a model on the meta device, which takes no memory; None for one that computes with its weights
    while it is built."""
    try:
        with torch.device("meta"):
            return weights_of(build())
    except Exception:
        return None


def is_larger(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> bool:
    """Whether a model is far larger than the weights in its file, so that its description can't be right."""
    sizes = [sum(weight.numel() for weight in weights.values()) for weights in (expected, stored)]
    return sizes[0] > 2 * sizes[1] + 2**20


def defaults(model: nn.Module) -> list[str]:
    """Names of buffers that a checkpoint may lack."""
    return [f"{path}.{name}" for path, module in model.named_modules() for name in getattr(module, "defaults", ())]


def rounded(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of 8-bit floating-point weights, which are not supported."""
    return [name for name, weight in weights.items() if weight.is_floating_point() and weight.element_size() == 1]


def mistyped(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of weights that are floating-point and should not be, or the reverse; a mask may be stored as integers."""
    return [
        name for name, weight in weights.items()
        if weight.is_complex() or weight.is_floating_point() != expected[name].is_floating_point()
    ]  # fmt: skip


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of weights with infinity or NaN; check again after a cast."""
    return [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]


def stale_map(model: nn.Module) -> str | None:
    """A problem with the two maps of a reduced vocabulary, which must agree and be within the target's vocabulary; None
    if there is none."""
    head = getattr(model, "head", None)
    if head is None or not hasattr(head, "d2t"):
        return None
    ids = head.ids
    is_within = bool((ids >= 0).all() and (ids < len(head.t2d)).all())
    if not is_within or len(ids.unique()) != len(ids):
        return f"d2t names tokens outside the target's {len(head.t2d)}, or one twice; its map is stale"
    agree = torch.equal(torch.zeros_like(head.t2d).index_fill(0, ids, True), head.t2d)
    return None if agree else "d2t and t2d name different tokens; its map is stale"
