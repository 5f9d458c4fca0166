"""Passes captured for a few sizes and replayed: a CUDA graph saves the launches of hundreds of kernels.

A pass is padded to the next size: tokens per row to one of a short list, columns to a multiple of `COLUMNS`.  No real
row attends to padding.  A size is captured when it first occurs; a replay reads its arguments from the same memory, and
writes keys and values into the same buffers.

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
"""Captured numbers of tokens per row; beyond them, multiples of the last."""

Outputs = Sequence[Tensor | list[Tensor]]
Recorder = Callable[[Callable[[], Outputs]], tuple[Callable[[], object], Outputs]]
"""A function that reads fixed tensors → (a function that runs it again, the tensors with its results)."""


_newest: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None
"""A weak reference to the graph captured last."""


def cuda_graph(function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
    """The recorder for GPUs.

    Captures share memory: one runs at a time, and the results of one must not be passed to another.
    """
    global _newest
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # the shared pool lives as long as any of its graphs; the id of a freed pool must not be used again
    before, graph = _newest(), torch.cuda.CUDAGraph()
    with gpu_attention.sizes_are_few():
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose kernels in the first run, which can't be captured
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=None if before is None else before.pool()):
            outputs = function()
    _newest = weakref.ref(graph)
    return graph.replay, outputs


_Layout = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
_Key = tuple[int, int, int, int, int]
"""Rows, tokens per row, columns, taps, and the number of the buffers' layout."""

MAX_CAPTURES = 48
"""Maximum number of stored captures; after that, all are dropped, since recapturing a size takes a fraction of a
second."""


class _Capture(NamedTuple):
    arguments: tuple[Tensor, ...]
    """Tokens, depths, tree_mask, starts and taps, in the memory that the replay reads."""
    fixed: tuple[Tensor, ...]
    """Columns and logit indices: the replay also reads their memory, and a graph does not keep it alive."""
    replay: Callable[[], object]
    outputs: list[Tensor]


class CudaGraphs:
    """Passes of one traced function, called by `forward` like a package."""

    def __init__(self, traced: nn.Module, recorder: Recorder = cuda_graph):
        """traced: a function of tokens, depths, tree_mask, starts, columns, taps, logit_indices and buffers, without
        control flow on their values."""
        self.traced, self.recorder = traced, recorder
        self.captures: dict[_Key, _Capture] = {}
        self._numbers: dict[tuple[_Layout, ...], int] = {}
        """Number of each layout of all buffers of a pass."""
        self._ends: Callable[[], tuple[Tensor | None, Tensor | None]] = lambda: (None, None)
        """Weakly, the first and last buffer of the last pass, whose number is `_number`."""
        self._number = -1

    def padded(self, width: int) -> int:
        """Tokens per row that a pass of `width` tokens writes."""
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
        torch._foreach_copy_(capture.arguments, arguments)  # one launch per dtype
        capture.replay()
        # the next replay overwrites them, but drafters keep what they receive
        return [output[:, :width].clone() for output in capture.outputs]

    def _number_of(self, buffers: Sequence[Tensor]) -> int:
        """The number of their layout, which is usually that of the previous step."""
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
        # always the logits of every token
        logit_indices = torch.arange(tokens.shape[1], device=device).expand_as(tokens).contiguous()
        columns = torch.arange(end, device=device)
        replay, outputs = self.recorder(lambda: self.traced(*before, columns, taps, logit_indices, list(buffers)))
        return _Capture(there, (columns, logit_indices), replay, flat(outputs))


def _layout(buffer: Tensor) -> _Layout:
    """A buffer's address and shape, since a cache of another shape may get the same address."""
    return buffer.data_ptr(), tuple(buffer.shape), buffer.stride(), buffer.dtype


def _wide(tokens: Tensor, wide: int) -> Tensor:
    """tokens [R, n], padded with zeros to `wide` per row."""
    return tokens if tokens.shape[1] == wide else pad(tokens, (0, wide - tokens.shape[1]))


def _wide_mask(tree_mask: Tensor, wide: int) -> Tensor:
    """tree_mask [R, n, n] for `wide` tokens per row: added tokens attend to themselves, and no other token to them."""
    more = wide - tree_mask.shape[-1]
    if not more:
        return tree_mask
    alone = torch.eye(wide, dtype=torch.bool, device=tree_mask.device)
    return pad(tree_mask, (0, more, 0, more)) | (alone & (torch.arange(wide, device=tree_mask.device) >= wide - more))
