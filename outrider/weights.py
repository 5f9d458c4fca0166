"""The weights of a model by name, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: parameters and buffers by name, tied ones once, under their first name."""
    names: dict[int, str] = {}
    found = model.state_dict(keep_vars=True)
    for name, weight in found.items():
        names.setdefault(id(weight), name)
    return {name: found[name] for name in names.values()}


def defaults(model: nn.Module) -> list[str]:
    """Names of buffers that a checkpoint may lack."""
    return [f"{path}.{name}" for path, module in model.named_modules() for name in getattr(module, "defaults", ())]


def rounded(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of 8-bit floating-point weights, which can't be computed with here."""
    return [name for name, weight in weights.items() if weight.is_floating_point() and weight.element_size() == 1]


def mistyped(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Names of weights that are floating-point where `own` is not, or the other way; a mask may be stored as
    integers."""
    return [
        name for name, weight in weights.items()
        if weight.is_complex() or weight.is_floating_point() != own[name].is_floating_point()
    ]  # fmt: skip


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of weights that hold infinity or NaN; ask again after a cast."""
    return [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]


def stale_map(model: nn.Module) -> str | None:
    """What is wrong with a reduced vocabulary's two maps, which must agree and lie within the target's tokens; else
    None."""
    head = getattr(model, "head", None)
    if head is None or not hasattr(head, "d2t"):
        return None
    ids = head.ids
    known = bool((ids >= 0).all() and (ids < len(head.t2d)).all())
    if not known or len(ids.unique()) != len(ids):
        return f"d2t names tokens outside the target's {len(head.t2d)}, or one twice; its map is stale"
    agree = torch.equal(torch.zeros_like(head.t2d).index_fill(0, ids, True), head.t2d)
    return None if agree else "d2t and t2d name different tokens; its map is stale"
