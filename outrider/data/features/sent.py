"""Features sent by another process: some processes of a training run the target (readers), the others train (trainers).

A trainer requests the states of its next batch before it trains on the current one, so both run at the same time.  A
request is the number of a source and of its texts; the response has no header, since both sides know the lengths of the
texts, the taps and the number type.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from outrider.data.batches import TextFeatures
from outrider.data.features.live import LiveFeatures
from outrider.data.features.shards import TextStates
from outrider.data.packing import Rows
from outrider.nn.draft_model import Batch

DONE, STOPPED = -1, -2
"""Sent in place of a source's number when the trainer has finished or was interrupted."""


class PendingStates(NamedTuple):
    """A request in flight."""

    source: int
    texts: list[int]
    states: list[Tensor]
    receives: list[Any]


class Link:
    """The connection of a trainer to its reader."""

    def __init__(self, reader: int, most: int, control: Any):
        """reader: its rank.  most: maximum texts per request.  control: a CPU process group of all processes."""
        self.reader, self.most, self._control = reader, most, control
        self._pending: PendingStates | None = None

    def request(self, source: int, texts: Sequence[int], shapes: Sequence[tuple[int, ...]], like: Tensor) -> None:
        """Request the states of these texts, of these shapes and with the type and device of `like`."""
        self._send(source, texts)
        states = [like.new_empty(shape) for shape in shapes]
        receives = [distributed.irecv(part, self.reader) for part in states]
        self._pending = PendingStates(source, list(texts), states, receives)

    def take(self, source: int, texts: Sequence[int]) -> list[Tensor] | None:
        """Wait for the pending states; None if they belong to other texts, in which case they are dropped."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return None
        for receive in pending.receives:
            receive.wait()
        return pending.states if (pending.source, pending.texts) == (source, list(texts)) else None

    def close(self, is_stopped: bool = False) -> None:
        """Tell the reader that there are no more requests."""
        self.take(DONE, ())
        self._send(STOPPED if is_stopped else DONE, ())

    def _send(self, source: int, texts: Sequence[int]) -> None:
        request = torch.zeros(2 + self.most, dtype=torch.int64)
        request[: 2 + len(texts)] = torch.tensor([source, len(texts), *texts])
        distributed.send(request, self.reader, group=self._control)


class SentFeatures(TextFeatures):
    """The batches of `LiveFeatures`, with states requested from a reader one batch in advance."""

    def __init__(self, described: LiveFeatures, number: int, link: Link):
        """described: the same texts; its target is not run in this process.  number: of this source."""
        self.described, self.number, self._link = described, number, link
        self.order, self.target, self.taps, self.manifest = (
            described.order, described.target, described.taps, described.manifest,
        )  # fmt: skip
        self.ngram_hashes, self.left_out, self.texts = described.ngram_hashes, described.left_out, described.texts
        self.is_cached, self.bytes, self.disk_bytes = False, described.bytes, 0
        self._next: list[int] = []

    @property
    def place(self) -> str:
        """Where the features come from."""
        return f"process {self._link.reader}"

    def batch(self, step: int) -> Batch:
        self._next = self._texts_of([[i] for i in self.order.chosen(step + 1)])
        return super().batch(step)

    def packed(self, steps: range) -> Iterator[Batch]:
        batches = self.order.packed(steps)
        following = self.order.packed(range(steps.stop, steps.stop + len(steps)))
        for rows, after in zip(batches, [*batches[1:], following[0]], strict=True):
            self._next = self._texts_of(after)
            yield self._joined(rows)

    def _texts_of(self, rows: Rows) -> list[int]:
        return [i for row in rows[self.own_rows(len(rows))] for i in row]

    def states(self, texts: Sequence[int]) -> dict[int, TextStates]:
        received = self._link.take(self.number, texts)
        if received is None:  # the first batch, or one that is read again
            self._request(texts)
            received = self._link.take(self.number, texts)
        assert received is not None
        if self._next:
            self._request(self._next)
        lengths = [int(self.described.texts.lengths[i]) for i in texts]
        taps, hidden = (part.to(self.target.device).split(lengths) for part in received)
        return {i: TextStates(taps[n], hidden[n], None) for n, i in enumerate(texts)}

    def _request(self, texts: Sequence[int]) -> None:
        tokens = sum(int(self.described.texts.lengths[i]) for i in texts)
        hidden = self.target.spec.hidden
        like = torch.empty(0, dtype=self.described.states_dtype, device=_wire(self.target.device))
        self._link.request(self.number, texts, [(tokens, len(self.taps), hidden), (tokens, hidden)], like)


class Request(NamedTuple):
    """A trainer's request for states."""

    trainer: int
    source: int
    texts: list[int]


def serve(sources: Sequence[LiveFeatures], trainers: Sequence[int], most: int, control: Any) -> None:
    """Run the target for these trainers until all have finished.

    most, control: as in `Link`.  Raises KeyboardInterrupt if a trainer was interrupted, and RuntimeError if one has
    died.
    """
    requests: queue.SimpleQueue[Request | RuntimeError] = queue.SimpleQueue()
    for trainer in trainers:  # one thread each: receiving from whichever is first would hang if one had died
        threading.Thread(target=_listen, args=(trainer, most, control, requests), daemon=True).start()
    num_active, is_stopped = len(trainers), False
    while num_active:
        request = requests.get()
        if isinstance(request, RuntimeError):
            raise request
        if request.source < 0:
            num_active -= 1
            is_stopped = is_stopped or request.source == STOPPED
            continue
        source = sources[request.source]
        states, device = source.states(request.texts), _wire(source.target.device)
        for name in ("taps", "hidden"):
            parts = [getattr(states[i], name).to(device, source.states_dtype) for i in request.texts]
            distributed.send(torch.cat(parts).contiguous(), request.trainer)
    if is_stopped:
        raise KeyboardInterrupt


def _listen(trainer: int, most: int, control: Any, requests: queue.SimpleQueue[Request | RuntimeError]) -> None:
    while True:
        message = torch.zeros(2 + most, dtype=torch.int64)
        try:
            distributed.recv(message, trainer, group=control)
        except RuntimeError as error:
            requests.put(error)
            return
        source, count, *texts = message.tolist()
        requests.put(Request(trainer, source, texts[:count]))
        if source < 0:
            return


def _wire(device: torch.device) -> torch.device:
    """The device on which states are sent and received: the GPU with NCCL, otherwise the CPU."""
    return device if distributed.get_backend() == "nccl" else torch.device("cpu")
