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
from outrider.decoding.static import Committed, StaticRule, StaticSlots, fixed, sizes_of
from outrider.nn.blocks import attending
from outrider.nn.static import Unread
from outrider.targets.attention_mask import PassLayout, TracedCache, additive
from outrider.targets.static_pass import buffers_of


class StaticRollout:
    """Pairs and a chain in a static step: the pairs of the last step wait in tensors, right-padded.

    Each module's keys of padding are written over by the tokens drafted next, and those by the next step's pairs.
    """

    def __init__(self, model: Any, memory: Any, length: int):
        """model, memory: as in `recurrent`."""
        self.model, self.memory, self.length = model, memory, length
        self.unread = Unread(memory.features, length + 1)
        counts = self.unread.counts
        self.start = torch.zeros_like(counts)
        """[B], pairs that each slot has read."""
        self.tokens = counts.new_zeros(len(counts), length + 1)
        """[B, C], the tokens of the unread pairs."""
        self.parents, self.caches, self.room = range(-1, length - 1), [memory.kv_cache], 2 * length + 2
        self.tensors = [*self.unread.tensors, self.start, self.tokens, memory.outputs]
        self.above = torch.arange(-1, length - 1, device=counts.device)
        if not memory.kv_cache.layers:  # buffers are made by the first pass
            memory.kv_cache.open([0], 1)
            states, at = model.features(self.unread.features[:1, :1]), self.start[:1, None]
            for module in range(model.num_modules):
                words = model.target.embed(self.tokens[:1, :1])
                model.step(module, words, states, model.cos_sin(at), attending(None, memory.kv_cache))

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        for row in rows:
            begin = self.memory.features.read[row] + 1
            self.start[row] = begin - 1
            for i, token in enumerate(state.tokens[row][begin : begin + self.length + 1]):
                self.tokens[row, i] = token
        self.unread.enter(rows)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Draft:
        """Read the unread pairs, then a drafted token at a time."""
        model, counts, modules = self.model, self.unread.counts, self.model.num_modules
        known, outputs = self.start + counts > 0, self.memory.outputs
        features, before, found = (
            model.features(self.unread.features),
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
        model, cache, width = self.model, self.memory.kv_cache, tokens.shape[1]
        order, limit = torch.arange(width, device=start.device), model.limits[module]
        columns = torch.arange(min(cache.stacks.columns, slots.columns + self.room), device=start.device)
        layout = PassLayout(start, columns, width)
        at = layout.positions(order)
        mask = layout.mask((order[:, None] >= order).expand(len(tokens), -1, -1))
        if limit is not None:
            mask = mask & layout.limit_mask(limit, order[None])
        # as in `_mask`: the first pairs are unknown to later modules
        mask = mask & ~((columns < module) & (at >= module)[:, :, None])
        there = TracedCache(cache.layers, buffers_of(cache), layout)
        attend = attending(additive(mask, model.dtype), there)
        found: Tensor = model.step(module, model.target.embed(tokens), features, model.cos_sin(at), attend)
        return found

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        self.unread.observe(committed, self.model.target_states(scores))
        self.tokens.copy_(committed.tokens)
