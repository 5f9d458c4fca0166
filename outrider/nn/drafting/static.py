"""Shared parts of drafters in a static step: the counterparts of `memory` and `serving`, in persistent tensors.

B slots, W columns for unread features, N nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.state import DecodeState
from outrider.fast.static.step import Committed, Proposed, StaticDrafter, StaticRule, StaticSlots, sizes_of
from outrider.nn.drafting import trees
from outrider.nn.drafting.serving import Branching
from outrider.nn.memory import FeatureDrafter, FeatureMemory


class Unread(StaticDrafter):
    """A drafter that reads the features of the last step in its next draft."""

    def __init__(self, drafter: FeatureDrafter, memory: FeatureMemory, width: int):
        """width: maximum number of unread features of a slot; one more column is for a step without a draft."""
        self.drafter, self.memory, self.width = drafter, memory, width + 1
        self.features = memory.features.new(self.width)
        """[B, W, ...], right-padded."""
        self.counts = torch.zeros(len(self.features), dtype=torch.int64, device=self.features.device)
        """[B], how many are real."""
        self.start = torch.zeros_like(self.counts)
        """[B], how many were read."""

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        """Take over these slots' unread features; if there are many, as after a long text without drafts, all but the
        last are read first."""
        self.drafter.catch_up(self.memory, rows, state)
        for row in rows:
            self.start[row] = self.memory.features.read[row]
            taken, [count] = self.memory.features.take([row])
            self.features[row, :count] = taken[0]
            self.counts[row] = count

    def leave(self, rows: Sequence[int], state: DecodeState) -> None:
        places = zip(rows, self.counts[rows].tolist(), self.start[rows].tolist(), strict=True)
        for row, count, start in places:
            self.memory.features.put_back(row, self.features[row, :count].clone(), start)
            self.memory.kv_cache.lengths[row] = start

    def read_all(self) -> None:
        """Mark all unread features as read."""
        self.start.add_(self.counts)
        self.counts.zero_()

    def take(self, committed: Committed, states: Tensor) -> Tensor:
        """Add the features of the committed tokens.  states [B, n+1, ...] of the verified pass.

        Returns [B, W], the index of each column's committed token; below 0 for columns from before.
        """
        order = torch.arange(self.width, device=states.device)
        at = order - self.counts[:, None]
        rows = committed.rows.gather(1, at.clamp(0, committed.rows.shape[1] - 1))
        trailing = [1] * (states.dim() - 2)
        new = states.gather(1, rows.view(*rows.shape, *trailing).expand(-1, -1, *states.shape[2:]))
        is_new = (at >= 0).view(*at.shape, *trailing)
        self.features.copy_(torch.where(is_new, new.to(self.features), self.features))
        self.counts.add_(committed.counts)
        return at


class Branched(StaticDrafter):
    """Grows a tree level by level, like `serving.tree`: the likeliest paths, or sampled siblings in a fixed shape."""

    code = (trees,)
    branching: Branching

    def branch(self, branching: Branching, is_greedy: bool) -> None:
        """Set the shape of the trees; called once, by the constructor."""
        self.branching, self.varies, self.depth = branching, is_greedy, branching.config.length
        self.has_q = not is_greedy
        if not is_greedy:
            self.parents = branching.parents

    @property
    def nodes(self) -> int:
        if not self.varies:
            return len(self.parents)
        config = self.branching.config
        return trees.number_of_likeliest(self.branching.limit, width=config.width, depth=config.length)

    def grown(
        self, first: Tensor, expand: trees.Expand, slots: StaticSlots, rule: StaticRule, is_ready: Tensor | None = None
    ) -> Proposed:  # fmt: skip
        """first [B, V], logits after the anchor; is_ready [B] as in `sizes_of`."""
        config, sizes = self.branching.config, sizes_of(slots, self.nodes, is_ready)
        if self.varies:
            shape = {"width": config.width, "depth": config.length}
            tokens, parents = trees.likeliest(first, expand, self.branching.limit, **shape)
            return Proposed(tokens, sizes, parents=parents)
        distribution = functools.partial(rule.distribution, slots=slots)
        tokens, q = trees.drawn(first, expand, self.parents, distribution, slots.streams, config.replacement)
        return Proposed(tokens, sizes, q)
