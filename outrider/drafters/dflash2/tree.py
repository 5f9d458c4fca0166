"""Serving trees of a lattice: the likeliest paths at temperature 0, else siblings drawn without replacement.

B live slots, N nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState
from outrider.fast.static.step import Proposed, StaticRule, StaticSlots, sizes_of
from outrider.kernels import prepacked
from outrider.nn.drafting import lattice as lattices
from outrider.nn.drafting import serving, trees
from outrider.nn.drafting.block_drafter import BackboneDrafter, Inputs, StaticBackbone, is_greedy
from outrider.nn.drafting.lattice import Lattice
from outrider.nn.memory import FeatureMemory


class LatticeDrafter(BackboneDrafter):
    """Drafts a tree of the config's `nodes` per slot."""

    def __init__(self, model: Any):
        """model: a `dflash2.Model`."""
        config = model.config
        self.nodes = lattices.number_of_nodes(config.nodes, config.block, config.candidates)
        self.parents = trees.shape(config.candidates, config.block, self.nodes)
        """The shape of a drawn tree."""
        super().__init__(model, self.nodes)

    def lattice(self, inputs: Inputs) -> Lattice:
        """The lattice of one pass."""
        taps, taps_at, anchors, anchors_at, mask, cache = inputs
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, cache)[:, 0]
        lattice: Lattice = self.model.lattice(states, anchors)
        return lattice

    def spread(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Scores of these tokens as logits [..., V] over the target's vocabulary."""
        return lattices.spread(scores, ids, self.model.target.spec.vocabulary)

    @torch.inference_mode()
    def propose(self, memory: FeatureMemory, state: DecodeState, budget: Tensor) -> Draft:
        rows, cache, most = state.rows, memory.kv_cache, int(budget.max())
        self.catch_up(memory, rows, state)
        taps, counts = memory.features.take(rows)
        cache.open(rows, taps.shape[1] + self.backbone.width)
        with prepacked.enabled():
            lattice = self.lattice(self.inputs(taps, counts, state, cache))
        cache.append(counts)
        if not most:
            return Draft.empty(len(rows), state.device)
        if is_greedy(state):
            tokens, parents = lattices.best_first(lattice, min(most, self.nodes))
            return Draft(tokens, parents, budget.clamp(max=tokens.shape[1]))
        first, expand = lattices.expand(lattice, self.spread)
        config = self.model.config
        shape: Any = {"width": config.candidates, "depth": config.block, "parents": self.parents}
        return serving.possible(serving.tree(first, expand, budget, state, **shape), state)

    def static(self, memory: FeatureMemory, is_greedy: bool) -> StaticLattice:
        return StaticLattice(self, memory, is_greedy)


class StaticLattice(StaticBackbone):
    """A `LatticeDrafter` in a static step."""

    def __init__(self, drafter: LatticeDrafter, memory: FeatureMemory, is_greedy: bool):
        super().__init__(drafter, memory)
        self.trees, self.varies, self.has_q = drafter, is_greedy, not is_greedy
        self.depth = min(drafter.block, drafter.nodes)
        if not is_greedy:
            self.parents = drafter.parents

    @property
    def nodes(self) -> int:
        return self.trees.nodes if self.varies else len(self.parents)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        lattice, sizes = self.trees.lattice(self.inputs(slots)), sizes_of(slots, self.nodes)
        self.read_all()
        if self.varies:
            tokens, parents = lattices.best_first(lattice, self.nodes)
            return Proposed(tokens, sizes, parents=parents)
        first, expand = lattices.expand(lattice, self.trees.spread)
        distribution = functools.partial(rule.distribution, slots=slots)
        tokens, q = trees.drawn(first, expand, self.parents, distribution, slots.streams)
        return Proposed(tokens, sizes, q)
