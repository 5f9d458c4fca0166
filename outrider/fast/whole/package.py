"""A whole step compiled for a CPU: one call of a package, over live slots only.

The package is that of `fast.static.step.step`, with passes, acceptance and the draft for the next step; it reads the
weights in memory.  B slots, N nodes, n of them verified.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from outrider import fast
from outrider.decoding import accept, draft, noise
from outrider.fast import Compiled, Runnable
from outrider.fast.static import rules
from outrider.fast.static import step as static
from outrider.fast.static import target as static_pass
from outrider.fast.static.rules import Kind
from outrider.fast.static.step import SlotResult, StaticStep
from outrider.sampling import distribution
from outrider.storage.sources import code

SLOTS, LENGTH = 3, 48
"""Sizes of the traced batch."""


class CompiledWholeStep(Compiled):
    """The package of one drafter's steps, for any number of slots."""

    name = "whole-step"

    def __init__(self, parts: StaticStep, kind: Kind):
        """parts: with `SLOTS` slots."""
        super().__init__()
        self.parts, self.kind, self.traced = parts, kind, _Traced(parts)

    def model(self) -> nn.Module:
        return self.traced

    def settings(self) -> Sequence[object]:
        target, drafter = self.parts.target, self.parts.drafter
        kinds = {each for part in self.traced.modules() for each in type(part).__mro__}
        kinds |= {*type(drafter).__mro__, *type(target).__mro__}
        names = sorted({each.__module__ for each in kinds if each.__module__.startswith("outrider.")})
        rest = fast, accept, draft, noise, static, rules, distribution, static_pass, sys.modules[__name__]
        sizes = [(name, each) for name, each in vars(drafter).items() if isinstance(each, int)]
        tree = getattr(getattr(drafter, "tree", None), "paths", None)
        configs = [repr(getattr(its, "config", None)) for its in (drafter.model, getattr(drafter, "branching", None))]
        shape = [*drafter.parents], drafter.varies, target.taps, self.kind, sizes, tree, configs
        called = *rest, *drafter.code, *(sys.modules[name] for name in names)
        return [*target.target.step.settings(), shape, *code(*called)]

    def example(self) -> tuple[nn.Module, tuple[Any, ...], Any]:
        rows = {0: Dim("rows", min=2, max=1024)}
        caches, columns, buffers = self.parts.caches, list[Any](), list[Any]()
        for n, there in enumerate(caches):
            # longer than the end, since equal sizes would be traced as the same size
            there.cache.reserve(there.cache.length)
            there.open(LENGTH // 2 + n, range(SLOTS))
            columns.append({0: Dim(f"end{n}", min=3, max=2**20)})
            length = {2: Dim(f"length{n}", min=4, max=2**20)}
            buffers += [rows | length] * len(there.buffers)
        most = self.parts.drafter.nodes
        ends, nodes = torch.tensor([0, 1]), torch.arange(most - 1 if most > 2 else most)
        arguments = ends, nodes, self.parts.tensors, [there.columns for there in caches], _buffers(caches)
        verified = {0: Dim("nodes", min=2, max=most)} if most > 2 else {}
        return self.traced, arguments, (
            {0: Dim("ends", min=2, max=2**10)}, verified, [rows for _ in arguments[2]], columns, buffers,
        )  # fmt: skip

    def compare(self, graph: Runnable) -> str:
        """Always "": its texts are compared with plain ones before it is used, see `runner`."""
        return ""

    def _pays(self, graph: Runnable) -> bool:
        return True


class _Traced(nn.Module):
    """The compiled module: the step over the given tensors."""

    def __init__(self, parts: StaticStep):
        super().__init__()
        self.model, self.draft, self.parts = parts.target.target.model, parts.drafter.model, parts
        self.borrowed = nn.ModuleList(parts.drafter.borrowed)

    def forward(
        self, ends: Tensor, nodes: Tensor, tensors: list[Tensor], columns: list[Tensor], buffers: list[Tensor]
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The step's packet, and for trees the accepted path [B, D], whose columns are not moved yet."""
        caches, at = [], 0
        for there, its_columns in zip(self.parts.caches, columns, strict=True):
            caches.append(there.over(its_columns, buffers[at : at + len(there.buffers)]))
            at += len(there.buffers)
        parts, paths = self.parts.over(tensors, caches)._replace(ends=ends), list[Tensor]()
        vars(parts.target)["keep"] = lambda _slots, walked: paths.append(walked.path)
        packet = parts(nodes.shape[0])
        return (packet,) if parts.target.is_chain else (packet, *paths)


class StepPackage:
    """Steps of one batch by a package."""

    def __init__(self, parts: StaticStep, compiled: CompiledWholeStep):
        self.parts, self.graph = parts, compiled.graph
        self.rows: Sequence[int] = ()
        self._tensors: list[Tensor] = []
        """Tensors of these slots: slices, or copies if the slots are not contiguous."""
        self._copied: Tensor | None = None
        self._nodes = torch.arange(parts.drafter.nodes)

    @torch.inference_mode()
    def set_sizes(self, sizes: Sequence[int], rows: Sequence[int]) -> None:
        """Set how many nodes of these slots' drafts are verified."""
        self._take(rows)
        parts = self.parts.over(self._tensors, self.parts.caches)
        parts.draft.sizes.copy_(torch.tensor(sizes))

    def launch(self, columns: int, rows: Sequence[int], nodes: int) -> list[list[int]]:
        """Advance these slots; returns their packets.  columns: length of their longest text with its verified
        nodes."""
        self._open(columns, rows)
        caches, most = self.parts.caches, len(self._nodes)
        verified = self._nodes[: max(nodes, 1) if most > 2 else most]
        arguments = self.parts.ends, verified, self._tensors, [there.columns for there in caches], _buffers(caches)
        packet, *paths = self.graph.forward(*arguments)
        packets: list[list[int]] = packet.tolist()
        if paths:
            self._move(packets, paths[0].tolist())
        return packets

    def _open(self, columns: int, rows: Sequence[int]) -> None:
        self._take(rows)
        for there in self.parts.caches:
            there.open(columns, self.rows)

    @torch.inference_mode()
    def write_back(self) -> None:
        """Bring every slot's tensors up to date; called before anything else writes to them."""
        if self._copied is not None:
            for tensor, part in zip(self.parts.tensors, self._tensors, strict=True):
                tensor[self._copied] = part
        self.rows, self._tensors, self._copied = (), [], None

    @torch.inference_mode()
    def _take(self, rows: Sequence[int]) -> None:
        if rows == self.rows:
            return
        self.write_back()
        contiguous = slice(rows[0], rows[0] + len(rows))
        self.rows = [*rows]
        self._copied = None if self.rows == [*range(contiguous.start, contiguous.stop)] else torch.tensor(self.rows)
        index = contiguous if self._copied is None else self._copied
        self._tensors = [tensor[index] for tensor in self.parts.tensors]

    def _move(self, packets: list[list[int]], paths: list[list[int]]) -> None:
        """Move each slot's accepted nodes after its anchor in the target's cache."""
        cache, drafter = self.parts.target.caches[0].cache, self.parts.drafter
        for row, packet, path in zip(self.rows, packets, paths, strict=True):
            outcome = SlotResult.read(packet, drafter)
            cache.straighten(row, cache.lengths[row], path[: min(len(outcome.path), outcome.committed)])


def _buffers(caches: Sequence[Any]) -> list[Tensor]:
    return [buffer for there in caches for buffer in there.buffers]
