"""The static step's part of drafters that feed their own output back; see `recurrent`.

B slots, n positions, C unread pairs, D modules, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Scores
from outrider.decoding.static import Committed, StaticRule, StaticSlots, above, fixed, sizes_of
from outrider.nn.blocks import attending
from outrider.nn.static import Unread
from outrider.targets.attention_mask import PassLayout, additive
from outrider.targets.static_pass import StaticCache


class StaticRollout(Unread):
    """Pairs and a chain in a static step: the pairs of the last step wait in tensors, right-padded.

    Each module's keys of padding are written over by the tokens drafted next, and those by the next step's pairs.
    """

    def __init__(self, model: Any, memory: Any, length: int):
        """model, memory: as in `recurrent`."""
        super().__init__(memory.features, length + 1)
        self.model, self.length, kv_cache = model, length, memory.kv_cache
        self.start = torch.zeros_like(self.counts)
        """[B], pairs that each slot has read."""
        self.tokens = self.counts.new_zeros(len(self.counts), length + 1)
        """[B, C], the tokens of the unread pairs."""
        self.outputs = memory.outputs
        self.parents = range(-1, length - 1)
        self.above = above(self.parents, len(self.counts), self.counts.device)
        if not kv_cache.layers:  # buffers are made by the first pass
            kv_cache.open([0], 1)
            states, at = model.features(self.features[:1, :1]), self.start[:1, None]
            for module in range(model.num_modules):
                words = model.target.embed(self.tokens[:1, :1])
                model.step(module, words, states, model.cos_sin(at), attending(None, kv_cache))
        self.caches = [StaticCache(kv_cache, 2 * length + 2)]

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        for row in rows:
            begin = self.buffer.read[row] + 1
            self.start[row] = begin - 1
            for i, token in enumerate(state.tokens[row][begin : begin + self.length + 1]):
                self.tokens[row, i] = token
        super().enter(rows, state)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Draft:
        """Read the unread pairs, then a drafted token at a time."""
        model, counts, modules = self.model, self.counts, self.model.num_modules
        known, outputs = self.start + counts > 0, self.outputs
        features, before, found = (
            model.features(self.features),
            outputs[:, None].chunk(modules, -1),
            list[Tensor](),
        )
        for module in range(modules):
            if module:  # the output of the module before for the token before
                features = torch.cat([before[module - 1], found[-1][:, :-1]], 1)
            found.append(self._step(module, self.tokens, features, self.start, slots))
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, outputs.shape[1])
        read = torch.cat(found, -1).gather(1, last)[:, 0]
        outputs.copy_(torch.where((counts > 0)[:, None], read, outputs))
        self.start.add_(counts)
        drafted, q = self._drafted(outputs[:, None], slots, rule)
        sizes = sizes_of(slots, self.length, known)
        return fixed(torch.stack(drafted, 1), self.parents, self.above, sizes, torch.stack(q, 1) if q else None)

    def _drafted(self, hidden: Tensor, slots: StaticSlots, rule: StaticRule) -> tuple[list[Tensor], list[Tensor]]:
        """A chain after outputs hidden [B, 1, D * H] of each slot's last pair: tokens and q."""
        model, modules, tokens, q = self.model, self.model.num_modules, list[Tensor](), list[Tensor]()
        logits = model.logits(hidden[:, 0, : model.target.spec.hidden])
        for depth in range(self.length):
            token, own = rule.drawn(logits, slots, depth)
            tokens.append(token)
            q.extend([] if own is None else [own])
            if depth + 1 < self.length:
                found, first = list(hidden.chunk(modules, -1)), min(depth + 1, modules - 1)
                before = list(found)
                for module in range(first, modules):
                    features = before[module - 1 if depth + 1 < modules else module]
                    found[module] = self._step(module, token[:, None], features, self.start + depth, slots)
                hidden, logits = torch.cat(found, -1), model.logits(found[first])[:, 0]
        return tokens, q

    def _step(self, module: int, tokens: Tensor, features: Tensor, start: Tensor, slots: StaticSlots) -> Tensor:
        """One module's pass over tokens [B, n] after the first start[b] columns of each slot."""
        model, [cache], width = self.model, self.caches, tokens.shape[1]
        order, limit = torch.arange(width, device=start.device), model.limits[module]
        layout = PassLayout(start, cache.columns, width)
        at = layout.positions(order)
        mask = layout.mask((order[:, None] >= order).expand(tokens.shape[0], -1, -1))
        if limit is not None:
            mask = mask & layout.limit_mask(limit, order[None])
        # as in `_mask`: the first pairs are unknown to later modules
        mask = mask & ~((cache.columns < module) & (at >= module)[:, :, None])
        attend = attending(additive(mask, model.dtype), cache.within(layout))
        found: Tensor = model.step(module, model.target.embed(tokens), features, model.cos_sin(at), attend)
        return found

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        self.take(committed, self.model.target_states(scores))
        self.tokens.copy_(committed.tokens)
