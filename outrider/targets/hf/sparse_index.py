"""Sparse attention that chooses its keys by a score, the same keys in a pass of any shape.

An index of keys (DeepSeek-V3.2, GLM, Hunyuan) adds up products that a ReLU has cut off at 0, so many keys score exactly
0.  `topk` takes any of those that are equal, others in every shape of a pass, and then a text hangs on how it was
batched, in `generate` as here.  In a loaded model an index takes the earliest of equal keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.targets.hf import hooks


def choose_earliest(model: nn.Module) -> None:
    """Have every index of this model's keys take the earliest among keys of equal score."""
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):  # what transformers calls all of them
            hooks.wrap(module, _with_earliest)


def _with_earliest(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Earliest():
        return forward(*args, **kwargs)


class _Earliest(TorchFunctionMode):
    """While this is open in a thread, `topk` takes the first of equal values."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        chosen = earliest if function in (torch.topk, Tensor.topk) else function
        return chosen(*args, **kwargs or {})


def earliest(input: Tensor, k: int, dim: int = -1) -> Any:
    """As `torch.topk`, in which the first of equal values counts as the largest."""
    values, indices = input.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
