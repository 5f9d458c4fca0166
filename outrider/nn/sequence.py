"""Sequence parallelism: processes split the positions of each text, and exchange them for heads at every attention.

Process r of N has positions r, r + N, r + 2N, … of every text, and every N-th drafted block, so all have about the same
number of trained rows.  At each attention it sends its rows of all heads and receives all rows of its own heads
(DeepSpeed-Ulysses, arXiv 2309.14509).  So attention sees whole texts, and everything else has 1 / N of the rows.

B sequences, n rows of this process, N processes, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from outrider.errors import ConfigError
from outrider.nn.blocks import Attend


class Exchange(torch.autograd.Function):
    """Send piece j of [N, …] to process j; returns every process's piece for this one, by rank."""

    @staticmethod
    def forward(context: Any, pieces: Tensor, group: Any) -> Tensor:
        context.group = group
        received = torch.empty_like(pieces, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(received, pieces.contiguous(), group=group)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(gradient, context.group), None


class Stripe:
    """The positions of each text that belong to one of `count` processes."""

    def __init__(self, rank: int, count: int, group: Any):
        """group: torch's process group of these processes only."""
        self.rank, self.count, self._group = rank, count, group

    def own(self, values: Tensor) -> Tensor:
        """Every N-th element of values [B, S, …], padded with zeros if S is not a multiple of N."""
        return _filled(values, 1, self.count)[:, self.rank :: self.count].contiguous()

    def attend(self, whole: Attend, context: int, blocks: int, width: int) -> Attend:
        """Attention of this process's rows, computed by `whole` over all rows.

        whole: receives all keys of the context, then those of the blocks, for some of the heads.  context: number of
        positions over all processes; blocks: likewise, each with `width` rows.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
            check_heads(k.shape[1], self.count)
            before = k.shape[2] - q.shape[2]
            parts = [q, k[:, :, before:], v[:, :, before:], k[:, :, :before], v[:, :, :before]]
            pieces = [part.unflatten(1, (self.count, -1)).movedim(1, 0) for part in parts]
            units = [(blocks, width)] * 3 + [(context, 1)] * 2
            q, k, v, k_before, v_before = (
                _woven(part, *unit) for part, unit in zip(self._exchanged(pieces), units, strict=True)
            )
            k, v = torch.cat([k_before, k], 2), torch.cat([v_before, v], 2)
            output = whole(q, k, v, layer, None if sinks is None else sinks.chunk(self.count)[self.rank])
            rows = _filled(output.unflatten(2, (blocks, width)), 2, self.count).unflatten(2, (-1, self.count))
            [own_rows] = self._exchanged([rows.movedim(3, 0).flatten(3, 4)])
            return own_rows.movedim(0, 1).flatten(1, 2)

        return attend

    def _exchanged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Parts [N, …], of equal shapes in all processes, exchanged in one call."""
        flat = Exchange.apply(torch.cat([part.flatten(1) for part in parts], 1), self._group)
        sizes = [part[0].numel() for part in parts]
        return [piece.reshape(part.shape) for piece, part in zip(flat.split(sizes, 1), parts, strict=True)]


def check_heads(kv_heads: int, count: int) -> None:
    """Raises ConfigError for heads that can't be split over the processes."""
    if kv_heads % count:
        raise ConfigError(
            f"train.sequence_parallel {count} splits heads, but the drafter has kv_heads {kv_heads}; set a number that "
            "divides it"
        )


def _filled(values: Tensor, dim: int, count: int) -> Tensor:
    """values padded with zeros to a multiple of `count` at `dim`."""
    missing = -values.shape[dim] % count
    return F.pad(values, (*[0, 0] * (values.dim() - dim - 1), 0, missing)) if missing else values


def _woven(parts: Tensor, units: int, width: int) -> Tensor:
    """Rows [N, B, h, n, d] of all processes in the order of the text: [B, h, units * width, d]."""
    return parts.unflatten(3, (-1, width)).movedim(0, 3).flatten(2, 4)[:, :, : units * width]
