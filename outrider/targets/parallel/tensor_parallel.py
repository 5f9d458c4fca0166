"""A target whose layers are split over processes: transformers' own tensor parallelism, led by the first process.

Each process started by torchrun has a part of every layer.  The first one has the text, the drafter, the policy and the
noise, and makes all decisions; before a pass it sends the call to the others, which make the same call on their parts.
The others sample, time and write nothing, so processes can't disagree.

R rows of a pass, N drafted nodes, T taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Never

import torch
from torch import Tensor, distributed, nn

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import ConfigError, OutriderError, TargetError, first_line
from outrider.launcher import launched, local
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer
from outrider.targets.hf.transformers import TransformersTarget

PATIENCE = timedelta(days=365)
"""How long the others wait for a call: a server may be idle for days, and if a process dies, the connection breaks."""
Load = Callable[..., TransformersTarget]
"""Returns this process's part of a target, from the options of `load_target`."""


class Calls:
    """Calls that the first process makes and the others repeat.  Created by `join`."""

    def __init__(self, rank: int, count: int, control: Any):
        """control: a process group for small objects on the CPU."""
        self.rank, self.count = rank, count
        self.lock = threading.RLock()
        """Held while a call runs: calls of the first process's threads must not interleave."""
        self._control, self._numbers, self._buffered = control, itertools.count(1), list[tuple[Any, ...]]()
        self._is_sound = True

    def number(self) -> int:
        """A new number for an object that all processes have."""
        return next(self._numbers)

    def later(self, number: int, method: str, *args: Any) -> None:
        """Queue a call without communication; it is sent with the next one that communicates."""
        with self.lock:
            self._buffered.append((number, method, args))

    @contextmanager
    def together(self, number: int, method: str, *args: Any) -> Iterator[None]:
        """Within this context, the others make this call.  Raises TargetError if one of them is gone."""
        with self.lock:
            calls, self._buffered = [*self._buffered, (number, method, args)], []
            self._is_sound = False
            try:
                self.send(calls)
                yield
            except OutriderError:  # raised in the others too, which continue
                self._is_sound = True
                raise
            except RuntimeError as error:
                raise TargetError(
                    f"a pass of the {self.count} processes that share the target failed ({first_line(error)}); if one "
                    "of them died, see its own message; start all of them again"
                ) from error
            self._is_sound = True

    def send(self, calls: list[tuple[Any, ...]] | None) -> None:
        distributed.broadcast_object_list([calls], src=0, group=self._control)

    def receive(self) -> list[tuple[Any, ...]] | None:
        """The first process's next calls, as number, method and arguments; None at the end."""
        received: list[Any] = [None]
        distributed.broadcast_object_list(received, src=0, group=self._control)
        if received[0] is None:
            with suppress(RuntimeError):  # the first process may already be gone
                distributed.barrier(self._control)
        return received[0]

    def end(self) -> None:
        """Let the others exit, unless they are in a pass that failed here: those exit when this process is gone."""
        with suppress(RuntimeError):
            if self._is_sound and distributed.is_initialized():
                self.send(None)
                distributed.barrier(self._control)  # otherwise the connection may close before they have read it


@functools.cache
def join(count: int) -> Calls:
    """Connect the processes that a launcher started.  Raises ConfigError unless there are `count`."""
    place = launched()
    if place is None or place[1] != count:
        problem = "there is one" if place is None else f"a launcher started {place[1]}"
        raise ConfigError(
            f"tensor_parallel {count} needs {count} processes, but {problem}; start them with "
            f"torchrun --nproc-per-node {count} -m outrider …, or your script instead of -m outrider"
        )
    if not distributed.is_initialized():
        number, here = local()
        backend = "nccl" if 0 < here <= torch.cuda.device_count() and distributed.is_nccl_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(number)
        distributed.init_process_group(backend, timeout=PATIENCE)
    calls = Calls(*place, distributed.new_group(backend="gloo", timeout=PATIENCE))
    if not calls.rank:
        atexit.register(calls.end)
    return calls


def is_worker(count: int) -> bool:
    """Whether this process shares a target and is not the first one."""
    place = launched()
    return count > 1 and place is not None and place[0] > 0


