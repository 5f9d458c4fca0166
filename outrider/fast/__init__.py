"""Functions compiled ahead of time for this CPU and stored on disk, so that later processes only have to load them.

torch.export traces a function with dynamic sizes, inductor compiles it with the weights frozen in the order in which
its kernels read them, and loading the package takes a fraction of a second.  Nothing is recompiled for another size.
Without a C++ compiler there is no fast path, but everything else works.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outrider import kernels, machine
from outrider.decoding.protocols import Drafter
from outrider.errors import first_line
from outrider.fast.packages import rewrite, shelf
from outrider.fast.packages.build import NotCompiled, build_package, builds, may_build, refuse_large, weights_of
from outrider.fast.packages.key import fingerprint, values_of
from outrider.fast.packages.package import Package
from outrider.fast.packages.shelf import Slower, folder
from outrider.kernels import prepacked, quantized
from outrider.kernels.quantized import QuantizedLinear
from outrider.storage import trusted

log = logging.getLogger(__name__)

AWAIT_S = 2.0
"""Seconds between checks for a graph that another process is building."""


class Graph:
    """A package, called by `forward` like a module."""

    def __init__(self, path: Path, traced: nn.Module):
        """traced: the compiled module; a package without weights uses this module's.

        Raises NotCompiled if the package can't be loaded.
        """
        kernels.library()  # the package may call these kernels
        try:
            self.package = Package(trusted.own_file(path))
            self.weights = self._weights(traced)
            if self.weights:
                self.package.give(self.weights)
        except Exception as error:  # native code may raise anything, and the plain path always works
            raise NotCompiled(
                f"{path} can't be loaded ({first_line(error)[:300]}); delete it and compile again"
            ) from error

    def _weights(self, traced: nn.Module) -> dict[str, Tensor]:
        """Weights for the package: the module's, and the panels in memory."""
        if self.package.has_weights:
            return {}
        constants, layers = weights_of(traced) | self.package.constants, prepacked.in_panels(traced)

        def weight(name: str) -> Tensor:
            numbers = rewrite.numbers_of(name)
            return constants[name].detach() if numbers is None else prepacked.panels_of([layers[n] for n in numbers])

        return {name: weight(name) for name in self.package.names}

    def padded(self, width: int) -> int:
        """Tokens per row that a pass of `width` tokens writes."""
        return width

    def forward(self, *args: Tensor | list[Tensor]) -> list[Tensor]:
        """Arguments and results in the order of the traced function's, with lists flattened."""
        return self.package.run(flat(args))


def compile_passes(drafter: Drafter, unasked: bool = False) -> float:
    """Compile a drafter's own passes; returns the seconds it took.  Raises NotCompiled with the reason if it can't.

    unasked: skip those that have a package and those that are known to fail.
    """
    return sum(step.get(build=True) for step in drafter.steps if not unasked or step.is_possible)


class Runnable(Protocol):
    """Runs a traced function: a package, or passes captured on a GPU."""

    def padded(self, width: int) -> int: ...
    def forward(self, *args: Any) -> list[Tensor]: ...


