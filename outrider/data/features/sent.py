"""Features that another process reads: some processes of a training have the target, the others train.

A trainer asks for the states of its next batch's texts before it learns from this one's, so the target reads while the
drafter trains.  A request is the number of a source and of its texts; the answer has no header, since both sides know
the lengths of texts, the taps and the number type.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from outrider.data.batches import OfTexts
from outrider.data.features.live import LiveFeatures
from outrider.data.features.shards import Stored
from outrider.data.packing import Rows
from outrider.nn.draft_model import Batch

DONE, STOPPED = -1, -2
"""In place of a source's number: the trainer has ended, or was asked to stop."""


class Link:
    """From one trainer to the process that reads for it."""

    def __init__(self, reader: int, most: int, control: Any):
        """reader: its rank.  most: texts of one request.  control: a process group on the CPU, of all processes."""
        self.reader, self.most, self._control = reader, most, control
        self._asked: tuple[int, list[int], list[Tensor], list[Any]] | None = None

    def ask(self, source: int, texts: Sequence[int], shapes: Sequence[tuple[int, ...]], like: Tensor) -> None:
        """Ask for the states of these texts, of these shapes and of the type and device of `like`."""
        self._send(source, texts)
        parts = [like.new_empty(shape) for shape in shapes]
        waits = [distributed.irecv(part, self.reader) for part in parts]
        self._asked = source, list(texts), parts, waits

    def take(self, source: int, texts: Sequence[int]) -> list[Tensor] | None:
        """What was asked for; None where that was something else, which is lost."""
        if self._asked is None:
            return None
        what, self._asked = self._asked, None
        for wait in what[3]:
            wait.wait()
        return what[2] if what[:2] == (source, list(texts)) else None

    def close(self, is_stopped: bool = False) -> None:
        """Say that nothing more is asked for."""
        self.take(DONE, ())
        self._send(STOPPED if is_stopped else DONE, ())

    def _send(self, source: int, texts: Sequence[int]) -> None:
        request = torch.zeros(2 + self.most, dtype=torch.int64)
        request[: 2 + len(texts)] = torch.tensor([source, len(texts), *texts])
        distributed.send(request, self.reader, group=self._control)


class SentFeatures(OfTexts):
    """Batches as `LiveFeatures` gives them, with states from the link's reader, one batch ahead."""

    def __init__(self, described: LiveFeatures, number: int, link: Link):
        """described: the same texts, of which this process reads no states.  number: of this source."""
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
        self._next = self._own_texts([[i] for i in self.order.chosen(step + 1)])
        return super().batch(step)

    def packed(self, steps: range) -> Iterator[Batch]:
        batches = self.order.packed(steps)
        following = self.order.packed(range(steps.stop, steps.stop + len(steps)))
        for rows, after in zip(batches, [*batches[1:], following[0]], strict=True):
            self._next = self._own_texts(after)
            yield self._joined(rows)

    def _own_texts(self, rows: Rows) -> list[int]:
        return [i for row in rows[self.own_rows(len(rows))] for i in row]

    def _states(self, texts: Sequence[int]) -> dict[int, Stored]:
        found = self._link.take(self.number, texts)
        if found is None:  # the first batch, or one that is read again
            self._ask(texts)
            found = self._link.take(self.number, texts)
        assert found is not None
        if self._next:
            self._ask(self._next)
        lengths = [int(self.described.texts.lengths[i]) for i in texts]
        taps, hidden = (part.to(self.target.device).split(lengths) for part in found)
        return {i: Stored(taps[n], hidden[n], None) for n, i in enumerate(texts)}

    def _ask(self, texts: Sequence[int]) -> None:
        tokens = sum(int(self.described.texts.lengths[i]) for i in texts)
        hidden = self.target.spec.hidden
        like = torch.empty(0, dtype=self.described.states_dtype, device=_wire(self.target.device))
        self._link.ask(self.number, texts, [(tokens, len(self.taps), hidden), (tokens, hidden)], like)


class Request(NamedTuple):
    """What a trainer asks for."""

    trainer: int
    source: int
    texts: list[int]


def serve(sources: Sequence[LiveFeatures], trainers: Sequence[int], most: int, control: Any) -> None:
    """Read the target for these trainers until all have ended.

    most, control: as in `Link`.  Raises KeyboardInterrupt where they were asked to stop, and RuntimeError where one of
    them is gone.
    """
    requests: queue.SimpleQueue[Request | RuntimeError] = queue.SimpleQueue()
    for trainer in trainers:  # a receive from any of them would wait for ever where one has died
        threading.Thread(target=_listen, args=(trainer, most, control, requests), daemon=True).start()
    left, is_stopped = len(trainers), False
    while left:
        request = requests.get()
        if isinstance(request, RuntimeError):
            raise request
        if request.source < 0:
            left, is_stopped = left - 1, is_stopped or request.source == STOPPED
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
    """Where states are sent from and received: on the GPU by NCCL, else on the CPU."""
    return device if distributed.get_backend() == "nccl" else torch.device("cpu")