def lead(calls: Calls, load: Load, options: dict[str, Any]) -> TensorParallelTarget:
    """In the first process: load the target, with a part in each process."""
    number = calls.number()
    with calls.together(number, "load", options):
        return TensorParallelTarget(load(**options), calls, number)


def work(calls: Calls, load: Load) -> Never:
    """In every other process: repeat the first one's calls until it finishes, then raise SystemExit."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first one handles these and tells the others to exit
        with suppress(ValueError):  # not the main thread
            signal.signal(number, signal.SIG_IGN)
    for name in ("outrider", "transformers"):  # the first one logs warnings
        logging.getLogger(name).setLevel(logging.ERROR)
    objects: dict[int, Any] = {}
    try:
        while (received := calls.receive()) is not None:
            for number, method, args in received:
                with suppress(OutriderError):  # raised in the first process too
                    _make(objects, load, number, method, args)
    except RuntimeError as error:
        raise SystemExit(
            f"error process {calls.rank} of {calls.count} that share a target ends because the first one is gone or a "
            f"pass failed: {first_line(error)}"
        ) from None
    raise SystemExit(0)


def _make(objects: dict[int, Any], load: Load, number: int, method: str, args: tuple[Any, ...]) -> None:
    """Repeat one call of the first process, on this process's objects."""
    match method:
        case "load":
            objects[number] = load(**args[0])
        case "drop":
            objects.pop(number, None)
        case "allocate":
            made, *sizes = args
            objects[made] = objects[number].allocate(*sizes)
        case "prefill" | "verify":
            cache, rows, tokens, *rest = args
            target = objects[number]
            getattr(target, method)(objects[cache], rows, tokens.to(target.device), *(_on(one, target) for one in rest))
        case "ends":
            objects[number].copy_to(objects[number].device)
        case _:  # target: read, layer, generate_plainly; cache: keep, append, free
            owner = objects[number]
            getattr(owner, method)(*(_on(one, owner) for one in args))


def _on(value: Any, owner: Any) -> Any:
    """An argument, moved to the owner's device if it is a tensor or a draft."""
    if isinstance(value, Draft):
        return Draft(
            value.tokens.to(owner.device), value.parents.to(owner.device), value.sizes, branches=value.branches
        )
    return value.to(owner.device) if isinstance(value, Tensor) else value


class TensorParallelCache:
    """The first process's keys and values of every slot; all changes are repeated in the others."""

    def __init__(self, part: Any, calls: Calls, number: int):
        self.part, self.number, self._calls = part, number, calls
        weakref.finalize(self, calls.later, number, "drop")

    @property
    def slots(self) -> int:
        return int(self.part.slots)

    @property
    def length(self) -> int:
        return int(self.part.length)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each slot holds."""
        lengths: list[int] = self.part.lengths
        return lengths

    @property
    def column_bytes(self) -> int:
        """Bytes of one token in this process; 0 for the family's own kind of cache."""
        return int(getattr(self.part, "column_bytes", 0))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._calls.later(self.number, "keep", [list(path) for path in paths])
        self.part.keep(paths)

    def append(self, counts: Sequence[int]) -> None:
        self._calls.later(self.number, "append", list(counts))
        self.part.append(counts)

    def free(self, rows: Sequence[int]) -> None:
        self._calls.later(self.number, "free", list(rows))
        self.part.free(rows)


class NoModel(TargetError, AttributeError):
    """No process has the whole model.  An AttributeError, so that getattr with a default works."""


