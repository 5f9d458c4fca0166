"""Drafters that feed their own output back, in a static step; see `recurrent`.

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
    """Reads pairs in a static step; those of the last step are in tensors, right-padded.

    The next drafted tokens overwrite each module's keys of the padding, and the next step's pairs overwrite those.
    """

    def __init__(self, drafter: Any, memory: Any, length: int, most: int, read: int):
        """drafter, memory: as in `recurrent`.  length: drafted levels; most: maximum number of unread pairs of a slot;
        read: drafted tokens whose keys are stored."""
        super().__init__(drafter, memory, most)
        model = drafter.model
        self.model, self.length, kv_cache = model, length, memory.kv_cache
        self.tokens = self.counts.new_zeros(len(self.counts), self.width)
        """[B, W], the tokens of the unread pairs."""
        self.outputs = memory.outputs
        if not kv_cache.layers:  # the first pass creates the buffers
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
        """Read the unread pairs.  Returns [B], whether any pair of a slot was ever read."""
        model, counts, modules = self.model, self.counts, self.model.num_modules
        is_ready, latest_outputs = self.start + counts > 0, self.outputs
        features, before = model.features(self.features), latest_outputs[:, None].chunk(modules, -1)
        outputs: list[Tensor] = []
        for module in range(modules):
            if module:  # the previous module's output for the previous token
                features = torch.cat([before[module - 1], outputs[-1][:, :-1]], 1)
            outputs.append(self.step(module, self.tokens, features, self.start))
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, latest_outputs.shape[1])
        latest = torch.cat(outputs, -1).gather(1, last)[:, 0]
        latest_outputs.copy_(torch.where((counts > 0)[:, None], latest, latest_outputs))
        self.read_all()
        return is_ready

    def first(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] after each slot's last pair; hidden [B, 1, D * H] are the modules' outputs for it."""
        logits: Tensor = self.model.logits(hidden[:, 0, : self.model.target.spec.hidden])
        return logits

    def step(self, module: int, tokens: Tensor, features: Tensor, start: Tensor, tree: Tree | None = None) -> Tensor:
        """One module's pass over tokens [B, n] after the first start[b] columns of each slot.

        tree: of all nodes after these columns, of which `tokens` are the last n; a chain of the tokens by default.
        """
        model, [cache], width = self.model, self.caches, tokens.shape[1]
        if tree is None:
            tree = Tree(*chain_rows(tokens.shape[0], width, start.device))
        nodes, limit = tree.mask.shape[-1], model.limits[module]
        layout = PassLayout(start, cache.columns, nodes)
        at = layout.positions(tree.depths[:, -width:])
        mask = layout.mask(tree.mask[:, -width:])
        if limit is not None:
            mask = mask & layout.limit_mask(limit, tree.depths)[:, -width:]
        # as in `recurrent._mask`: module m lacks the first m pairs
        mask = mask & ~((cache.columns < module) & (at >= module)[:, :, None])
        writes = PassLayout(start + (nodes - width), cache.columns, width)
        attend = attending(additive(mask, model.dtype), cache.within(writes))
        output: Tensor = model.step(module, model.target.embed(tokens), features, model.cos_sin(at), attend)
        return output

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        at = self.take(committed, self.model.target_states(scores))
        new = committed.tokens.gather(1, at.clamp(0, committed.tokens.shape[1] - 1))
        self.tokens.copy_(torch.where(at >= 0, new, self.tokens))


class StaticChain(StaticRecurrent):
    """Reads pairs and drafts a chain."""

    def __init__(self, drafter: Any, memory: Any, length: int, is_greedy: bool):
        super().__init__(drafter, memory, length, length + 1, length)
        self.parents, self.has_q = range(-1, length - 1), not is_greedy

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        is_ready, model, modules = self.read(), self.model, self.model.num_modules
        hidden, tokens, q = self.outputs[:, None], list[Tensor](), list[Tensor]()
        logits = self.first(hidden)
        for depth in range(self.length):
            token, token_q = rule.drawn(logits, slots, depth)
            tokens.append(token)
            if token_q is not None:
                q.append(token_q)
            if depth + 1 < self.length:
                outputs, first = list(hidden.chunk(modules, -1)), min(depth + 1, modules - 1)
                before = list(outputs)
                for module in range(first, modules):
                    features = before[module - 1 if depth + 1 < modules else module]
                    outputs[module] = self.step(module, token[:, None], features, self.start + depth)
                hidden, logits = torch.cat(outputs, -1), model.logits(outputs[first])[:, 0]
        sizes = sizes_of(slots, self.length, is_ready)
        return Proposed(torch.stack(tokens, 1), sizes, torch.stack(q, 1) if q else None)


class StaticTree(Branched, StaticRecurrent):
    """Reads pairs and drafts a tree."""

    def __init__(self, drafter: Any, memory: Any, branching: Branching, is_greedy: bool):
        config, most = branching.config, branching.limit
        read = min(config.width, most) * (config.length - 1) if is_greedy else len({*branching.parents} - {-1})
        super().__init__(drafter, memory, config.length, most + 1, read)
        self.branch(branching, is_greedy)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        is_ready, expand = self.read(), self._expand()
        return self.grown(self.first(self.outputs[:, None]), expand, slots, rule, is_ready)

    def _expand(self) -> trees.Expand:
        """Like `recurrent.Rollout.expand`."""
        model, modules, outputs = self.model, self.model.num_modules, [self.outputs[:, None]]

        def expand(tree: Draft, new: int) -> Tensor:
            level, hidden = len(outputs), torch.cat(outputs, 1)
            above, first = tree.parents[:, -new:, None] + 1, min(level, modules - 1)
            before = hidden.gather(1, above.expand(-1, -1, hidden.shape[-1])).chunk(modules, -1)
            mask, depths = tree.rows()
            rows, states = Tree(mask[:, 1:, 1:], depths[:, 1:] - 1), list(before)
            for module in range(first, modules):
                features = before[module - 1 if level < modules else module]
                states[module] = self.step(module, tree.tokens[:, -new:], features, self.start, rows)
            outputs.append(torch.cat(states, -1))
            logits: Tensor = model.logits(states[first])
            return logits

        return expand
