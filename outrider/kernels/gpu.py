"""A decoder layer for a few rows on a GPU, in seven Triton kernels that read weights and cache once.

The pass of a step multiplies every weight by only a few rows, so the time to read the weights is a lower bound.  The
operations between products are fused with them: the norm before a product, the gate and the residual after it, head
norms and rotary positions with the write to the cache.  The kernels are in `decoder_layer`.

A row's result does not depend on the number of rows, up to `FEW`: products sum over K in a fixed order, attention over
columns in chunks of a fixed size.  So a drafted chain is verified with bit-identical logits to those of plain steps.

M rows of a pass (slots times tokens per slot, n), K inner and N outer size of a weight, h query heads, H key heads, d
their size.  All tensors are contiguous; weights are [N, K] as in `nn.Linear`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from outrider.kernels import decoder_layer
from outrider.kernels.decoder_layer import IS_INTERPRETED

FEW = 32
"""Number of rows up to which these products are faster than torch's."""
CHUNK, QUERIES, SPLITS = 128, 16, 16
"""Columns and query rows of an attention program, and chunks of columns combined at a time.  The same in all passes, so
that sums don't depend on their sizes."""
PDL: dict[str, Any] = {} if IS_INTERPRETED else {"launch_pdl": True}
CAPABILITY = 9
"""Minimum major compute capability: kernels that wait for each other, 227 KiB of shared memory."""


class Tiles(NamedTuple):
    """How a product is divided: weight rows and columns per step of a program, warps, pipeline stages."""

    rows: int
    inner: int
    warps: int
    stages: int
    prefetch: int
    """Number of steps whose weights are prefetched before the kernel waits for its rows."""

    def launch_options(self, x: Tensor, *outer: int) -> dict[str, Any]:
        """Options of a launch for x [M, K] and weights of `outer` rows each."""
        rows, inner = x.shape
        step = math.gcd(2 * self.inner // x.itemsize, inner)
        return {
            "BLOCK_M": max(16, triton.next_power_of_2(rows)), "BLOCK_N": math.gcd(self.rows, *outer), "BLOCK_K": step,
            "PREFETCH": min(self.prefetch, inner // step), "num_warps": self.warps, "num_stages": self.stages,
            **PDL,
        }  # fmt: skip


class Heads(NamedTuple):
    """h, H and d of a layer, and whether queries and keys have norms."""

    queries: int
    keys: int
    size: int
    are_normed: bool


def project(
    x: Tensor, norm: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, eps: float, tiles: Tiles
) -> Tensor:  # fmt: skip
    """Queries, keys and values of normalised x [M, K]: [M, h d + 2 H d].  weights, biases: of all three."""
    query, key, value = weights
    rows, inner = x.shape
    out, options = x.new_empty(rows, sum(map(len, weights))), tiles.launch_options(x, len(query), len(key))
    decoder_layer.project[out.shape[1] // options["BLOCK_N"],](
        x, norm, query, key, value, *(biases or weights), out, rows, eps, K=inner, QUERIES=len(query), KEYS=len(key),
        BIASED=biases is not None, **options,
    )  # fmt: skip
    return out


def gate(x: Tensor, norm: Tensor, gates: Tensor, ups: Tensor, eps: float, tiles: Tiles) -> Tensor:
    """silu(gates) * ups of normalised x [M, K]: [M, N]."""
    rows, inner = x.shape
    out, options = x.new_empty(rows, len(gates)), tiles.launch_options(x, 2 * len(gates))
    decoder_layer.gate[2 * len(gates) // options["BLOCK_N"],](
        x, norm, gates, ups, out, rows, eps, K=inner, N=len(gates), **options
    )  # fmt: skip
    return out


def multiply(x: Tensor, weight: Tensor, before: Tensor | None, out: Tensor, tiles: Tiles) -> None:
    """The product of x [M, K], plus `before` [M, N] if given, into out [M, N]."""
    rows, inner = x.shape
    options = tiles.launch_options(x, len(weight))
    decoder_layer.add[len(weight) // options["BLOCK_N"],](
        x, weight, out if before is None else before, out, rows, K=inner, N=len(weight), ADDED=before is not None,
        **options,
    )  # fmt: skip


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, K] over its root mean square, times the weight."""
    rows, inner = x.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(inner)
    decoder_layer.norm[rows,](x, weight, out, eps, K=inner, BLOCK=block, num_warps=8, **PDL)
    return out


def rotated(
    projected: Tensor, norms: Sequence[Tensor], cos_sin: Sequence[Tensor], starts: Tensor, keys: Tensor, values: Tensor,
    width: int, eps: float, heads: Heads,
) -> Tensor:  # fmt: skip
    """Queries [M, h, d] from the output of `project`, normalised and rotated; keys and values are written to the cache
    [slots, H, length, d].

    norms: of queries and keys.  cos_sin: cos and sin [M, d].  starts [R]: number of columns per slot before the pass.
    """
    query = projected.new_empty(len(projected), heads.queries, heads.size)
    decoder_layer.rotate[len(projected), heads.queries + 2 * heads.keys](
        projected, *norms, *cos_sin, starts, query, keys, values, width, eps, keys.stride(0), keys.stride(1),
        HEADS=heads.queries, KV=heads.keys, D=heads.size, NORMED=heads.are_normed, num_warps=1, **PDL,
    )  # fmt: skip
    return query


class CachedAttention:
    """Attention of a pass's queries over the cache, in chunks of columns."""

    def __init__(self, like: Tensor, starts: Tensor, tree: Tensor, end: int, heads: Heads):
        """like: a tensor of the pass's dtype and device.  tree [R, n, n] bool; end: maximum number of columns that are
        read."""
        self.starts, self.tree, self.heads = starts, tree.contiguous().view(torch.uint8), heads
        self.width, self.splits = tree.shape[-1], triton.cdiv(end, CHUNK)
        cells = len(starts) * self.width, heads.queries, self.splits
        self.parts = like.new_empty(*cells, heads.size, dtype=torch.float32)
        self.largest, self.totals = (like.new_empty(cells, dtype=torch.float32) for _ in range(2))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """query [M, h, d] over cached keys and values [slots, H, length, d]: [M, h d]."""
        heads, (slots, width) = self.heads, self.tree.shape[:2]
        options = dict(HEADS=heads.queries, D=heads.size, CHUNK=CHUNK, **PDL)
        tiles = triton.cdiv(heads.queries // heads.keys * width, QUERIES)
        decoder_layer.attend[slots * heads.keys, self.splits, tiles](
            query, keys, values, self.starts, self.tree, self.parts, self.largest, self.totals, width, scale,
            keys.stride(0), keys.stride(1), self.splits, KV=heads.keys, BLOCK_R=QUERIES, num_warps=2, **options,
        )  # fmt: skip
        out = torch.empty_like(query).flatten(1)
        decoder_layer.combine[len(query), heads.queries](
            self.parts, self.largest, self.totals, self.starts, out, width, self.splits, SPLITS=SPLITS, num_warps=4,
            **options,
        )  # fmt: skip
        return out
