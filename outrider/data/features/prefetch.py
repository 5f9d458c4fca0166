"""The next batch is prepared while the current one trains, in a background thread and, on a GPU, on a separate
stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields

import torch
from torch import Tensor

from outrider.nn.draft_model import Batch

BatchKey = tuple[range, int | None]
"""Steps and the index of one of their packed batches; None for a single step's padded batch."""
PreparedBatch = tuple[Batch, "torch.cuda.Event | None"]
"""A batch, and on a GPU the event that marks its completion."""


class Prefetcher:
    """Prepares each batch while the previous one trains."""

    def __init__(self, make: Callable[[BatchKey], Batch], device: torch.device):
        """make: returns the batch of a key, always the same one; called in a background thread."""
        self._make, self._device = make, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, "batches")
        self._next: tuple[BatchKey, Future[PreparedBatch]] | None = None
        self.waited_s = 0.0
        """Seconds that training waited for batches."""

    def batch(self, step: int) -> Batch:
        """The padded batch of this step; starts preparing that of the next step."""
        return self._take((range(step, step + 1), None), (range(step + 1, step + 2), None))

    def packed(self, steps: range, count: int) -> Iterator[Batch]:
        """The `count` packed batches of these steps; starts preparing the one after each."""
        after = range(steps.stop, steps.stop + len(steps))
        for number in range(count):
            yield self._take((steps, number), (steps, number + 1) if number + 1 < count else (after, 0))

    def close(self) -> None:
        """Stop preparing batches."""
        self._pool.shutdown(cancel_futures=True)

    def _take(self, key: BatchKey, following: BatchKey) -> Batch:
        began = time.monotonic()
        prepared, self._next = self._next, None
        if prepared is None or prepared[0] != key:
            prepared = key, self._pool.submit(self._prepare, key)
        batch, ready = prepared[1].result()
        if ready is not None:
            _hand_over(batch, ready, torch.cuda.current_stream(self._device))
        self.waited_s += time.monotonic() - began
        self._next = following, self._pool.submit(self._prepare, following)
        return batch

    @torch.no_grad()
    def _prepare(self, key: BatchKey) -> PreparedBatch:
        with torch.cuda.stream(self._stream):  # no effect with None
            batch = self._make(key)
            return batch, None if self._stream is None else self._stream.record_event()


def _hand_over(batch: Batch, ready: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Make `stream` wait for a batch of another stream, and keep its memory from being reused before that."""
    stream.wait_event(ready)
    for part in (batch, batch.whole):
        for value in (getattr(part, field.name) for field in fields(part)):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
