"""A stand-in for CUDA graphs on machines without a GPU: a step's operations, recorded and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default}
"""Operations with which the host reads a tensor and thus waits for it."""


class HostRead(AssertionError):
    """A step let the host read a tensor, which a graph can't contain."""


class Recording(TorchDispatchMode):
    """Records like CUDA graphs: the function runs twice, then its operations and the tensors they read and wrote are
    stored.

    A replay runs none of our Python: every operation reads and writes the same memory as when it was recorded.  A
    function that lets the host read a tensor raises HostRead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded = self.replayed = 0
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            raise HostRead(f"the host reads a tensor in the step: {function}")
        found = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in pytree.arg_tree_leaves(args) if is_tensor(tensor)}
        fresh = [one for one in pytree.tree_leaves(found) if one.untyped_storage().data_ptr() not in given]
        if fresh or function._schema.is_mutable:  # the others are views
            self.calls.append((function, args, kwargs or {}, fresh))
        return found

    def __call__(self, function: Any) -> tuple[Any, Sequence[Any]]:
        """Like `fast.gpu.cuda_graphs.Recorder`."""
        self.recorded, self.calls = self.recorded + 1, []
        function()
        with self:
            outputs = function()
        calls = self.calls

        def replay() -> None:
            self.replayed += 1
            for operation, args, kwargs, fresh in calls:
                found = pytree.tree_leaves(operation(*args, **kwargs))
                for there, here in zip(fresh, found if fresh else (), strict=True):
                    there.copy_(here)

        return replay, outputs
