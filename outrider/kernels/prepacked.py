"""Linear layers with weights packed for products with a few rows, if measurements show that to be faster.

torch computes float32 products on a CPU with MKL, which is slow for the few rows of a decoding step on some CPUs.  The
alternatives are oneDNN's packed weights and `panels`, a kernel of `outrider.kernels`, if there is a C++ compiler.
Panels are read once for up to a dozen rows, take half the bytes if all values are exactly bfloat16, and sum each output
in a fixed order whatever the number of rows.  All of them are timed on a few of the model's own layers.  The packed
copy takes as much memory as the weights, or half of it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import kernels, machine
from outrider.kernels import quantized
from outrider.kernels.contents import Contents
from outrider.kernels.pages import LargePages
from outrider.kernels.quantized import Quantized, QuantizedLinear

Way = Literal["plain", "onednn", "panels"]
SHARE = 0.5
"""Fraction of the free memory that a model's packed copy may take; larger models are not packed."""
SAMPLE_BYTES = 2**26
"""Bytes of weights on which the alternatives are timed: more than most caches hold."""
SAMPLE_ROWS = (1, 8)
PANELS = "panels"
"""Name of a layer's panels while they are traced."""


class Prepacked(NamedTuple):
    """A layer's packed weight, and a stamp of the weight it was made from."""

    way: Way
    weight: Tensor
    stamp: tuple[int, int]


def pack(model: nn.Module, changed: Collection[str] = ()) -> None:
    """Pack the weights of the linear layers of `model` if that is faster; they are used only within `enabled`.

    changed: names of weights to repack even if their version counters did not change.
    A layer whose weight changes afterwards falls back to the usual product.
    """
    for name, module in model.named_modules():
        if f"{name}.weight" in changed and isinstance(module, nn.Linear):
            _weights.pop(module, None)
    layers = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
    if not layers or sum(layer.weight.nbytes for layer in layers) > SHARE * machine.free_memory():
        return
    way = _fastest(layers)
    if way == "plain":
        return
    for layer, weight in zip(layers, prepacked([layer.weight.detach() for layer in layers], way), strict=True):
        _weights[layer] = Prepacked(way, weight, _stamp(layer))
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


@torch.no_grad()
def halve(model: nn.Module) -> None:
    """Round the float32 weights of its linear layers to bfloat16 if panels can then read half the bytes; the model's
    dtype stays the same.

    For draft models: a rounded one proposes almost the same tokens, which are verified as before.
    """
    if kernels.library() is not None:
        for layer in model.modules():
            if type(layer) is nn.Linear and _fits(layer):
                layer.weight.copy_(layer.weight.bfloat16())


class Packed:
    """A model with packed weights, which are repacked when they change."""

    def __init__(self, model: nn.Module):
        pack(model)
        self.model, self._contents = model, Contents(model)
        self._contents.changes()

    def refresh(self) -> bool:
        """Whether a weight changed in any way since the last call."""
        changed = self._contents.changes()
        if changed:
            pack(self.model, changed)
        return bool(changed)


@contextmanager
def enabled(*ways: Way) -> Iterator[None]:
    """Within this context, layers use their packed weights in this thread (only those packed in these `ways`, if
    given)."""
    token = _open.set(ways or ("onednn", "panels"))
    try:
        yield
    finally:
        _open.reset(token)


@contextmanager
def disabled() -> Iterator[None]:
    """Within this context, all layers multiply as torch does in this thread, even within `enabled`."""
    token = _disabled.set(True)
    try:
        with quantized.plainly():
            yield
    finally:
        _disabled.reset(token)


def in_panels(model: nn.Module) -> list[nn.Linear | Quantized]:
    """The model's layers whose weights are in panels, in its order: linear ones, then those with quantised weights."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer in _weights]
    return [layer for layer in layers if _weights[layer].way == "panels"] + _quantised(model)


def _quantised(model: nn.Module) -> list[Quantized]:
    return [layer for layer in model.modules() if isinstance(layer, Quantized)] if quantized.is_fast() else []


def layout(model: nn.Module) -> list[tuple[str, object]]:
    """For each layer with packed weights: its name, and how the weight is stored and multiplied."""
    entries: list[tuple[str, object]] = []
    for name, layer in model.named_modules():
        if isinstance(layer, Quantized):
            entries.append((name, layer.extra_repr()))
        elif layer in _weights:
            entries.append((name, _weights[layer].weight.dtype))
    return entries


@contextmanager
def as_parameters(model: nn.Module) -> Iterator[None]:
    """Within this context, panels are parameters of their layers, so that a traced graph refers to them by name.

    Not buffers, which inductor would copy.
    """
    layers = in_panels(model)
    for layer in layers:
        layer.register_parameter(PANELS, nn.Parameter(_panels(layer), requires_grad=False))
    try:
        yield
    finally:
        for layer in layers:
            if isinstance(layer, Quantized):
                layer.panels = None
            else:
                delattr(layer, PANELS)


def panels_of(layers: Sequence[nn.Linear | Quantized]) -> Tensor:
    """The panels of these layers as one tensor, copied unless they are contiguous; each layer's panels then become
    views of it, so that they are in memory only once."""
    parts = [_panels(layer) for layer in layers]
    offsets = {(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts}
    starts = itertools.accumulate((part.numel() for part in parts[:-1]), initial=parts[0].storage_offset())
    if offsets == {(parts[0].untyped_storage().data_ptr(), start) for start in starts}:
        return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
    whole, start = LargePages(sum(part.nbytes for part in parts)).stored(torch.cat(parts)), 0
    for layer, part in zip(layers, parts, strict=True):
        view = whole[start : start + len(part)]
        if isinstance(layer, Quantized):
            layer.packed = view
        else:
            _weights[layer] = _weights[layer]._replace(weight=view)
        start += len(part)
    return whole


def _panels(layer: nn.Linear | Quantized) -> Tensor:
    return layer.packed if isinstance(layer, Quantized) else _weights[layer].weight


def stored(model: nn.Module) -> int:
    """Bytes of packed weights that a pass reads within `enabled`."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer in _weights]
    read = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    return sum(_weights[layer].weight.nbytes for layer in linear) + sum(layer.weight_bytes for layer in read)


