"""A target's part of the static step: one pass over fixed buffers, in which the accepted path is then moved.

B slots, each in the buffer row of its number; N nodes, D depth of the tree.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outrider.decoding.accept import AcceptedTensors
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import NoStatic
from outrider.decoding.state import Scores, likeliest
from outrider.fast import NotCompiled
from outrider.fast.gpu.cuda_graphs import CudaGraphs
from outrider.fast.passes.compiled import CompiledStep, TracedPass, numbers
from outrider.fast.static.step import StaticPart, StaticSlots, parents_tensor
from outrider.targets.cache.attention_mask import PassLayout, TracedCache
from outrider.targets.cache.slots import SlotCache


class StaticCache:
    """The part of a cache that a step reads and writes: the buffers of every layer, in columns before an end."""

    def __init__(self, cache: SlotCache, more: int = 0):
        """more: columns that a step needs in addition to the target's."""
        self.cache, self.more, self.layers = cache, more, cache.layers
        self.columns, self.buffers = cache.line[:0], list[Tensor]()
        """0, 1, ... [end]; keys, then values, of each layer, [B, h, length, d]."""

    def open(self, columns: int, rows: Sequence[int]) -> None:
        """Prepare steps of these slots that use the target's columns up to `columns`, and `more`."""
        end = min(self.cache.length, columns + self.more)
        self.cache.reserve(end)
        self.cache.gather(rows)
        first = self.cache.buffer_rows[rows[0]]
        self.columns, self.buffers = self.cache.line[:end], self.cache.views(slice(first, first + len(rows)))

    def over(self, columns: Tensor, buffers: list[Tensor]) -> StaticCache:
        """The same over other tensors."""
        there = copy.copy(self)
        there.columns, there.buffers = columns, buffers
        return there

    def within(self, layout: PassLayout) -> TracedCache:
        """The cache for layers in one pass."""
        return TracedCache(self.layers, self.buffers, layout)


class StaticPass(StaticPart):
    """Verifies the same tree in every step, or trees that differ."""

    def __init__(
        self, target: Any, cache: SlotCache, parents: Sequence[int] | None, taps: tuple[int, ...], more: int = 0
    ):
        """parents: None if trees differ.  more: as in `StaticCache`.

        Raises NoStatic if the target's passes can't be traced.
        """
        self.target, self.caches, self.parents, self.taps = target, [StaticCache(cache, more)], parents, taps
        self.traced = traced(target, cache)
        self.is_chain = parents is not None and list(parents) == list(range(-1, len(parents) - 1))
        if parents is None:
            return
        slots, nodes, device = cache.slots, len(parents), target.device
        rows = torch.zeros(slots, nodes, dtype=torch.int64, device=device)
        sizes = torch.full((slots,), nodes)
        self.mask, self.depths = _with_one_more(*Draft(rows, parents_tensor(parents, slots, device), sizes).rows())

    def verify(self, slots: StaticSlots, draft: Draft, nodes: int) -> Scores:
        # one more row than any pass has, so that a dynamic number of nodes can be all of them
        drafted = pad(draft.tokens.clamp(0, self.target.spec.vocabulary - 1), (0, 1))
        mask, depths = _with_one_more(*draft.rows()) if self.parents is None else (self.mask, self.depths)
        mask, depths = mask[:, : nodes + 1, : nodes + 1].contiguous(), depths[:, : nodes + 1].contiguous()
        tokens = torch.cat([slots.anchor[:, None], drafted], 1)[:, : nodes + 1].contiguous()
        return self.read(tokens, slots.length, mask, depths)

    def read(self, tokens: Tensor, starts: Tensor, mask: Tensor, depths: Tensor) -> Scores:
        """One pass over tokens [B, n] after the first starts[b] of each slot."""
        [cache] = self.caches
        logit_indices = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        arguments = tokens, depths, mask, starts, cache.columns
        if isinstance(self.traced, TracedPass):
            logits, hidden, layers = self.traced.all_layers(*arguments, logit_indices, cache.buffers)
            tapped = torch.stack([layers[tap] for tap in self.taps], 2) if self.taps else None
            return Scores(logits, hidden, tapped, likeliest(logits))
        taps = numbers(self.taps or (0,), tokens.device)
        logits, hidden, choice, tapped = self.traced(*arguments, taps, logit_indices, cache.buffers)
        return Scores(logits, hidden, tapped if self.taps else None, choice)

    def keep(self, slots: StaticSlots, walked: AcceptedTensors) -> None:
        if self.is_chain:  # accepted nodes are already in place
            return
        order = torch.arange(walked.path.shape[1], device=walked.path.device)
        is_on_path = (order < walked.counts[:, None]) & slots.live[:, None]
        come_from = torch.where(is_on_path, walked.path, order) + slots.length[:, None] + 1
        to = order + slots.length[:, None] + 1
        rows = torch.arange(len(to), device=to.device)[:, None]
        for stack in self.caches[0].cache.stacks.tensors:
            stack[:, rows, :, to] = stack[:, rows, :, come_from]


def _with_one_more(mask: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """The output of `Draft.rows` with an unused row added."""
    return pad(mask, (0, 1, 0, 1)).contiguous(), pad(depths, (0, 1)).contiguous()


def traced(target: Any, cache: SlotCache) -> nn.Module:
    """The target's pass as a function of tensors, with our kernels if they are used for it."""
    step: Any = getattr(target, "step", None)
    if not isinstance(step, CompiledStep):
        raise NoStatic(f"{target.spec.name} is not a single transformers model")
    try:
        step.model()
    except NotCompiled as error:
        raise NoStatic(str(error)) from error
    if target.spec.mode == "off":
        raise NoStatic(f"{target.spec.name} can't verify drafts")
    return step.graph.traced if isinstance(step.graph, CudaGraphs) else TracedPass(target, cache.layers)


def with_buffers(target: Any, cache: SlotCache) -> SlotCache:
    """The cache with the buffers of all layers, created by a pass.  Raises NoStatic for a family's own cache."""
    if not isinstance(cache, SlotCache):
        raise NoStatic(f"{target.spec.name} has its own kind of cache")
    if not cache.layers:
        target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1], ())
        cache.free([0])
    return cache
