"""Linear layers whose weights lie in the order in which oneDNN reads them, where that is measured to be faster.

torch gives float32 products on a CPU to MKL, which on some CPUs is slow with the few rows of a decoding step: one to eight
rows through the demo target's weights take 4.3 to 5.5 ms, packed 3 to 4.  On others, and for weights that fill the memory, it
is the other way round, so both are timed on a few of the model's own layers.
The packed copy takes as much memory as the weights.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import machine

MOST_BYTES = 2**31
"""Models with more weights than this are left as they are: the copy would cost more memory than the time is worth."""


SAMPLE_BYTES = 2**26
"""Weights on which the two ways are timed: more than most caches hold."""
SAMPLE_ROWS = (1, 8)


def is_possible() -> bool:
    """Whether this torch can multiply by packed weights, as it is set now."""
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            return False
        x, weight = torch.rand(2, 8), torch.rand(4, 8)
        return torch.allclose(_product(x, _packed(weight), None), F.linear(x, weight))
    except (AttributeError, RuntimeError):  # the operators are torch's own, but not promised
        return False


def pack(model: nn.Module) -> None:
    """Give the linear layers of `model` packed weights, used while `products` is open; else they are as they were.

    Nothing changes where that is not faster.  A layer whose weight changes afterwards multiplies the usual way again.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
    if not layers or sum(layer.weight.nbytes for layer in layers) > MOST_BYTES or not is_possible() or not _is_faster(layers):
        return
    for layer in layers:
        _weights[layer] = _packed(layer.weight.detach()), _stamp(layer)
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


@contextmanager
def products() -> Iterator[None]:
    """While this is open, layers with packed weights use them in this thread."""
    token = _is_open.set(True)
    try:
        yield
    finally:
        _is_open.reset(token)


def is_open() -> bool:
    """Whether `products` is open in this thread."""
    return _is_open.get()


_is_open: ContextVar[bool] = ContextVar("is_open", default=False)
_weights: WeakKeyDictionary[nn.Linear, tuple[Tensor, tuple[int, int]]] = WeakKeyDictionary()
"""Packed weights, and what was packed.  Not kept in the layers: they could not be copied or saved any more."""


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    usual = not is_open() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    weight, stamp = _weights.get(layer, (None, None))
    if usual or x.dtype != torch.float32 or not x.numel() or weight is None or stamp != _stamp(layer):
        return F.linear(x, layer.weight, layer.bias)
    return _product(x, weight, layer.bias)


@torch.inference_mode()
def _is_faster(layers: Sequence[nn.Linear]) -> bool:
    """Whether a plain step and a verification read these layers faster packed, by timing some of them."""
    shapes = sorted(Counter(tuple(layer.weight.shape) for layer in layers).items())

    def multiply(product: Callable[[Tensor, Tensor], Tensor], weights: Sequence[Tensor]) -> None:
        for rows in SAMPLE_ROWS:
            for layer, weight in zip(sample, weights, strict=True):
                product(inputs[rows, layer.weight.shape[1]], weight)

    def ways() -> dict[str, Callable[[], object]]:
        plain = [layer.weight for layer in sample]
        return {
            "plain": functools.partial(multiply, F.linear, plain),
            "packed": functools.partial(multiply, lambda x, weight: _product(x, weight, None), list(map(_packed, plain))),
        }

    sizes = list(itertools.accumulate(layer.weight.nbytes for layer in layers))
    sample = [layer for layer, size in zip(layers, sizes, strict=True) if size <= SAMPLE_BYTES] or layers[:1]
    # tied to another's weight, a layer may be wider than it says
    widths = {layer.weight.shape[1] for layer in sample}
    inputs = {(rows, width): torch.ones(rows, width) for rows in SAMPLE_ROWS for width in widths}
    return machine.fastest(f"float32 products of linear layers {shapes}", ways) == "packed"


def _fits(layer: nn.Linear) -> bool:
    # a quantised weight's copy would be float32 again, four times what it takes
    if type(layer.weight) is not nn.Parameter or layer.weight.dtype != torch.float32 or layer.weight.device.type != "cpu":
        return False
    own = vars(layer).get("forward")
    if own is None:
        return True
    # one of ours is made anew once its weight has changed; others' stays
    is_ours = isinstance(own, functools.partial) and own.func is _forward
    return is_ours and _weights.get(layer, (None, None))[1] != _stamp(layer)


def _stamp(layer: nn.Linear) -> tuple[int, int]:
    return layer.weight.data_ptr(), layer.weight._version


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
