"""Several processes that train one model: their ranks, their communication, and which one writes.

A `Group` communicates over torch's process group, gloo on CPUs and NCCL on CUDA devices, between processes started by
torchrun or `accelerate launch`.  All of them take every step together and make the same decisions: local results are
gathered before anything depends on them.  Only the first process writes files.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from outrider.errors import ConfigError, OutriderError, TrainingError, first_line
from outrider.launcher import launched, local
from outrider.nn.sequence import Stripe
from outrider.processes import ALONE, Processes, Way, Weights, check_parts
from outrider.training.parallel.alive import Watch
from outrider.training.parallel.replicas import Replicas

T = TypeVar("T")
PATIENCE = timedelta(hours=2)
"""Timeout for waiting on a process that measures or writes; a dead process is noticed within seconds."""
HEADER_BYTES, SMALL_BYTES = 8, 2**12
"""Message format of a gather: size header, and payload that fits into the same call."""


class Group:
    """One of several processes.  Use `joined`."""

    def __init__(self, rank: int, count: int, control: Any, main: Any = None):
        """control: process group for small CPU data.  main: process group for weights and gradients; all processes by
        default."""
        self.rank, self.count, self.control = rank, count, control
        self._asks: Callable[[], bool] = lambda: False
        self._is_asked = False
        self.weights: Weights = Replicas(self.gather, main)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def lay_out(self, way: Way) -> None:
        if way == "fsdp":
            from outrider.training.parallel.shards import Shards  # importing it takes a second

            self.weights = Shards(self.gather)

    def gather(self, value: T) -> list[T]:
        gathered = [pickle.loads(each) for each in self._exchanged(pickle.dumps((value, self._asks())))]
        self._is_asked = any(asks for _, asks in gathered)
        return [theirs for theirs, _ in gathered]

    def trainers(self, readers: int) -> Group | None:
        """The group of training processes if the last `readers` run the target for them; None in the readers."""
        first = [*range(self.count - readers)]  # every process must create the groups
        main = distributed.new_group(first, timeout=PATIENCE)
        is_gloo = distributed.get_backend() == "gloo"
        control = main if is_gloo else distributed.new_group(first, backend="gloo", timeout=PATIENCE)
        return Group(self.rank, len(first), control, main) if self.rank in first else None

    def stripe(self, parts: int) -> Stripe | None:
        check_parts(self.count, parts)
        if parts == 1:
            return None
        first = self.rank - self.rank % parts
        ranks = [*range(first, first + parts)]
        group = distributed.new_group(ranks, timeout=PATIENCE, use_local_synchronization=True)
        return Stripe(self.rank % parts, parts, group)

    def agreed(self, asks: Callable[[], bool]) -> Callable[[], bool]:
        self._asks = asks
        return lambda: self._is_asked

    def _exchanged(self, payload: bytes) -> list[bytes]:
        """Every process's bytes, by rank; takes a single call if none has more than `SMALL_BYTES`."""
        size = SMALL_BYTES
        while True:
            sent = torch.zeros(HEADER_BYTES + size, dtype=torch.uint8)
            sent[:HEADER_BYTES] = torch.tensor([len(payload)]).view(torch.uint8)
            taken = min(size, len(payload))
            sent[HEADER_BYTES : HEADER_BYTES + taken] = torch.frombuffer(bytearray(payload[:taken]), dtype=torch.uint8)
            received = [torch.empty_like(sent) for _ in range(self.count)]
            distributed.all_gather(received, sent, group=self.control)
            sizes = [int(each[:HEADER_BYTES].view(torch.int64)) for each in received]
            if max(sizes) <= size:
                return [
                    each[HEADER_BYTES : HEADER_BYTES + length].numpy().tobytes()
                    for each, length in zip(received, sizes, strict=True)
                ]
            size = max(sizes)

    def same(self, value: T) -> T:
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM here: the other processes stop and tell this one."""
    before: dict[int, Any] = {}
    with suppress(ValueError):  # not the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number_before, handler in before.items():
            signal.signal(number_before, handler)


def device_of(device: str | None) -> str | None:
    """The device of this process: a machine's GPUs are divided among its processes unless a specific one is named."""
    count = torch.cuda.device_count()
    if launched() is None or device not in (None, "cuda") or not count:
        return device
    return f"cuda:{local()[0] % count}"


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that a launcher started, or `ALONE`.

    If one of them fails or dies, all exit.  One raises an error that says which and why; the others exit silently, by
    SystemExit.
    """
    place = launched()
    if place is None:
        yield ALONE
        return
    (rank, count), store = place, _store()
    watch = Watch(distributed.PrefixStore("outrider", store), rank, count)
    try:
        _start(store, rank, count)
        is_gloo = distributed.get_backend() == "gloo"
        group = Group(rank, count, None if is_gloo else distributed.new_group(backend="gloo", timeout=PATIENCE))
        yield group
        group.gather(None)  # no process leaves while another is still working
    except BaseException as error:
        _end(watch, error)
        raise
    watch.close()
    distributed.destroy_process_group()


def _store() -> Any:
    """The launcher's key-value store.  Raises ConfigError if its address is missing."""
    try:
        store, _, _ = next(distributed.rendezvous("env://", timeout=PATIENCE))
    except ValueError as error:
        raise ConfigError(
            f"WORLD_SIZE says {os.environ['WORLD_SIZE']} processes, but {first_line(error)}; start them with torchrun "
            "or accelerate launch, or unset WORLD_SIZE"
        ) from error
    return store


def _start(store: Any, rank: int, count: int) -> None:
    """Start the process group: NCCL if every process on this machine has its own GPU, else gloo."""
    number, here = local()
    backend = "nccl" if 0 < here <= torch.cuda.device_count() and distributed.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(number)
    elif "OMP_NUM_THREADS" not in os.environ:  # otherwise every process would use all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)


def _end(watch: Watch, error: BaseException) -> None:
    """Exit this process after an error: raises an error that names the dead process, or SystemExit if another process
    has reported it."""
    lost: list[int] = []
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it as soon as one has died
    if isinstance(error, RuntimeError) and not isinstance(error, OutriderError):
        lost = watch.wait_for_lost()
    if not watch.claim():
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from error
    if lost:
        raise TrainingError(watch.obituary(lost)) from error
