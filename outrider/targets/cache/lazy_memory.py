"""Memory that is reserved as address space and allocated page by page when it is written to.  On a CPU under Linux.

A slot of 8,192 tokens then takes only what its text has written, and nothing is copied as texts grow.  A text's memory
is released when it ends, and reads as zeros again.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

NORESERVE = 0x4000
"""Linux's MAP_NORESERVE (in `mmap` since Python 3.13): address space does not count as memory."""


def comes_by_page(device: torch.device) -> bool:
    """Whether memory of this device can be allocated page by page."""
    return device.type == "cpu" and _overcommits()


@functools.cache
def _overcommits() -> bool:
    """Whether the system reserves address space without counting it as memory."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:  # not Linux
        return False


class Pages:
    """The memory of one tensor."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        """A tensor of zeros, none of it allocated yet."""
        size = math.prod(shape) * dtype.itemsize
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
        # a huge page is as large as a whole slot of one head, and the first token would allocate it
        self.map.madvise(mmap.MADV_NOHUGEPAGE)
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self.map, dtype=dtype, count=math.prod(shape)).view(*shape)

    def give_back(self, part: Tensor) -> None:
        """Release a contiguous part of the tensor, except pages shared with other parts; it then reads as zeros."""
        assert part.is_contiguous()
        begin = part.data_ptr() - self.tensor.data_ptr()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (begin + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            self.map.madvise(mmap.MADV_DONTNEED, first, end - first)
