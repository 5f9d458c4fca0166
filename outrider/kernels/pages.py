"""Memory on large pages, if the system has them: far fewer address translations while weights are read."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2**21
"""Bytes of a large page."""
LINE = 64
"""Bytes of a cache line."""


class LargePages:
    """Memory for tensors that are read in sequence, and stored contiguously."""

    def __init__(self, size: int):
        """size: maximum bytes of all tensors; pages that are never written take no memory."""
        self._memory = _mapped(size) if size >= PAGE else None
        self._end = 0

    def stored(self, values: Tensor) -> Tensor:
        """A contiguous copy after the previous tensor, or elsewhere if there is no space left."""
        begin, size = self._end, values.numel() * values.itemsize
        if self._memory is None or begin + size > len(self._memory):
            return values.clone(memory_format=torch.contiguous_format)
        self._end = begin + size + -size % LINE
        return self._memory[begin : begin + size].view(values.dtype).view(values.shape).copy_(values)

    def taken(self, size: int) -> Tensor:
        """Zeros uint8 [size] after the previous tensor, as a view, or elsewhere if there is no space left."""
        begin = self._end
        if self._memory is None or begin + size > len(self._memory):
            return torch.zeros(size, dtype=torch.uint8)
        self._end = begin + size + -size % LINE
        return self._memory[begin : begin + size]


def _mapped(size: int) -> Tensor | None:
    """Bytes aligned to a large page; None if the system has none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:  # private memory: few systems have large pages for shared memory
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :]
