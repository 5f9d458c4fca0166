"""Captures of a whole step of a batch, one for each number of columns (a multiple of `COLUMNS`) and of verified nodes.

Everything else that a step depends on is in fixed tensors, or in the `Kind` of the live requests.  B slots, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.fast.gpu import cuda_graphs
from outrider.fast.gpu.cuda_graphs import Outputs, Recorder
from outrider.fast.static.step import StaticStep
from outrider.kernels import prepacked

MAX_CAPTURES = 16
"""Maximum number of stored captures of a batch; texts grow, so older ones are rarely used again."""
WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Captured numbers of verified nodes, besides a whole draft."""


def rerunning(function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
    """The recorder for devices without graphs: runs the function again into the same outputs."""
    outputs = function()

    def replay() -> None:
        for there, here in zip(outputs, function(), strict=True):
            there.copy_(here)  # type: ignore[union-attr, arg-type]

    return replay, outputs


class StepGraphs:
    """One step of a batch, captured for each size."""

    def __init__(self, parts: StaticStep, recorder: Recorder):
        self.parts, self.recorder, self.rows = parts, recorder, [*range(len(parts.slots.anchor))]
        self.captures: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}
        self._there: Tensor | None = None
        """Memory for packets on the host, pinned for a GPU."""
        self._sizes: list[int] = []

    def write_back(self) -> None:
        """Does nothing: every slot's tensors are always up to date."""

    @torch.inference_mode()
    def set_sizes(self, sizes: Sequence[int], rows: Sequence[int]) -> None:
        """Set how many nodes of these slots' drafts are verified."""
        every = [0] * len(self.rows)
        for row, size in zip(rows, sizes, strict=True):
            every[row] = size
        self.parts.draft.sizes.copy_(torch.tensor(every), non_blocking=True)

    @torch.inference_mode()
    @prepacked.enabled()
    def launch(self, columns: int, rows: Sequence[int], nodes: int) -> list[list[int]]:
        """Advance all slots, of which `rows` are live; returns their packets.  columns: length of their longest text
        with its verified nodes."""
        most = self.parts.drafter.nodes
        nodes = min(next((width for width in WIDTHS if width >= nodes), most), most)
        columns = self._open(columns + most)
        if (columns, nodes) not in self.captures:
            if len(self.captures) >= MAX_CAPTURES:
                self.captures.clear()
            self.captures[columns, nodes] = self._recorded(nodes)
        replay, packets = self.captures[columns, nodes]
        replay()
        if self._there is None:
            self._there = torch.empty(packets.shape, dtype=packets.dtype, pin_memory=packets.device.type == "cuda")
        packet: list[list[int]] = self._there.copy_(packets).tolist()
        return [packet[row] for row in rows]

    def _open(self, columns: int) -> int:
        columns = -(-columns // cuda_graphs.COLUMNS) * cuda_graphs.COLUMNS
        for there in self.parts.caches:
            there.open(columns, self.rows)
        sizes = [there.cache.stacks.columns for there in self.parts.caches]
        if sizes != self._sizes:  # a buffer that has grown has a new address
            self.captures.clear()
        self._sizes = sizes
        return columns

    def _recorded(self, nodes: int) -> tuple[Callable[[], object], Tensor]:
        """Record the step.  A recorder runs it, perhaps several times, so every slot's state is restored."""
        before = [tensor.clone() for tensor in self.parts.tensors]

        def run() -> list[Tensor | list[Tensor]]:
            return [self.parts(nodes)]

        replay, [packets] = self.recorder(run)
        for tensor, was in zip(self.parts.tensors, before, strict=True):
            tensor.copy_(was)
        assert isinstance(packets, Tensor)
        return replay, packets