def way_of(model: nn.Module) -> Way:
    """How most of its linear layers multiply within `enabled`; quantised weights are always in panels."""
    if _quantised(model):
        return "panels"
    counts = Counter(
        _weights[module].way for module in model.modules() if isinstance(module, nn.Linear) and module in _weights
    )
    return counts.most_common(1)[0][0] if counts else "plain"


_open: ContextVar[tuple[Way, ...]] = ContextVar("open", default=())
_disabled: ContextVar[bool] = ContextVar("disabled", default=False)
_weights: WeakKeyDictionary[nn.Linear, Prepacked] = WeakKeyDictionary()
"""Not stored in the layers, which could then no longer be copied or saved."""


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    packed = _weights.get(layer)
    is_training = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if packed is None or packed.way not in _open.get() or _disabled.get() or is_training:
        return F.linear(x, layer.weight, layer.bias)
    if x.dtype != torch.float32 or not x.numel():
        return F.linear(x, layer.weight, layer.bias)
    weight = packed.weight
    if torch.compiler.is_compiling():  # a traced graph uses the current weights, and checks that itself
        weight = getattr(layer, PANELS, weight)
    elif packed.stamp != _stamp(layer):
        return F.linear(x, layer.weight, layer.bias)
    return product(x, packed.way, weight, layer.weight.shape[0], layer.bias)


def _fits(layer: nn.Linear) -> bool:
    # a quantised weight's copy would be float32 again, four times as large
    if (
        type(layer.weight) is not nn.Parameter
        or layer.weight.dtype != torch.float32
        or layer.weight.device.type != "cpu"
    ):
        return False
    forward = vars(layer).get("forward")
    # ours is repacked once its weight has changed; a third-party `forward` is kept
    is_ours = isinstance(forward, functools.partial) and forward.func is _forward
    return forward is None or (is_ours and (layer not in _weights or _weights[layer].stamp != _stamp(layer)))


def _stamp(layer: nn.Linear) -> tuple[int, int]:
    weight = layer.weight
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version  # inference tensors have no version


# ── ways to multiply ──────────────────────────────────────────────────────────────────────────────────────────────────


def ways() -> list[Way]:
    """The ways that this machine supports, the usual one first."""
    supported: dict[Way, bool] = {"plain": True, "onednn": _has_onednn(), "panels": kernels.library() is not None}
    return [way for way, is_supported in supported.items() if is_supported]


def prepacked(weights: Sequence[Tensor], way: Way) -> list[Tensor]:
    """Weights [outputs, inner] float32, packed for this way; panels are contiguous."""
    if way == "panels":
        width = kernels.panel_width()
        pages = LargePages(sum((len(weight) + -len(weight) % width) * weight.shape[1] * 4 for weight in weights))
        return [kernels.panels(weight, pages) for weight in weights]
    return [torch.ops.mkldnn._reorder_linear_weight(weight) if way == "onednn" else weight for weight in weights]


def product(x: Tensor, way: Way, weight: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    """x [..., inner] float32 times a packed weight: [..., outputs]."""
    if way == "panels":
        output = torch.ops.outrider.multiply(x.contiguous(), weight, outputs)
        return output if bias is None else output + bias
    if way == "onednn":
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@torch.inference_mode()
def _fastest(layers: Sequence[nn.Linear]) -> Way:
    """The fastest way for a plain step and a verification, timed on some of these layers."""
    shapes = sorted(Counter(tuple(layer.weight.shape) for layer in layers).items())
    possible = ways()
    if len(possible) == 1:
        return "plain"
    sizes = itertools.accumulate(layer.weight.nbytes for layer in layers)
    sample = [layer.weight for layer, size in zip(layers, sizes, strict=True) if size <= SAMPLE_BYTES]
    sample = sample or [layers[0].weight]
    widths = {each.shape[1] for each in sample}  # a layer tied to another's weight may be wider than it claims
    inputs = {(rows, width): torch.ones(rows, width) for rows in SAMPLE_ROWS for width in widths}

    def multiply(way: Way, weights: Sequence[Tensor]) -> None:
        for rows in SAMPLE_ROWS:
            for each, weight in zip(sample, weights, strict=True):
                product(inputs[rows, each.shape[1]], way, weight, each.shape[0])

    def runs() -> dict[str, Callable[[], object]]:
        return {way: functools.partial(multiply, way, prepacked(sample, way)) for way in possible}

    return machine.fastest(f"float32 products of linear layers {shapes}: {possible}", runs)  # type: ignore[return-value]


@functools.cache
def _has_onednn() -> bool:
    """Whether torch, with its current settings, can multiply by oneDNN's packed weights."""
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            return False
        x, weight = torch.rand(2, 8), torch.rand(4, 8)
        [packed] = prepacked([weight], "onednn")
        return torch.allclose(product(x, "onednn", packed, 4), F.linear(x, weight))
    except (AttributeError, RuntimeError):  # the operators are not public
        return False
