"""What drafters store for a static step: the same as `memory`, in tensors that stay.

B slots, C unread features, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.state import DecodeState
from outrider.decoding.static import Committed, StaticDrafter
from outrider.nn.memory import FeatureBuffer


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
