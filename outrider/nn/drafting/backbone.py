"""Serving drafters that have a backbone of blocks, whatever they make of its states: one pass a step, plain or static.

The pass reads the buffered taps of committed tokens, and a block under each slot's anchor.

B live slots, C taps that are not read yet, T target layers, H hidden size.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import sent
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState, Scores
from outrider.fast.block import real, seen
from outrider.fast.static.step import Committed, StaticSlots
from outrider.fast.static.target import StaticCache
from outrider.kernels import prepacked
from outrider.nn.drafting.static import Unread
from outrider.nn.memory import FeatureDrafter, FeatureMemory
from outrider.targets.cache.attention_mask import PassLayout, additive
from outrider.targets.cache.slots import SlotCache

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, SlotCache]
"""Taps and their positions, anchors and theirs, mask and cache of one pass; see `Backbone`."""


class BackboneDrafter(FeatureDrafter, ABC):
    """Drafts from one pass of a backbone per step, which also reads the buffered taps of committed tokens."""

    def __init__(self, model: Any, limit: int):
        self.backbone, self.block = model.backbone, model.config.block
        super().__init__(model, limit, self.block + 1)
        if model.reduced is not None:
            prepacked.pack(model.reduced.head(model.dtype))

    def allocate(self, cache: Cache) -> FeatureMemory:
        # besides the context: the block, and as many columns again, since slots bring unequal numbers of new taps
        length = cache.length + 2 * self.backbone.width
        return FeatureMemory(cache.slots, length, len(self.backbone.layers), self.model)

    def inputs(self, taps: Tensor, counts: Sequence[int], state: DecodeState, cache: SlotCache) -> Inputs:
        """What a model reads in the open pass of `cache` after taps [B, C, T, H], of which counts[b] are real."""
        new, width, window = taps.shape[1], self.backbone.width, self.backbone.window
        real_taps = sent(counts, state.device)
        mask = None  # where no slot has padding and all are equally long, every row attends to everything
        if window is not None and cache.end > window:
            layout = PassLayout(cache.starts, cache.columns, new + width)
            mask = additive(seen(layout, new, real_taps, width, window), self.backbone.fc.weight.dtype)
        elif not cache.is_even or min(counts) < new:
            mask = cache.mask(real(new, real_taps, width), self.backbone.fc.weight.dtype)
        return taps, cache.positions()[:, :new], state.anchor, cache.starts + real_taps, mask, cache

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        taps, [count] = memory.features.take([row])
        memory.kv_cache.open([row], count)
        self.backbone.remember(taps, memory.kv_cache.positions(), memory.kv_cache)
        memory.kv_cache.append([count])


class StaticBackbone(Unread, ABC):
    """The same in a static step: the taps of the last step wait in a tensor, right-padded."""

    def __init__(self, drafter: BackboneDrafter, memory: FeatureMemory):
        super().__init__(drafter, memory, drafter.block + 1)
        self.model, self.backbone = drafter.model, drafter.backbone
        if self.model.reduced is not None:
            self.borrowed = [self.model.reduced.head(self.model.dtype)]
        kv_cache = memory.kv_cache
        if not kv_cache.layers:  # buffers are made by the first pass
            kv_cache.open([0], 1)
            self.backbone.remember(self.features[:1, :1], self.start[:1, None], kv_cache)
        self.caches = [StaticCache(kv_cache, self.width + self.backbone.width)]

    def inputs(self, slots: StaticSlots) -> Inputs:
        """What a model reads in this step."""
        new, width, [cache] = self.width, self.backbone.width, self.caches
        layout = PassLayout(self.start, cache.columns, new + width)
        mask = additive(seen(layout, new, self.counts, width, self.backbone.window), self.backbone.fc.weight.dtype)
        at, anchors_at = self.start[:, None] + torch.arange(new, device=mask.device), self.start + self.counts
        there: Any = cache.within(layout)
        return self.features, at, slots.anchor, anchors_at, mask, there

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        self.take(committed, self.model.target_states(scores))


def is_greedy(state: DecodeState) -> bool:
    """Every live slot takes the likeliest of all tokens."""
    return state.judge.temperature is None and not state.judge.bans
