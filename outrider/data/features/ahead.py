"""The next batch is made while this one trains: in a thread of its own, and on a GPU in a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields

import torch
from torch import Tensor

from outrider.nn.draft_model import Batch

Key = tuple[range, int | None]
"""Steps, and which of their packed batches; None for one step's padded batch."""
Made = tuple[Batch, "torch.cuda.Event | None"]
"""A batch, and what a GPU has done when it is there."""


class Ahead:
    """Makes batches one after the other, each while the one before it trains."""

    def __init__(self, make: Callable[[Key], Batch], device: torch.device):
        """make: gives a batch, the same whenever it is asked; always called in one thread."""
        self._make, self._device = make, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, "batches")
        self._next: tuple[Key, Future[Made]] | None = None
        self.waited_s = 0.0
        """Seconds that training stood still for batches."""

    def batch(self, step: int) -> Batch:
        """The padded batch of this step; that of the next one is begun."""
        return self._take((range(step, step + 1), None), (range(step + 1, step + 2), None))

    def packed(self, steps: range, count: int) -> Iterator[Batch]:
        """The `count` packed batches of these steps; after each the following one is begun."""
        after = range(steps.stop, steps.stop + len(steps))
        for number in range(count):
            yield self._take((steps, number), (steps, number + 1) if number + 1 < count else (after, 0))

    def close(self) -> None:
        """Make no more."""
        self._pool.shutdown(cancel_futures=True)

    def _take(self, key: Key, following: Key) -> Batch:
        began = time.monotonic()
        coming, self._next = self._next, None
        if coming is None or coming[0] != key:
            coming = key, self._pool.submit(self._made, key)
        found, is_there = coming[1].result()
        if is_there is not None:
            _hand_over(found, is_there, torch.cuda.current_stream(self._device))
        self.waited_s += time.monotonic() - began
        self._next = following, self._pool.submit(self._made, following)
        return found

    @torch.no_grad()
    def _made(self, key: Key) -> Made:
        with torch.cuda.stream(self._stream):  # of None: nothing
            found = self._make(key)
            return found, None if self._stream is None else self._stream.record_event()


def _hand_over(batch: Batch, is_there: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Let a stream use what another one made: it waits, and the memory is not given away before it has used it."""
    stream.wait_event(is_there)
    for part in (batch, batch.whole):
        for value in (getattr(part, field.name) for field in fields(part)):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