class TensorParallelTarget:
    """A causal LM split over processes, with this process as leader.  Created by `load_target`."""

    def __init__(self, part: TransformersTarget, calls: Calls, number: int):
        self._part, self._calls, self._number = part, calls, number
        self._lenders: dict[torch.device, TransformersTarget] = {}
        """Targets with whole embedding and head, for drafters, by device."""
        self.device, self.spec = part.device, part.spec
        self.tokenizer, self.mask_token = part.tokenizer, part.mask_token

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, slots: int, length: int, undo: int = 0) -> TensorParallelCache:
        made = self._calls.number()
        self._calls.later(self._number, "allocate", made, slots, length, undo)
        return TensorParallelCache(self._part.allocate(slots, length, undo), self._calls, made)

    def prefill(
        self, cache: TensorParallelCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int],
        taps: tuple[int, ...] = (),
    ) -> Scores:  # fmt: skip
        """Like `TransformersTarget.prefill`, in all processes."""
        with self._together("prefill", cache.number, list(rows), tokens.cpu(), list(lengths), taps):
            return self._part.prefill(cache.part, rows, tokens, lengths, taps)

    def verify(
        self, cache: TensorParallelCache, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...] = (),
        probe: Probe | None = None,
    ) -> Scores:  # fmt: skip
        """Like `TransformersTarget.verify`, in all processes.  Raises TargetError for a probe."""
        if probe is not None:
            self.check_probe()
        sent = Draft(draft.tokens.cpu(), draft.parents.cpu(), draft.sizes, branches=draft.branches)
        with self._together("verify", cache.number, list(rows), anchor.cpu(), sent, taps):
            return self._part.verify(cache.part, rows, anchor, draft, taps)

    def read(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Like `TransformersTarget.read`, in all processes."""
        with self._together("read", tokens.cpu(), taps):
            return self._part.read(tokens, taps)

    def generate_plainly(self, tokens: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """Like `TransformersTarget.generate_plainly`, in all processes."""
        with self._together("generate_plainly", tokens.cpu(), dict(settings)):
            return self._part.generate_plainly(tokens, settings)

    def _together(self, method: str, *args: Any) -> Any:
        return self._calls.together(self._number, method, *args)

    # ── whole embedding, head and layers for drafters ─────────────────────────────────────────────────────────────────

    def _lender(self) -> TransformersTarget:
        with self._calls.lock:
            if self.device not in self._lenders:
                with self._together("ends"):
                    self._lenders[self.device] = self._part.copy_to(self._part.device)
                if self.device != self._part.device:
                    self._lenders[self.device] = self._lenders[self.device].copy_to(self.device)
            return self._lenders[self.device]

    def embed(self, tokens: Tensor) -> Tensor:
        return self._lender().embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self._lender().head(hidden)

    def head_rows(self, tokens: Tensor) -> Tensor:
        return self._lender().head_rows(tokens)

    def head_over(self, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
        return self._lender().head_over(tokens, dtype)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        return self._lender().embedding_rows(tokens)

    def copy_to(self, device: torch.device) -> TensorParallelTarget:
        """This target with embedding and head on another device, for a drafter there."""
        there = copy.copy(self)
        there.device, there._lenders = device, {}
        return there

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, a copy with whole weights."""
        with self._together("layer", index):
            return self._part.layer(index)

    # ── without a pass ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end a text: the model's, unless set here."""
        return self._part.ends

    @ends.setter
    def ends(self, ends: frozenset[int]) -> None:
        self._part.ends = ends

    @property
    def detokenizer(self) -> Detokenizer | None:
        return self._part.detokenizer

    @property
    def step(self) -> Any:
        """Never compiled."""
        return self._part.step

    @property
    def parameters(self) -> int:
        """Of all processes."""
        return self._part.parameters

    @property
    def generation_config(self) -> Any:
        return self._part.generation_config

    @property
    def model(self) -> Never:
        """Raises TargetError: a pass of this process's part alone would hang."""
        raise NoModel(
            f"{self.spec.name} is split over {self._calls.count} processes, and this needs all of its weights; "
            "load it without tensor_parallel"
        )

    def compile(self) -> float:
        """Like `TransformersTarget.compile`: raises NotCompiled."""
        return self._part.compile()

    def check_probe(self) -> None:
        """Raises TargetError: only this process has a probe's embeddings."""
        raise TargetError(
            f"{self.spec.name} is split over processes and can't run a probe; draft without one, or load it without "
            "tensor_parallel"
        )

    def read_probe(self, tokens: Tensor, documents: Tensor, probe: Probe) -> Tensor:
        self.check_probe()
        raise AssertionError

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        return self._part.default_sampling(prompt, max_new_tokens)

    def encode(self, prompt: Any, thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self._part.encode(prompt, thinking, tools)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._part.decode(tokens)
