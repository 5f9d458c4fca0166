"""Linear layers whose weights lie in the order in which oneDNN reads them.

torch gives float32 products on a CPU to MKL, which on AMD's CPUs is slow with the few rows of a decoding step: one to eight
rows through the demo target's weights take 4.3 to 5.5 ms, packed 3 to 4.  The packed copy takes as much memory as the weights.
Elsewhere, and for other types, nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_BYTES = 2**31
"""Models with more weights than this are left as they are: the copy would cost more memory than the time is worth."""


@functools.cache
def helps() -> bool:
    """Whether this is a machine on which the usual way is slow, and this torch can do otherwise."""
    try:
        is_slow = torch.backends.mkl.is_available() and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
        if not is_slow or not torch.backends.mkldnn.is_available():
            return False
        x, weight = torch.rand(2, 8), torch.rand(4, 8)
        return torch.allclose(_product(x, _packed(weight), None), F.linear(x, weight))
    except (OSError, AttributeError, RuntimeError):  # the operators are torch's own, but not promised
        return False


def pack(model: nn.Module) -> None:
    """Give the linear layers of `model` packed weights, used while `products` is open; else they are as they were.

    A layer whose weight changes afterwards multiplies the usual way again.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
    if not helps() or sum(layer.weight.nbytes for layer in layers) > MOST_BYTES:
        return
    for layer in layers:
        _weights[layer] = _packed(layer.weight.detach()), _stamp(layer)
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


@contextmanager
def products() -> Iterator[None]:
    """While this is open, layers with packed weights use them."""
    global _is_open
    before, _is_open = _is_open, True
    try:
        yield
    finally:
        _is_open = before


_is_open = False
_weights: WeakKeyDictionary[nn.Linear, tuple[Tensor, tuple[int, int]]] = WeakKeyDictionary()
"""Packed weights, and what was packed.  Not kept in the layers: they could not be copied or saved any more."""


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    usual = not _is_open or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    weight, stamp = _weights.get(layer, (None, None))
    if usual or x.dtype != torch.float32 or not x.numel() or weight is None or stamp != _stamp(layer):
        return F.linear(x, layer.weight, layer.bias)
    return _product(x, weight, layer.bias)


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
