"""What drafters have in common in a static step: what `memory` stores and `serving` draws, in tensors that stay.

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
    """A drafter that reads the features that the last step brought in its next draft."""

    def __init__(self, drafter: FeatureDrafter, memory: FeatureMemory, width: int):
        """width: most unread features of a slot, besides that of a step which verifies no draft."""
        self.drafter, self.memory, self.width = drafter, memory, width + 1
        self.features = memory.features.new(self.width)
        """[B, W, ...], right-padded."""
        self.counts = torch.zeros(len(self.features), dtype=torch.int64, device=self.features.device)
        """[B], how many are real."""
        self.start = torch.zeros_like(self.counts)
        """[B], how many were read."""

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        """Take over these slots' unread features; of a long text without drafts all but the last are read."""
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
        """What waited was read."""
        self.start.add_(self.counts)
        self.counts.zero_()

    def take(self, committed: Committed, states: Tensor) -> Tensor:
        """Add those of what was committed.  states [B, n+1, ...] of the verified pass.  Returns [B, W], where among
        the committed tokens each column comes from, below 0 for one that was there before."""
        order = torch.arange(self.width, device=states.device)
        at = order - self.counts[:, None]
        rows = committed.rows.gather(1, at.clamp(0, committed.rows.shape[1] - 1))
        trailing = [1] * (states.dim() - 2)
        found = states.gather(1, rows.view(*rows.shape, *trailing).expand(-1, -1, *states.shape[2:]))
        is_new = (at >= 0).view(*at.shape, *trailing)
        self.features.copy_(torch.where(is_new, found.to(self.features), self.features))
        self.counts.add_(committed.counts)
        return at


class Branched(StaticDrafter):
    """Grows a tree level by level, as `serving.tree`: the likeliest paths, or drawn siblings of a fixed shape."""

    code = (trees,)
    branching: Branching

    def branch(self, branching: Branching, is_greedy: bool) -> None:
        """Of which trees.  Call it once, when the part is made."""
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
        self, first: Tensor, expand: trees.Expand, slots: StaticSlots, rule: StaticRule, known: Tensor | None = None
    ) -> Proposed:  # fmt: skip
        """first [B, V], logits after the anchor; known [B] as in `sizes_of`."""
        config, sizes = self.branching.config, sizes_of(slots, self.nodes, known)
        if self.varies:
            shape = {"width": config.width, "depth": config.length}
            tokens, parents = trees.likeliest(first, expand, self.branching.limit, **shape)
            return Proposed(tokens, sizes, parents=parents)
        distribution = functools.partial(rule.distribution, slots=slots)
        tokens, q = trees.drawn(first, expand, self.parents, distribution, slots.streams, config.replacement)
        return Proposed(tokens, sizes, q)
