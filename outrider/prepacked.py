"""Linear layers whose weights lie in the order in which a few rows read them, where that is measured to be faster.

torch gives float32 products on a CPU to MKL, which is slow with the few rows of a decoding step on some CPUs, and good on
others.  Beside it stand oneDNN's packed weights, and `panels`: a small kernel of our own (`outrider.kernels`), where there
is a C++ compiler.  Panels read every weight once for up to a dozen rows, store weights whose values are exactly bfloat16
in half the bytes, and sum each output in one order whatever the number of rows.  All are timed on a few of the model's own
layers.  The packed copy takes as much memory as the weights, or half of it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import kernels, machine

Way = Literal["plain", "onednn", "panels"]
SHARE = 0.5
"""Of the memory that is free, what a model's packed copy may take; a larger model is left as it is."""
SAMPLE_BYTES = 2**26
"""Weights on which the ways are timed: more than most caches hold."""
SAMPLE_ROWS = (1, 8)
PANELS = "panels"
"""A layer's panels as its buffer."""


class Prepacked(NamedTuple):
    """A layer's weight as one of the ways reads it, and which weight that was."""

    way: Way
    weight: Tensor
    stamp: tuple[int, int]


def pack(model: nn.Module) -> None:
    """Give the linear layers of `model` packed weights, used while `products` is open; else they are as they were.

    Nothing changes where that is not faster.  A layer whose weight changes afterwards multiplies the usual way again.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
    if not layers or sum(layer.weight.nbytes for layer in layers) > SHARE * machine.free_memory():
        return
    way = _fastest(layers)
    if way == "plain":
        return
    for layer in layers:
        _weights[layer] = Prepacked(way, prepacked(layer.weight.detach(), way), _stamp(layer))
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


@contextmanager
def products(*ways: Way) -> Iterator[None]:
    """While this is open, layers with packed weights use them in this thread; those packed in other `ways`, if given, don't."""
    token = _open.set(ways or ("onednn", "panels"))
    try:
        yield
    finally:
        _open.reset(token)


