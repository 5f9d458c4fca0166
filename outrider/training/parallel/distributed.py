"""Several processes that train one model: who they are, what they tell each other, and which one writes.

A `Group` speaks over torch's process group, gloo on CPUs and NCCL on CUDA devices, between processes that torchrun or
`accelerate launch` started.  All take every step together and decide alike: what one of them finds is gathered before
anything follows from it.  The first writes.
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
"""The others wait so long for one that measures or writes; one that has died is noticed within seconds."""
HEADER_BYTES, SMALL_BYTES = 8, 2**12
"""Of what a process gives to a gather: its size, and what goes with the size in one call."""


class Group:
    """One of several processes.  Use `joined`."""

    def __init__(self, rank: int, count: int, control: Any, main: Any = None):
        """control: a process group for what is small and on the CPU.  main: for weights and gradients; all unless
        given."""
        self.rank, self.count, self.control = rank, count, control
        self._asks: Callable[[], bool] = lambda: False
        self._is_asked = False
        self.weights: Weights = Replicas(self.gather, main)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def lay_out(self, way: Way) -> None:
        if way == "fsdp":
            from outrider.training.parallel.shards import Shards  # loads a second longer

            self.weights = Shards(self.gather)

    def gather(self, value: T) -> list[T]:
        gathered = [pickle.loads(each) for each in self._exchanged(pickle.dumps((value, self._asks())))]
        self._is_asked = any(asks for _, asks in gathered)
        return [theirs for theirs, _ in gathered]

    def trainers(self, readers: int) -> Group | None:
        """Those of these processes that train where the last `readers` read the target for them; None in these."""
        first = [*range(self.count - readers)]  # all make the groups
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
        """Every process's bytes, by rank; in one call where none has more than `SMALL_BYTES`."""
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
    """Ctrl-C and SIGTERM change nothing here: other processes stop, and tell this one."""
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
    """The device of this process: the GPUs of a machine are shared out where none is named."""
    count = torch.cuda.device_count()
    if launched() is None or device not in (None, "cuda") or not count:
        return device
    return f"cuda:{local()[0] % count}"


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that a launcher started, or `ALONE`.

    Where one of them fails or dies, all end, and one error says which and why; the others end in silence, by
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
        group.gather(None)  # nobody is gone while another still works
    except BaseException as error:
        _end(watch, error)
        raise
    watch.close()
    distributed.destroy_process_group()


def _store() -> Any:
    """The launcher's store of keys and values.  Raises ConfigError where its address is not given."""
    try:
        store, _, _ = next(distributed.rendezvous("env://", timeout=PATIENCE))
    except ValueError as error:
        raise ConfigError(
            f"WORLD_SIZE says {os.environ['WORLD_SIZE']} processes, but {first_line(error)}; start them by torchrun or "
            "accelerate launch, or unset WORLD_SIZE"
        ) from error
    return store


def _start(store: Any, rank: int, count: int) -> None:
    """Begin the process group: NCCL where every process of this machine has a GPU of its own."""
    number, here = local()
    backend = "nccl" if 0 < here <= torch.cuda.device_count() and distributed.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(number)
    elif "OMP_NUM_THREADS" not in os.environ:  # or every process would want all of the machine
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)


def _end(watch: Watch, error: BaseException) -> None:
    """End this process after an error: raises one that says which process died, or SystemExit where another has said
    it."""
    lost: list[int] = []
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it as soon as one has died
    if isinstance(error, RuntimeError) and not isinstance(error, OutriderError):
        lost = watch.wait_for_lost()
    if not watch.claim():
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from error
    if lost:
        raise TrainingError(watch.obituary(lost)) from error
