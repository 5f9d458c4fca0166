"""Drafters that run a backbone of blocks once per step, plain or static.

The pass reads the buffered taps of committed tokens and a block under each slot's anchor.

B live slots, C unread taps, T target layers, H hidden size, K tokens of a block, N nodes, V vocabulary.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft, to_device
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState, Scores
from outrider.fast.block import CompiledBlock, Drawn, Greedy, real, seen
from outrider.fast.static.step import Committed, Proposed, StaticRule, StaticSlots, sizes_of
from outrider.fast.static.target import StaticCache
from outrider.kernels import prepacked
from outrider.nn.drafting.serving import Sampler
from outrider.nn.drafting.static import Unread
from outrider.nn.drafting.trees import RankTree
from outrider.nn.memory import FeatureDrafter, FeatureMemory
from outrider.sampling.judge import SamplingJudge
from outrider.targets.cache.attention_mask import PassLayout, additive
from outrider.targets.cache.slots import SlotCache
from outrider.targets.quantised import dtype_of

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, SlotCache]
"""Taps, their positions, anchors, their positions, mask and cache of one pass; see `block_model.Backbone`."""


class BackboneDrafter(FeatureDrafter, ABC):
    """Drafts from one pass of a backbone per step."""

    def __init__(self, model: Any, limit: int):
        self.backbone, self.block = model.backbone, model.config.block
        super().__init__(model, limit, self.block + 1)
        if model.reduced is not None:
            prepacked.pack(model.reduced.head(model.dtype))

    def allocate(self, cache: Cache) -> FeatureMemory:
        # the context, the block, and as many columns again, since slots have unequal numbers of new taps
        length = cache.length + 2 * self.backbone.width
        return FeatureMemory(cache.slots, length, len(self.backbone.layers), self.model)

    def inputs(self, taps: Tensor, counts: Sequence[int], state: DecodeState, cache: SlotCache) -> Inputs:
        """What the model reads in the open pass of `cache` for taps [B, C, T, H], of which counts[b] are real."""
        new, width, window = taps.shape[1], self.backbone.width, self.backbone.window
        real_taps = to_device(counts, state.device)
        mask = None  # if no slot has padding and all are equally long, every row attends to everything
        if window is not None and cache.end > window:
            layout = PassLayout(cache.starts, cache.columns, new + width)
            mask = additive(seen(layout, new, real_taps, width, window), dtype_of(self.backbone.fc))
        elif not cache.is_even or min(counts) < new:
            mask = cache.mask(real(new, real_taps, width), dtype_of(self.backbone.fc))
        return taps, cache.positions()[:, :new], state.anchor, cache.starts + real_taps, mask, cache

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        taps, [count] = memory.features.take([row])
        memory.kv_cache.open([row], count)
        self.backbone.remember(taps, memory.kv_cache.positions(), memory.kv_cache)
        memory.kv_cache.append([count])


class StaticBackbone(Unread, ABC):
    """A `BackboneDrafter` in a static step: the unread taps are in a tensor, right-padded."""

    def __init__(self, drafter: BackboneDrafter, memory: FeatureMemory):
        super().__init__(drafter, memory, drafter.block + 1)
        self.model, self.backbone = drafter.model, drafter.backbone
        if self.model.reduced is not None:
            self.borrowed = [self.model.reduced.head(self.model.dtype)]
        kv_cache = memory.kv_cache
        if not kv_cache.layers:  # the first pass creates the buffers
            kv_cache.open([0], 1)
            self.backbone.remember(self.features[:1, :1], self.start[:1, None], kv_cache)
        self.caches = [StaticCache(kv_cache, self.width + self.backbone.width)]

    def inputs(self, slots: StaticSlots) -> Inputs:
        """What the model reads in this step."""
        new, width, [cache] = self.width, self.backbone.width, self.caches
        layout = PassLayout(self.start, cache.columns, new + width)
        mask = additive(seen(layout, new, self.counts, width, self.backbone.window), dtype_of(self.backbone.fc))
        at, anchors_at = self.start[:, None] + torch.arange(new, device=mask.device), self.start + self.counts
        layers: Any = cache.within(layout)
        return self.features, at, slots.anchor, anchors_at, mask, layers

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        self.take(committed, self.model.target_states(scores))


def is_greedy(state: DecodeState) -> bool:
    """Whether every live slot uses the likeliest token and no token is banned."""
    return state.judge.temperature is None and not state.judge.bans


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class BlockDrafter(BackboneDrafter):
    """Drafts one block per slot, with siblings if its config has any."""

    def __init__(self, model: Any):
        """model: a `block_model.BlockModel`."""
        self.tree = sibling_tree(model.config.block, model.config.siblings)
        super().__init__(model, len(self.tree.paths))
        # a greedy request's tree has siblings, for which there is no confidence
        self.confidence_before_draw = model.has_confidence and self.limit == self.block
        self.greedy = CompiledBlock(Greedy(model, self.tree), model.sources)
        self.drawn = CompiledBlock(Drawn(model), model.sources)
        self.steps = self.greedy, self.drawn

    @torch.inference_mode()
    def propose(self, memory: FeatureMemory, state: DecodeState, budget: Tensor) -> Draft:
        rows, cache = state.rows, memory.kv_cache
        self.catch_up(memory, rows, state)
        taps, counts = memory.features.take(rows)
        step = self._compiled(state)
        if step is not None and step.fits(cache, rows, max(2, taps.shape[1]) + self.backbone.width):
            tokens, q, confidence = step.run(taps, state, counts, cache)
        else:
            cache.open(rows, taps.shape[1] + self.backbone.width)
            tokens, q, confidence = self._run(taps, state, counts, cache)
        cache.append(counts)
        if is_greedy(state) and self.limit > self.block:
            return self.tree.draft(tokens, budget)
        return Draft.chain(tokens, budget.clamp(max=self.block), q, confidence)

    def _run(
        self, taps: Tensor, state: DecodeState, counts: list[int], cache: SlotCache
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `CompiledBlock.run`."""
        sampler = Sampler(state)
        pick: Callable[[Tensor, int], Tensor] | None = None
        if not is_greedy(state):
            pick = lambda logits, _slot: sampler.next(self.model.whole(logits))
        with prepacked.enabled():
            tokens, logits, confidence = self.model(*self.inputs(taps, counts, state, cache), pick)
        if pick is None and not self.tree.is_chain:
            tokens = self.model.named(self.tree.choices(logits))
        return tokens, torch.stack(sampler.q, 1) if sampler.q else None, confidence

    def _compiled(self, state: DecodeState) -> CompiledBlock | None:
        """The compiled step for these requests; None if there is none."""
        if is_greedy(state):
            return self.greedy
        # `is_tempered` (all slots sample from all tokens) comes last: without a graph it would only wait for a GPU
        is_drawn = (
            self.drawn.graph is not None and isinstance(state.judge, SamplingJudge) and state.judge.settings.is_tempered
        )
        return self.drawn if is_drawn and not state.judge.bans else None

    def static(self, memory: FeatureMemory, is_greedy: bool) -> StaticBlock:
        return StaticBlock(self, memory, self.tree if is_greedy else sibling_tree(self.block, ()), is_greedy)