def in_panels(model: nn.Module) -> list[nn.Linear]:
    """Its layers whose weights are packed in panels, in the model's order."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer in _weights]
    return [layer for layer in layers if _weights[layer].way == "panels"]


def layout(model: nn.Module) -> list[tuple[str, torch.dtype]]:
    """Of its layers with packed weights: name, and what the weight is stored as."""
    return [(name, _weights[layer].weight.dtype) for name, layer in model.named_modules() if layer in _weights]


@contextmanager
def as_buffers(model: nn.Module) -> Iterator[None]:
    """While this is open, panels are buffers of their layers, so that a traced graph names them."""
    layers = in_panels(model)
    for layer in layers:
        layer.register_buffer(PANELS, _weights[layer].weight, persistent=False)
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, PANELS)


def panels_of(layers: Sequence[nn.Linear]) -> Tensor:
    """The panels of these layers behind each other; each layer's are views of it afterwards, so that memory holds them once."""
    parts = [_weights[layer].weight for layer in layers]
    places = {(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts}
    starts = itertools.accumulate((part.numel() for part in parts[:-1]), initial=parts[0].storage_offset())
    if places == {(parts[0].untyped_storage().data_ptr(), start) for start in starts}:  # joined before
        return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
    whole, start = kernels.on_large_pages(torch.cat(parts)), 0
    for layer, part in zip(layers, parts, strict=True):
        _weights[layer] = _weights[layer]._replace(weight=whole[start : start + len(part)])
        start += len(part)
    return whole


def stored(model: nn.Module) -> int:
    """Bytes of packed weights that a pass reads while `products` is open."""
    return sum(_weights[layer].weight.nbytes for layer in model.modules() if isinstance(layer, nn.Linear) and layer in _weights)


def way_of(model: nn.Module) -> Way:
    """How most of its linear layers multiply while `products` is open."""
    found = Counter(_weights[module].way for module in model.modules() if isinstance(module, nn.Linear) and module in _weights)
    return found.most_common(1)[0][0] if found else "plain"


_open: ContextVar[tuple[Way, ...]] = ContextVar("open", default=())
_weights: WeakKeyDictionary[nn.Linear, Prepacked] = WeakKeyDictionary()
"""Not kept in the layers: they could not be copied or saved any more."""


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    found = _weights.get(layer)
    usual = found is None or found.way not in _open.get() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if found is None or usual or x.dtype != torch.float32 or not x.numel():
        return F.linear(x, layer.weight, layer.bias)
    weight = found.weight
    if torch.compiler.is_compiling():  # what is traced holds the weights of the moment, and says so itself
        weight = getattr(layer, PANELS, weight)
    elif found.stamp != _stamp(layer):
        return F.linear(x, layer.weight, layer.bias)
    return product(x, found.way, weight, layer.weight.shape[0], layer.bias)


def _fits(layer: nn.Linear) -> bool:
    # a quantised weight's copy would be float32 again, four times what it takes
    if type(layer.weight) is not nn.Parameter or layer.weight.dtype != torch.float32 or layer.weight.device.type != "cpu":
        return False
    own = vars(layer).get("forward")
    # one of ours is made anew once its weight has changed; others' stays
    is_ours = isinstance(own, functools.partial) and own.func is _forward
    return own is None or (is_ours and (layer not in _weights or _weights[layer].stamp != _stamp(layer)))


def _stamp(layer: nn.Linear) -> tuple[int, int]:
    return layer.weight.data_ptr(), layer.weight._version


# ── ways to multiply ──────────────────────────────────────────────────────────────────────────────────────────────────


def ways() -> list[Way]:
    """Those that this machine has, the usual one first."""
    there: dict[Way, bool] = {"plain": True, "onednn": _has_onednn(), "panels": kernels.library() is not None}
    return [way for way, is_there in there.items() if is_there]


def prepacked(weight: Tensor, way: Way) -> Tensor:
    """The weight [outputs, inner] float32 as this way reads it."""
    if way == "panels":
        return kernels.panels(weight)
    return torch.ops.mkldnn._reorder_linear_weight(weight) if way == "onednn" else weight


def product(x: Tensor, way: Way, weight: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    """x [..., inner] float32 times a packed weight: [..., outputs]."""
    if way == "panels":
        found = torch.ops.outrider.multiply(x.contiguous(), weight, outputs)
        return found if bias is None else found + bias
    if way == "onednn":
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@torch.inference_mode()
def _fastest(layers: Sequence[nn.Linear]) -> Way:
    """The way in which a plain step and a verification read these layers fastest, by timing some of them."""
    shapes = sorted(Counter(tuple(layer.weight.shape) for layer in layers).items())
    there = ways()
    sizes = list(itertools.accumulate(layer.weight.nbytes for layer in layers))
    sample = [layer.weight for layer, size in zip(layers, sizes, strict=True) if size <= SAMPLE_BYTES] or [layers[0].weight]
    # tied to another's weight, a layer may be wider than it says
    inputs = {(rows, width): torch.ones(rows, width) for rows in SAMPLE_ROWS for width in {own.shape[1] for own in sample}}

    def multiply(way: Way, weights: Sequence[Tensor]) -> None:
        for rows in SAMPLE_ROWS:
            for own, weight in zip(sample, weights, strict=True):
                product(inputs[rows, own.shape[1]], way, weight, own.shape[0])

    def runs() -> dict[str, Callable[[], object]]:
        return {way: functools.partial(multiply, way, [prepacked(own, way) for own in sample]) for way in there}

    if len(there) == 1:
        return "plain"
    return machine.fastest(f"float32 products of linear layers {shapes}: {there}", runs)  # type: ignore[return-value]


@functools.cache
def _has_onednn() -> bool:
    """Whether this torch can multiply by oneDNN's packed weights, as it is set now."""
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            return False
        x, weight = torch.rand(2, 8), torch.rand(4, 8)
        return torch.allclose(product(x, "onednn", prepacked(weight, "onednn"), 4), F.linear(x, weight))
    except (AttributeError, RuntimeError):  # the operators are torch's own, but not promised
        return False
