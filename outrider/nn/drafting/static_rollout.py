"""The static step's part of drafters that feed their own output back; see `recurrent`.

B slots, n positions, W columns for unread pairs, D modules, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft, chain_rows
from outrider.decoding.state import DecodeState, Scores
from outrider.fast.static.step import Committed, Proposed, StaticRule, StaticSlots, sizes_of
from outrider.fast.static.target import StaticCache
from outrider.nn.blocks import attending
from outrider.nn.drafting import trees
from outrider.nn.drafting.serving import Branching
from outrider.nn.drafting.static import Branched, Unread
from outrider.targets.cache.attention_mask import PassLayout, Tree, additive


class StaticRecurrent(Unread):
    """Pairs in a static step: those of the last step wait in tensors, right-padded.

    Each module's keys of padding are written over by the tokens drafted next, and those by the next step's pairs.
    """

    def __init__(self, drafter: Any, memory: Any, length: int, most: int, read: int):
        """drafter, memory: as in `recurrent`.  length: levels that are drafted; most: unread pairs of a slot; read:
        drafted tokens whose keys are stored."""
        super().__init__(drafter, memory, most)
        model = drafter.model
        self.model, self.length, kv_cache = model, length, memory.kv_cache
        self.tokens = self.counts.new_zeros(len(self.counts), self.width)
        """[B, W], the tokens of the unread pairs."""
        self.outputs = memory.outputs
        if not kv_cache.layers:  # buffers are made by the first pass
            kv_cache.open([0], 1)
            states, at = model.features(self.features[:1, :1]), self.start[:1, None]
            for module in range(model.num_modules):
                words = model.target.embed(self.tokens[:1, :1])
                model.step(module, words, states, model.cos_sin(at), attending(None, kv_cache))
        self.caches = [StaticCache(kv_cache, self.width + read + 1)]

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        super().enter(rows, state)
        for row in rows:
            begin = int(self.start[row]) + 1
            for i, token in enumerate(state.tokens[row][begin : begin + self.width]):
                self.tokens[row, i] = token

    def read(self) -> Tensor:
        """Read the unread pairs.  Returns [B], whether anything of a slot was ever read."""
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
            found.append(self.step(module, self.tokens, features, self.start))
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, outputs.shape[1])
        latest = torch.cat(found, -1).gather(1, last)[:, 0]
        outputs.copy_(torch.where((counts > 0)[:, None], latest, outputs))
        self.read_all()
        return known

    def first(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] after each slot's last pair, of outputs hidden [B, 1, D * H]."""
        found: Tensor = self.model.logits(hidden[:, 0, : self.model.target.spec.hidden])
        return found

    def step(self, module: int, tokens: Tensor, features: Tensor, start: Tensor, tree: Tree | None = None) -> Tensor:
        """One module's pass over tokens [B, n] after the first start[b] columns of each slot; with a tree of all nodes
        from there on, over its last n."""
        model, [cache], width = self.model, self.caches, tokens.shape[1]
        if tree is None:
            tree = Tree(*chain_rows(tokens.shape[0], width, start.device))
        nodes, limit = tree.mask.shape[-1], model.limits[module]
        layout = PassLayout(start, cache.columns, nodes)
        at = layout.positions(tree.depths[:, -width:])
        mask = layout.mask(tree.mask[:, -width:])
        if limit is not None:
            mask = mask & layout.limit_mask(limit, tree.depths)[:, -width:]
        # as in `_mask`: the first pairs are unknown to later modules
        mask = mask & ~((cache.columns < module) & (at >= module)[:, :, None])
        writes = PassLayout(start + (nodes - width), cache.columns, width)
        attend = attending(additive(mask, model.dtype), cache.within(writes))
        found: Tensor = model.step(module, model.target.embed(tokens), features, model.cos_sin(at), attend)
        return found

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        at = self.take(committed, self.model.target_states(scores))
        new = committed.tokens.gather(1, at.clamp(0, committed.tokens.shape[1] - 1))
        self.tokens.copy_(torch.where(at >= 0, new, self.tokens))


class StaticChain(StaticRecurrent):
    """Pairs, and a chain after them."""

    def __init__(self, drafter: Any, memory: Any, length: int, is_greedy: bool):
        super().__init__(drafter, memory, length, length + 1, length)
        self.parents, self.has_q = range(-1, length - 1), not is_greedy

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        known, model, modules = self.read(), self.model, self.model.num_modules
        hidden, tokens, q = self.outputs[:, None], list[Tensor](), list[Tensor]()
        logits = self.first(hidden)
        for depth in range(self.length):
            token, own = rule.drawn(logits, slots, depth)
            tokens.append(token)
            q.extend([] if own is None else [own])
            if depth + 1 < self.length:
                found, first = list(hidden.chunk(modules, -1)), min(depth + 1, modules - 1)
                before = list(found)
                for module in range(first, modules):
                    features = before[module - 1 if depth + 1 < modules else module]
                    found[module] = self.step(module, token[:, None], features, self.start + depth)
                hidden, logits = torch.cat(found, -1), model.logits(found[first])[:, 0]
        sizes = sizes_of(slots, self.length, known)
        return Proposed(torch.stack(tokens, 1), sizes, torch.stack(q, 1) if q else None)


class StaticTree(Branched, StaticRecurrent):
    """Pairs, and a tree after them."""

    def __init__(self, drafter: Any, memory: Any, branching: Branching, is_greedy: bool):
        config, most = branching.config, branching.limit
        read = min(config.width, most) * (config.length - 1) if is_greedy else len({*branching.parents} - {-1})
        super().__init__(drafter, memory, config.length, most + 1, read)
        self.branch(branching, is_greedy)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        known, expand = self.read(), self._expand()
        return self.grown(self.first(self.outputs[:, None]), expand, slots, rule, known)

    def _expand(self) -> trees.Expand:
        """As `recurrent.Rollout.expand`."""
        model, modules, outputs = self.model, self.model.num_modules, [self.outputs[:, None]]

        def expand(tree: Draft, new: int) -> Tensor:
            level, hidden = len(outputs), torch.cat(outputs, 1)
            above, first = tree.parents[:, -new:, None] + 1, min(level, modules - 1)
            before = hidden.gather(1, above.expand(-1, -1, hidden.shape[-1])).chunk(modules, -1)
            mask, depths = tree.rows()
            rows, found = Tree(mask[:, 1:, 1:], depths[:, 1:] - 1), list(before)
            for module in range(first, modules):
                features = before[module - 1 if level < modules else module]
                found[module] = self.step(module, tree.tokens[:, -new:], features, self.start, rows)
            outputs.append(torch.cat(found, -1))
            logits: Tensor = model.logits(found[first])
            return logits

        return expand