class StaticBlock(StaticBackbone):
    """A block and its siblings in a static step."""

    def __init__(self, drafter: BlockDrafter, memory: FeatureMemory, tree: RankTree, is_greedy: bool):
        super().__init__(drafter, memory)
        self.tree, self.parents, self.has_q = tree, tree.parents, not is_greedy
        self.has_confidence = self.model.has_confidence and tree.is_chain
        self.choices = tree.indices.to(self.start.device).repeat(len(self.start), 1)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        q: list[Tensor] = []

        def pick(logits: Tensor, slot: int) -> Tensor:
            token, token_q = rule.drawn(self.model.whole(logits), slots, slot)
            if token_q is not None:
                q.append(token_q)
            return token

        tokens, logits, confidence = self.model(*self.inputs(slots), pick)
        if not self.tree.is_chain:
            tokens = self.model.named(logits.topk(self.tree.width, -1).indices.flatten(1).gather(1, self.choices))
        self.read_all()
        return Proposed(tokens, sizes_of(slots, len(self.parents)), torch.stack(q, 1) if q else None, confidence)


def sibling_tree(block: int, siblings: Sequence[int]) -> RankTree:
    """A block's chain with siblings at its first slots.

    The sibling of rank r at slot k is ordered like the chain's slot k + 2 r, which measurements show to be about as
    likely.
    """
    nodes = [(k, 0) for k in range(block)]
    nodes += [(k, rank + 1) for k, count in enumerate(siblings) for rank in range(count)]
    nodes.sort(key=lambda node: (node[0] + 2 * node[1], node[1]))
    return RankTree(tuple((0,) * slot + (rank,) for slot, rank in nodes))
