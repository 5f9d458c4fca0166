"""Keys and values of every slot in one buffer a layer: append a pass, keep one path of it, forget the rest.

A slot's tokens stand from 0 without holes, so its length alone says what is valid and forgetting is lowering a number.
A pass writes its rows behind each slot's length; `keep` moves the accepted ones together and counts them in.

R rows of a pass, n tokens a row, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """Where the rows of one forward pass stand."""

    rows: list[int]
    starts: list[int]
    """Length of each row's slot before the pass."""
    width: int
    """Tokens a row, padding included."""
    span: slice | None
    """The rows as a slice, where they lie side by side."""

    @property
    def end(self) -> int:
        """Columns that some row of the pass may look at."""
        return max(self.starts, default=0) + self.width

    @property
    def is_even(self) -> bool:
        """All rows stand at the same place and lie side by side: writing and reading are plain slices."""
        return len(set(self.starts)) == 1 and self.span is not None


class SlotCache:
    """Keys and values of `slots` texts of at most `length` tokens.  Speaks to attention layers as transformers' Cache does.

    Buffers are made when a layer first writes, in the shape that layer needs.
    """

    is_compileable = False

    def __init__(self, slots: int, length: int, device: torch.device | str = "cpu"):
        self.slots = slots
        self.length = length
        self.device = torch.device(device)
        self.lengths = [0] * slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._now = Pass([], [], 0, None)
        self._at: tuple[Tensor, Tensor] | None = None

    @property
    def is_even(self) -> bool:
        """All rows of the open pass stand at the same place, side by side."""
        return self._at is None

    # ── one pass ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, rows: Sequence[int], width: int) -> Pass:
        """Begin a pass of `width` tokens a row; until the next, `update` writes there."""
        rows = list(rows)
        lie_together = rows == list(range(rows[0], rows[0] + len(rows)))
        span = slice(rows[0], rows[0] + len(rows)) if lie_together else None
        now = Pass(rows, [self.lengths[row] for row in rows], width, span)
        assert now.end <= self.length, f"a pass up to {now.end} tokens in a cache of {self.length}"
        self._now, self._at = now, None
        if not now.is_even:
            columns = torch.tensor(now.starts).unsqueeze(-1) + torch.arange(width)
            self._at = torch.tensor(rows, device=self.device).unsqueeze(-1), columns.to(self.device)
        return now

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
        """Write this layer's keys and values [R, h, n, d]; returns all of the rows' up to the longest, [R, h, end, d]."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._buffer(keys), self._buffer(values)
        kept = self._layers[layer_idx]
        return self._write(kept[0], keys), self._write(kept[1], values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked by some families for their default positions; we always pass positions."""
        return max(self._now.starts, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._now.end, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def mask(self, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [R or 1, 1, Q, end] of the open pass.

        visible [R or 1, Q, n] bool says which of the pass's own tokens each query may look at; None is causal order, Q = n.
        What a slot held before the pass, every query of its row may look at.
        """
        now = self._now
        own = (
            visible
            if visible is not None
            else torch.ones(now.width, now.width, dtype=torch.bool, device=self.device).tril()[None]
        )
        if self.is_even:
            own = torch.nn.functional.pad(own, (now.starts[0], 0), value=True)
            return torch.zeros(own.shape, dtype=dtype, device=self.device).masked_fill_(~own, -torch.inf)[:, None]
        starts = torch.tensor(now.starts, device=self.device)[:, None, None]
        columns = torch.arange(now.end, device=self.device) - starts
        inside = (columns >= 0) & (columns < now.width)
        place = columns.clamp(0, now.width - 1).expand(-1, own.shape[1], -1)
        seen = (columns < 0) | (inside & own.expand(len(now.rows), -1, -1).gather(-1, place))
        return torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)[:, None]

    def positions(self, depths: Tensor | None = None) -> Tensor:
        """[R or 1, n] positions of the open pass's tokens.  depths [R or 1, n] counts from each row's start; None is 0..n-1."""
        if depths is None:
            depths = torch.arange(self._now.width, device=self.device)[None]
        if self.is_even:
            return depths + self._now.starts[0]
        return depths + torch.tensor(self._now.starts, device=self.device).unsqueeze(-1)

    # ── after a pass ──────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, counts: Sequence[int]) -> None:
        """The first counts[r] tokens of each row of the pass stay."""
        for row, start, count in zip(self._now.rows, self._now.starts, counts, strict=True):
            self.lengths[row] = start + count

    @torch.inference_mode()  # the passes that made the buffers were in it
    def keep(self, path: Tensor) -> None:
        """The pass's first token (the anchor) and the nodes on `path` stay.  path [R, D], node n is token n + 1, -1 pads."""
        kept = (path >= 0).sum(-1)
        order = torch.arange(path.shape[1])
        moved = (path >= 0) & (path != order)
        if moved.any():
            self._gather(path.clamp(min=0).where(path >= 0, order))
        self.append((kept + 1).tolist())

    @torch.inference_mode()
    def fork(self, row: int, rows: Sequence[int], length: int) -> None:
        """Give `rows` the first `length` tokens of `row`."""
        assert length <= self.lengths[row]
        for keys, values in self._layers.values():
            for buffer in (keys, values):
                buffer[list(rows), :, :length] = buffer[row, :, :length]
        for other in rows:
            self.lengths[other] = length

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lengths[row] = 0

    # ── buffers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _buffer(self, states: Tensor) -> Tensor:
        # zeros, not empty: a masked column still enters the product, and 0 * NaN is NaN
        return torch.zeros(self.slots, states.shape[1], self.length, states.shape[3], dtype=states.dtype, device=states.device)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        now = self._now
        if self._at is None:
            buffer[now.span, :, now.starts[0] : now.end] = states
            return buffer[now.span, :, : now.end]
        rows, columns = self._at
        buffer[rows, :, columns] = states.transpose(1, 2)
        # a slice is a view, a list of rows would copy all that they hold
        return buffer[now.span or now.rows, :, : now.end]

    def _gather(self, path: Tensor) -> None:
        """Move the nodes of `path` [R, D] to stand behind their anchors."""
        now = self._now
        rows = torch.tensor(now.rows, device=self.device).unsqueeze(-1)
        behind = torch.tensor(now.starts).unsqueeze(-1) + 1
        come_from = (behind + path).to(self.device)
        go_to = (behind + torch.arange(path.shape[1])).to(self.device)
        for keys, values in self._layers.values():
            for buffer in (keys, values):
                buffer[rows, :, go_to] = buffer[rows, :, come_from]
