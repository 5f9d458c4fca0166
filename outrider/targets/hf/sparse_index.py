"""Makes sparse attention that selects keys by score select the same keys in passes of any shape.

An indexer (DeepSeek-V3.2, GLM, Hunyuan) sums products after a ReLU, so many keys score exactly 0.  `topk` breaks ties
arbitrarily, depending on the shape of the pass, so the text depends on its batch, even in `generate`.  In a loaded
model, the indexer selects the earliest of tied keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.targets.hf import hooks


def choose_earliest(model: nn.Module) -> None:
    """Make every indexer of this model select the earliest among keys with equal scores."""
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):  # transformers' name for all of them
            hooks.wrap(module, _with_earliest)


def _with_earliest(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Earliest():
        return forward(*args, **kwargs)


class _Earliest(TorchFunctionMode):
    """Within this mode, `topk` selects the first of equal values in this thread."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        chosen = earliest if function in (torch.topk, Tensor.topk) else function
        return chosen(*args, **kwargs or {})


def earliest(input: Tensor, k: int, dim: int = -1) -> Any:
    """Like `torch.topk`, with the first of equal values first."""
    values, indices = input.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