class Compiled:
    """The graph of one model's step.  It is traced with several slots and tokens, and serves any number of both,
    including 1."""

    name = "step"
    traced: Any
    """The module that is compiled, with its weights and their names."""

    def __init__(self) -> None:
        self.graph: Any = None
        """A `Runnable`; None if there is none."""
        self.path: Path | None = None
        """The package of `graph`."""
        self._key = ""
        self._weights: list[Tensor] = []
        self._version = -1
        self._awaited_at: float | None = None
        """When to check next for a graph that another process is building; None if there is none."""
        self._checked_for: Callable[[], Any] = lambda: None
        self._is_sound = False

    def get(self, build: bool) -> float:
        """Load the graph from disk, or compile it; returns the seconds that compiling took.

        Raises NotCompiled with the reason: this model can't be compiled, the graph is not on disk, or its logits differ
        from the plain path's.
        """
        if self.graph is not None and not self._is_stale():
            return 0.0
        model = self._plain_model()
        if self._is_stale():
            self.graph, self._key = None, ""  # so that `compare` compares with the plain path
            # inference tensors have no version counter
            self._weights = [weight for weight in model.parameters() if not weight.is_inference()]
            self._version = _version(self._weights)
            if prepacked.way_of(model) == "panels":
                prepacked.pack(model)  # layers whose weights changed
        if not _is_on_cpu(model):
            if not build:
                raise NotCompiled(f"there is no {self.name} graph: on a GPU it is captured when the target is loaded")
            self._take(self.cuda_graphs())
            return 0.0
        if prepacked.way_of(model) != "panels":
            refuse_large(model)
        path, seconds = self._on_disk(), 0.0
        if path is None and not build:
            raise NotCompiled(f"there is no compiled {self.name} of this model: none is in {folder()}")
        if path is not None:
            self._take_package(path)
            return seconds
        with shelf.building(self._path(holds_weights=False)):
            path = self._on_disk()  # another process may have built it in the meantime
            if path is None:
                path, seconds = self._build()
            self._take_package(path)
        return seconds

    def _plain_model(self) -> nn.Module:
        """As `model`.  Also raises NotCompiled for quantised weights."""
        model = self.model()
        if any(map(is_traceable_wrapper_subclass, model.parameters())):
            raise NotCompiled(
                "its weights are quantised, and a compiled package would store them unquantised; its steps stay plain"
            )
        if not quantized.is_fast() and any(isinstance(part, QuantizedLinear) for part in model.modules()):
            raise NotCompiled("this machine has no kernel for the blocks of its GGUF file; its steps stay plain")
        return model

    def _take_package(self, path: Path) -> None:
        """Use this package.  Raises NotCompiled if it is wrong, or slower than the plain path."""
        graph = Graph(path, self.traced)
        if not shelf.was_checked(path):
            if difference := self.compare(graph):
                path.unlink(missing_ok=True)
                raise NotCompiled(f"compiled logits differ from plain ones by {difference}; its steps stay plain")
            shelf.note_checked(path)
        if not self._pays(graph):
            raise Slower("its compiled steps are slower than plain ones on this machine; its steps stay plain")
        self.graph, self.path = graph, path

    def _take(self, graph: Runnable) -> None:
        """Use a captured graph.  Raises NotCompiled if it is wrong."""
        if difference := self.compare(graph):
            raise NotCompiled(f"captured logits differ from plain ones by {difference}; its steps stay plain")
        self.graph = graph

    @property
    def is_possible(self) -> bool:
        """Whether compiling may succeed: it is enabled, there is no package yet, and it has not failed before."""
        try:
            is_on_cpu = _is_on_cpu(self._plain_model())
        except NotCompiled:
            return False
        return is_on_cpu and may_build() and not self.is_on_disk and not shelf.was_refused(self._path(False))

    @property
    def is_on_disk(self) -> bool:
        """Whether there is a package of this model, whether or not it is in use; for models whose steps can be
        traced."""
        return self._on_disk() is not None

    def await_graph(self) -> None:
        """From now on, load the graph as soon as another process has built it."""
        self._awaited_at = time.monotonic()

    def _take_awaited(self) -> None:
        """Check for the awaited graph, at most every `AWAIT_S`."""
        if self._awaited_at is None or time.monotonic() < self._awaited_at:
            return
        self._awaited_at = time.monotonic() + AWAIT_S
        if self._on_disk() is None:
            return
        self._awaited_at = None
        try:
            self.get(build=False)
            log.info("steps are compiled from now on")
        except NotCompiled as reason:
            log.info("steps stay plain: %s", reason)

    def _on_disk(self) -> Path | None:
        """The package of this model, without weights or with these; None if there is none."""
        path = self._path(holds_weights=False)
        if not path.exists() and any(folder().glob(f"{path.stem}-*.pt2")):
            path = self._path(holds_weights=True)
        return path if path.exists() else None

    def _path(self, holds_weights: bool) -> Path:
        self._key = self._key or fingerprint(self.model(), *self.settings())
        name = f"{self.name}-{self._key}"
        return folder() / f"{name}-{values_of(self.model())}.pt2" if holds_weights else folder() / f"{name}.pt2"

    def _pays(self, graph: Runnable) -> bool:
        """Whether the graph is at least as fast as the plain path; timed once per machine."""

        def ways() -> dict[str, Callable[[], object]]:
            trials, runs = self.trials(), {"compiled": graph.forward, "plain": self.plain()}
            return {way: functools.partial(_run_all, run, trials) for way, run in runs.items()}

        return machine.fastest(f"a plain {self._described()}", ways) == "compiled"

    def _described(self) -> str:
        weights = list(self.model().parameters())
        blocks = [part for part in self.model().modules() if isinstance(part, QuantizedLinear)]
        names = {str(weight.dtype).removeprefix("torch.") for weight in weights}
        types = "+".join(sorted(names | {f"{part.kind} {part.activations}" for part in blocks}))
        size = (sum(weight.nbytes for weight in weights) + sum(part.weight_bytes for part in blocks)).bit_length()
        return f"{self.name}, {types}, {size} bits of bytes"

    def _build(self) -> tuple[Path, float]:
        """Compile in the fastest way; the first time on a machine, all ways are compiled and timed."""
        log.warning("compiling a %s: one to two minutes, once on this machine", self.name)
        traced, arguments, dims = self.example()
        possible = builds(traced)
        question = f"products in a compiled {self._described()}: {list(possible)}"
        parts = {way: folder() / f".{os.getpid()}.{self.name}.{way}.pt2" for way in possible}
        seconds = 0.0

        def build(way: str) -> Graph:
            nonlocal seconds
            seconds += build_package(parts[way], traced, arguments, dims, possible[way])
            return Graph(parts[way], traced)

        def ways() -> dict[str, Callable[[], object]]:
            runs: dict[str, Callable[[], object]] = {}
            for way in possible:
                try:
                    runs[way] = functools.partial(_run_all, build(way).forward, self.trials())
                except NotCompiled:  # inductor has no templates of float64
                    if not runs:
                        raise
            return runs

        try:
            chosen = machine.fastest(question, ways, processes=1) if len(possible) > 1 else next(iter(possible))
            if not parts[chosen].exists():
                build(chosen)
            path = self._path(holds_weights=not Graph(parts[chosen], traced).weights)
            parts[chosen].replace(path)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)
        return path, seconds

    def trials(self) -> list[tuple[Any, ...]]:
        """Arguments of the passes on which the ways of compiling are timed."""
        return [self.example()[1]]

    def plain(self) -> Callable[..., Any]:
        """The traced function, not compiled."""
        return self.example()[0]

    def cuda_graphs(self) -> Runnable:
        """CUDA graphs, which replace a compiled package on a GPU."""
        raise NotCompiled("this step is compiled only on a CPU; on another device it stays plain")

    def fits(self, cache: Any, rows: Sequence[int], width: int) -> bool:
        """Whether there is a graph for a pass of `width` tokens over these slots of a SlotCache.  If so, makes them
        contiguous."""
        if self._awaited_at is not None:
            self._take_awaited()
        if self.graph is None or not cache.layers:
            return False
        if self._checked_for() is not cache:
            # checked once per cache, so once per batch of requests
            self._checked_for, self._is_sound = weakref.ref(cache), not self._is_stale()
        width = self.graph.padded(width)
        end = max(cache.lengths[row] for row in rows) + width
        if not self._is_sound or end > cache.length:
            return False
        cache.reserve(end)
        cache.gather(rows)
        return True

    def _is_stale(self) -> bool:
        """Whether a weight changed since the graph, which has the old values, was loaded."""
        return _version(self._weights) != self._version

    def renew(self) -> None:
        """Reload the graph, since weights changed; if none is on disk, steps are plain from now on."""
        had, self.graph = self.graph is not None, None
        self._key = ""  # tied weights may be separate by now
        self._checked_for = lambda: None
        if had:
            self._version = -1
            with contextlib.suppress(NotCompiled):
                self.get(build=False)

    def look(self) -> None:
        """Load the graph from disk, if there is one."""
        if not any(folder().glob(f"{self.name}-*.pt2")):
            return
        with contextlib.suppress(NotCompiled):
            self.get(build=False)

    def model(self) -> nn.Module:
        """The module with the weights.  Raises NotCompiled if its steps can't be traced."""
        raise NotImplementedError

    def settings(self) -> Sequence[object]:
        """What the graph depends on besides the weights."""
        raise NotImplementedError

    def example(self) -> tuple[nn.Module, tuple[Any, ...], Any]:
        """(module to trace, arguments, their dynamic sizes); a dynamic size is at least 2 in the arguments."""
        raise NotImplementedError

    def compare(self, graph: Runnable) -> str:
        """How much logits differ from the plain path's, if rounding does not explain it; otherwise "".  Also tests
        sizes of 1."""
        raise NotImplementedError


@torch.inference_mode()
def _run_all(run: Callable[..., Any], trials: Sequence[tuple[Any, ...]]) -> None:
    for arguments in trials:
        run(*arguments)


def flat(arguments: Sequence[Tensor | list[Tensor]]) -> list[Tensor]:
    """Tensors and lists of tensors as one list."""
    tensors: list[Tensor] = []
    for argument in arguments:
        tensors += argument if isinstance(argument, list) else [argument]
    return tensors


def dense(tensor: Tensor, *shape: int) -> Tensor:
    """Expanded to this shape and contiguous: a package assumes the strides that it was compiled with."""
    return tensor.expand(*shape).contiguous()


def _is_on_cpu(model: nn.Module) -> bool:
    return {weight.device.type for weight in model.parameters()} == {"cpu"}


def _version(weights: Sequence[Tensor]) -> int:
    """Increases with every write to one of them."""
    return sum(map(_changes, weights))


_changes = operator.attrgetter("_version")
