"""What drafters have in common in a static step: what `memory` stores and `serving` draws, in tensors that stay.

B slots, C unread features, N nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState
from outrider.decoding.static import Committed, StaticDrafter, StaticRule, StaticSlots, above, fixed, sizes_of
from outrider.nn import trees
from outrider.nn.memory import FeatureBuffer
from outrider.nn.serving import Branching


class Unread(StaticDrafter):
    """A drafter that reads the features that the last step brought in its next draft."""

    def __init__(self, buffer: FeatureBuffer, width: int):
        """buffer: where a prompt's wait.  width: most of a slot."""
        self.buffer, self.width = buffer, width
        self.features = buffer.new(width)
        """[B, C, ...], right-padded."""
        self.counts = torch.zeros(len(self.features), dtype=torch.int64, device=self.features.device)
        """[B], how many are real."""

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        """Take these slots' features of their prompts."""
        for row in rows:
            taken, [count] = self.buffer.take([row])
            self.features[row, :count] = taken[0]
            self.counts[row] = count

    def take(self, committed: Committed, states: Tensor) -> None:
        """Take those of what was committed.  states [B, N+1, ...] of the verified pass."""
        rows = committed.rows[:, : self.width]
        rows = rows.view(*rows.shape, *[1] * (states.dim() - 2)).expand(-1, -1, *states.shape[2:])
        self.features[:, : rows.shape[1]] = states.gather(1, rows).to(self.features)
        self.counts.copy_(committed.counts)


class Branched(StaticDrafter):
    """Grows a tree level by level, as `serving.tree`: the likeliest paths, or drawn siblings of a fixed shape."""

    code = (trees,)
    branching: Branching
    above: Tensor
    """[B, N], of siblings of a fixed shape."""

    def branch(self, branching: Branching, is_greedy: bool, slots: int, device: torch.device) -> None:
        """Of which trees.  Call it once, when the part is made."""
        self.branching, self.varies = branching, is_greedy
        if not is_greedy:
            self.parents = branching.parents
            self.above = above(self.parents, slots, device)

    @property
    def nodes(self) -> int:
        if not self.varies:
            return len(self.parents)
        config = self.branching.config
        return trees.number_of_likeliest(self.branching.limit, width=config.width, depth=config.length)

    def grown(
        self, first: Tensor, expand: trees.Expand, slots: StaticSlots, rule: StaticRule, known: Tensor | None = None
    ) -> Draft:  # fmt: skip
        """first [B, V], logits after the anchor; known [B] as in `sizes_of`."""
        config, sizes = self.branching.config, sizes_of(slots, self.nodes, known)
        if self.varies:
            shape = {"width": config.width, "depth": config.length}
            tokens, parents = trees.likeliest(first, expand, self.branching.limit, **shape)
            return Draft.grown(tokens, parents, sizes, config.length)
        distribution = functools.partial(rule.distribution, slots=slots)
        tokens, q = trees.drawn(first, expand, self.parents, distribution, slots.streams, config.replacement)
        return fixed(tokens, self.parents, self.above, sizes, q)
