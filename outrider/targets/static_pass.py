"""A target's part of the static step: one pass over buffers that stay, and the accepted path moved in them.

B slots, each in the buffer row of its number; N nodes, D depth of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.compiled import NotCompiled
from outrider.decoding.accept import Walked
from outrider.decoding.draft import Draft
from outrider.decoding.state import Scores
from outrider.decoding.static import NoStatic, StaticSlots
from outrider.targets.cache import SlotCache
from outrider.targets.cuda_graphs import CudaGraphs
from outrider.targets.step import CompiledStep, _Traced


class StaticPass:
    """Verifies one tree in every step."""

    def __init__(self, target: Any, cache: SlotCache, parents: Sequence[int], taps: tuple[int, ...]):
        """Raises NoStatic for a target whose passes can't be traced."""
        self.target, self.cache, self.parents = target, cache, parents
        self.traced = traced(target, cache)
        slots, nodes, device = cache.slots, len(parents), target.device
        rows = torch.zeros(slots, nodes, dtype=torch.int64, device=device)
        above = torch.tensor(parents, dtype=torch.int64, device=device).expand(slots, -1)
        mask, depths = Draft(rows, above, torch.full((slots,), nodes)).rows()
        self.mask, self.depths = mask.contiguous(), depths.contiguous()
        self.taps = torch.tensor(taps or (0,), device=device)
        self.has_taps = bool(taps)
        self.is_chain = list(parents) == list(range(-1, nodes - 1))

    def verify(self, slots: StaticSlots, draft: Draft) -> Scores:
        tokens = torch.cat([slots.anchor[:, None], draft.tokens.clamp(0, self.target.spec.vocabulary - 1)], 1)
        return self.read(tokens, slots.length, slots.columns, self.mask, self.depths)

    def read(self, tokens: Tensor, starts: Tensor, end: int, mask: Tensor, depths: Tensor) -> Scores:
        """One pass over tokens [B, n] after the first starts[b] of each slot, which reads columns before `end`."""
        asked = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        columns, buffers = torch.arange(end, device=tokens.device), buffers_of(self.cache)
        logits, hidden, choice, taps = self.traced(tokens, depths, mask, starts, columns, self.taps, asked, buffers)
        return Scores(logits, hidden, taps if self.has_taps else None, choice)

    def keep(self, slots: StaticSlots, walked: Walked) -> None:
        if self.is_chain:  # what was accepted lies where it stays
            return
        order = torch.arange(walked.path.shape[1], device=walked.path.device)
        is_on_path = (order < walked.counts[:, None]) & slots.live[:, None]
        come_from = torch.where(is_on_path, walked.path, order) + slots.length[:, None] + 1
        to = order + slots.length[:, None] + 1
        rows = torch.arange(len(to), device=to.device)[:, None]
        for stack in self.cache.stacks.tensors:
            stack[:, rows, :, to] = stack[:, rows, :, come_from]


def traced(target: Any, cache: SlotCache) -> nn.Module:
    """The target's pass as a function of tensors, by our kernels where they serve it."""
    step: Any = getattr(target, "step", None)
    if not isinstance(step, CompiledStep):
        raise NoStatic(f"{target.spec.name} is not one model of transformers")
    try:
        step.model()
    except NotCompiled as error:
        raise NoStatic(str(error)) from error
    if target.spec.mode == "off":
        raise NoStatic(f"{target.spec.name} can verify no drafts")
    return step.graph.traced if isinstance(step.graph, CudaGraphs) else _Traced(target, cache.layers)


def buffers_of(cache: SlotCache) -> list[Tensor]:
    """Keys, then values, of each layer, [slots, h, columns, d], as the cache holds them now."""
    made = {(b.layer, b.holds): part for b, part in zip(cache.layout, cache.stacks.parts(), strict=True)}
    return [made[layer, holds] for layer in cache.layers for holds in ("keys", "values")]


def made(target: Any, cache: SlotCache) -> SlotCache:
    """The cache with the buffers of all layers, which a pass makes."""
    if not cache.layers:
        target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1], ())
        cache.free([0])
    return cache
