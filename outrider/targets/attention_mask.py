"""Where the rows of a pass stand, and what they may look at.

R rows of a pass, n tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Limit(NamedTuple):
    """How far a layer sees: the last `size` positions, its own included; or its own chunk of `size` positions."""

    kind: Literal["window", "chunk"]
    size: int


@dataclass(frozen=True, slots=True)
class Pass:
    """Where the rows of one forward pass stand."""

    rows: list[int]
    starts: list[int]
    """Length of each row's slot before the pass."""
    width: int
    """Tokens a row, padding included."""
    places: list[int]
    """Where the rows lie in the buffers."""
    span: slice | None
    """The places as a slice, where they are side by side."""

    @property
    def end(self) -> int:
        """Columns that some row of the pass may look at."""
        return max(self.starts, default=0) + self.width

    @property
    def is_even(self) -> bool:
        """All rows stand at the same place and lie side by side: writing and reading are plain slices."""
        return len(set(self.starts)) == 1 and self.span is not None


class Sight(NamedTuple):
    """Where a pass stands and what its rows may look at.  Tensors alone, so that a graph can be traced through it."""

    starts: Tensor
    """[R] length of each row's slot before the pass."""
    columns: Tensor
    """[end] 0, 1, ... up to the last column that some row may look at."""
    width: int
    """Tokens a row."""

    def positions(self, depths: Tensor) -> Tensor:
        """[R, n]; depths [R or 1, n] counts from each row's start."""
        return self.starts[:, None] + depths

    def seen(self, visible: Tensor) -> Tensor:
        """[R, Q, end] bool: all before the pass, and of the pass what `visible` [R or 1, Q, n] says."""
        own, place = self._own()
        visible = visible.expand(self.starts.shape[0], -1, -1)
        inside = (own >= 0) & (own < self.width)
        return (own < 0) | (inside & visible.gather(-1, place.expand(-1, visible.shape[1], -1)))

    def near(self, limit: Limit, depths: Tensor) -> Tensor:
        """[R, n, end] bool: what a limit leaves.  Nodes of a tree stand where their depth says, not where they are written."""
        own, place = self._own()
        asks = self.positions(depths)
        stands = torch.where(own < 0, self.columns, asks[:, None].gather(-1, place))
        asks = asks[:, :, None]
        if limit.kind == "window":
            return stands > asks - limit.size
        return stands.div(limit.size, rounding_mode="floor") == asks.div(limit.size, rounding_mode="floor")

    def _own(self) -> tuple[Tensor, Tensor]:
        """Every column counted from its row's start, [R, 1, end], and the same held within the pass."""
        own = self.columns - self.starts[:, None, None]
        return own, own.clamp(0, self.width - 1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, Q, end] bool to [R, 1, Q, end] in which 0 is seen and -inf is not."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


def span(places: Sequence[int]) -> slice | None:
    """These places as a slice, where they are side by side."""
    first, last = places[0], places[0] + len(places)
    return slice(first, last) if list(places) == list(range(first, last)) else None
