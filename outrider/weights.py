"""Weights of a model by name, and checks of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.storage.trusted import regular


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers for a checkpoint, by name; tied ones only once, under their first name."""
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
    """Names of weights that are floating-point and should not be, or vice versa; a mask may be stored as integers."""
    return [
        name for name, weight in weights.items()
        if weight.is_complex() or weight.is_floating_point() != expected[name].is_floating_point()
    ]  # fmt: skip


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of weights with infinity or NaN; check again after a cast."""
    return [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]


def problems(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[tuple[str, Collection[str]]]:
    """Each possible problem and the names of its weights; later checks assume that earlier ones passed."""
    yield "lacks", expected.keys() - weights.keys()
    yield "has unknown", weights.keys() - expected.keys()
    yield "has wrongly shaped", [name for name in expected if expected[name].shape != weights[name].shape]
    yield "has 8-bit", rounded(weights)
    yield "has wrongly typed", mistyped(weights, expected)
    yield "has non-finite", not_finite({name: weight.to(expected[name].dtype) for name, weight in weights.items()})


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


def check_shapes(path: Path, settings: Any, build: Callable[[], nn.Module]) -> None:
    """Refuse settings that do not match the shapes in a weights file, before either is allocated.  A method whose model
    can't be built on the meta device is checked by `problems`."""
    try:
        with safe_open(regular(path), framework="pt") as file:
            stored = {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; copy or train it again") from None
    layers = getattr(settings, "layers", 0)
    if isinstance(layers, int) and layers > max(1, len(stored)):
        raise CheckpointError(f"{path} has {len(stored)} weights, and the manifest {layers} layers; copy it again")
    if (expected := described(build)) is None:
        return
    if is_larger(expected, stored):
        raise CheckpointError(f"{path} has fewer weights than the manifest describes; copy it again")
    if wrong := [name for name in expected.keys() & stored.keys() if expected[name].shape != stored[name].shape]:
        raise CheckpointError(
            f"{path} has wrongly shaped weights: {', '.join(sorted(wrong)[:4])}; copy or train it again"
        )
