"""A pass captured once for each of a few sizes and replayed: a CUDA graph saves the launches of hundreds of kernels.

A pass is padded to the next size: tokens a row to a short list, columns to a multiple of `COLUMNS`.  No row that is
read attends to padding.  A size is captured when it first comes; a replay reads its arguments where the capture read
them, and writes keys and values into the same buffers.

R rows of a pass, n tokens a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outrider.fast import flat
from outrider.targets.cache.slots import COLUMNS
from outrider.targets.hf import gpu_attention

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Tokens a row that are captured; above them multiples of the last."""

Outputs = Sequence[Tensor | list[Tensor]]
Recorder = Callable[[Callable[[], Outputs]], tuple[Callable[[], object], Outputs]]
"""From a function that reads fixed tensors to (what runs it again, the tensors that hold its results)."""


_newest: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None
"""A weak reference to the graph that was captured last."""


def cuda_graph(function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
    """The recorder of a GPU.

    Captures share memory: one runs at a time, and what one returned is not given to another.
    """
    global _newest
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # shared memory lives as long as one graph of it; a number of memory that is gone must not be used again
    before, graph = _newest(), torch.cuda.CUDAGraph()
    with gpu_attention.sizes_are_few():
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose their kernels in the first run, which can't be captured
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=None if before is None else before.pool()):
            outputs = function()
    _newest = weakref.ref(graph)
    return graph.replay, outputs


_Layout = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
_Key = tuple[int, int, int, int, int]
"""Rows, tokens a row, columns, taps, and the number of the buffers' layouts."""

MAX_CAPTURES = 48
"""Captures that are stored; then all are dropped, since sizes that come again are captured in a fraction of a
second."""


class _Capture(NamedTuple):
    arguments: tuple[Tensor, ...]
    """Tokens, depths, tree_mask, starts and taps, where the replay reads them."""
    fixed: tuple[Tensor, ...]
    """Columns and tokens asked for: the replay reads their memory too, and a graph does not hold on to it."""
    replay: Callable[[], object]
    outputs: list[Tensor]


class CudaGraphs:
    """Passes of one traced function, called by `forward` as a package is."""

    def __init__(self, traced: nn.Module, recorder: Recorder = cuda_graph):
        """traced: of tokens, depths, tree_mask, starts, columns, taps, asked and buffers; it must not look at their
        values."""
        self.traced, self.recorder = traced, recorder
        self.captures: dict[_Key, _Capture] = {}
        self._numbers: dict[tuple[_Layout, ...], int] = {}
        """A number for the layouts of all buffers of a pass."""
        self._ends: Callable[[], tuple[Tensor | None, Tensor | None]] = lambda: (None, None)
        """First and last of the buffers that came last, as long as they are there; `_number` is theirs."""
        self._number = -1

    def padded(self, width: int) -> int:
        """Tokens a row that a pass of `width` tokens writes."""
        return next((size for size in WIDTHS if size >= width), -(-width // WIDTHS[-1]) * WIDTHS[-1])

    def forward(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, starts: Tensor, columns: Tensor, taps: Tensor,
        logit_indices: Tensor, buffers: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """The traced pass's logits, hidden states, choice and taps for tokens [R, n]."""
        rows, width = tokens.shape
        wide = self.padded(width)
        arguments = _wide(tokens, wide), _wide(depths, wide), _wide_mask(tree_mask, wide), starts, taps
        end = min(buffers[0].shape[2], -(-(len(columns) + wide - width) // COLUMNS) * COLUMNS)
        key = rows, wide, end, len(taps), self._number_of(buffers)
        if key not in self.captures:
            if len(self.captures) >= MAX_CAPTURES:
                self.captures.clear()
            self.captures[key] = self._recorded(arguments, end, buffers)
        capture = self.captures[key]
        torch._foreach_copy_(capture.arguments, arguments)  # a launch for each type of number
        capture.replay()
        # the next replay overwrites them, and drafters hold on to what they were given
        return [output[:, :width].clone() for output in capture.outputs]

    def _number_of(self, buffers: Sequence[Tensor]) -> int:
        """The number of their layouts; a step's are mostly those of the step before."""
        first, last = self._ends()
        if first is not buffers[0] or last is not buffers[-1]:
            ends = weakref.ref(buffers[0]), weakref.ref(buffers[-1])
            self._ends = lambda: (ends[0](), ends[1]())
            self._number = self._numbers.setdefault(tuple(map(_layout, buffers)), len(self._numbers))
        return self._number

    def _recorded(self, arguments: tuple[Tensor, ...], end: int, buffers: Sequence[Tensor]) -> _Capture:
        there = tuple(argument.clone() for argument in arguments)
        *before, taps = there
        tokens, device = there[0], there[0].device
        # every token's logits, always
        logit_indices = torch.arange(tokens.shape[1], device=device).expand_as(tokens).contiguous()
        columns = torch.arange(end, device=device)
        replay, outputs = self.recorder(lambda: self.traced(*before, columns, taps, logit_indices, list(buffers)))
        return _Capture(there, (columns, logit_indices), replay, flat(outputs))


def _layout(buffer: Tensor) -> _Layout:
    """A buffer's address and shape.  An allocator may give a cache of another shape the same address."""
    return buffer.data_ptr(), tuple(buffer.shape), buffer.stride(), buffer.dtype


def _wide(tokens: Tensor, wide: int) -> Tensor:
    """tokens [R, n] with zeros up to `wide` a row."""
    return tokens if tokens.shape[1] == wide else pad(tokens, (0, wide - tokens.shape[1]))


def _wide_mask(tree_mask: Tensor, wide: int) -> Tensor:
    """tree_mask [R, n, n] for `wide` tokens a row: tokens that are added attend to themselves, no other attends to
    them."""
    more = wide - tree_mask.shape[-1]
    if not more:
        return tree_mask
    alone = torch.eye(wide, dtype=torch.bool, device=tree_mask.device)
    return pad(tree_mask, (0, more, 0, more)) | (alone & (torch.arange(wide, device=tree_mask.device) >= wide - more))
