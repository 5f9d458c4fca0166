"""Memory on large pages, where the system has them: far fewer addresses to translate while weights are read."""

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
    """Room for tensors that are read one after the other, and lie so."""

    def __init__(self, size: int):
        """size: bytes of all tensors at most; what is never written takes no memory."""
        self._room = _mapped(size) if size >= PAGE else None
        self._end = 0

    def stored(self, values: Tensor) -> Tensor:
        """A contiguous copy behind the one before; anywhere where there is no such room."""
        begin, size = self._end, values.numel() * values.itemsize
        if self._room is None or begin + size > len(self._room):
            return values.clone(memory_format=torch.contiguous_format)
        self._end = begin + size + -size % LINE
        return self._room[begin : begin + size].view(values.dtype).view(values.shape).copy_(values)

    def taken(self, size: int) -> Tensor:
        """Zeros uint8 [size] behind the one before, a view; anywhere where there is no such room."""
        begin = self._end
        if self._room is None or begin + size > len(self._room):
            return torch.zeros(size, dtype=torch.uint8)
        self._end = begin + size + -size % LINE
        return self._room[begin : begin + size]


def _mapped(size: int) -> Tensor | None:
    """Bytes that begin where a large page does; None where the system has none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:  # private memory: few systems have large pages of shared memory
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :]
