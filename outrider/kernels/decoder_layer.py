"""The Triton kernels of `gpu`, under the same names, in the order in which a decoder layer uses them.

Each starts while the previous one runs (programmatic dependent launch), prefetches its weights to the L2 cache, and
then waits for its input rows.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(64)
"""Number of 16-bit values in the 128 bytes that are fetched at once."""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels on the CPU, for tests."""
DEPENDENT = tl.constexpr(not IS_INTERPRETED)


# ── shared by kernels ─────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _begin():
    """Let the next kernel start, and wait for the output of the previous one."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _fetch(addresses):
    """Prefetch these addresses to the L2 cache without waiting."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _multiply(
    x, norm, addresses, M, K: tl.constexpr, NORMED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Rows x [M, K] times the weight rows at `addresses` [BLOCK_N], and sums of squares of x: [N, M] and [M].

    NORMED: x is multiplied by `norm` [K]; the caller divides by its root mean square.
    """
    k, m = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    weights = addresses[:, None] + k[None, :]
    for step in tl.static_range(PREFETCH):
        line = tl.arange(0, BLOCK_K // LINE) * LINE
        _fetch(addresses[:, None] + step * BLOCK_K + line[None, :])
    _begin()
    sums, squares = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_K if NORMED else 16, BLOCK_M), tl.float32)
    rows = x + m[None, :] * K + k[:, None]
    is_row = m[None, :] < M
    for at in range(0, K, BLOCK_K):
        weight = tl.load(weights + at, eviction_policy="evict_first")
        inner = tl.load(rows + at, mask=is_row, other=0.0)
        if NORMED:
            wide = inner.to(tl.float32)
            squares += wide * wide
            inner = (wide * tl.load(norm + at + k).to(tl.float32)[:, None]).to(weight.dtype)
        sums = tl.dot(weight, inner, sums, input_precision="ieee")
    return sums, tl.sum(squares, 0)


@triton.jit
def _stored(out, values, columns, M, N, BLOCK_M: tl.constexpr):
    """Store values [columns, M] in out [M, N]."""
    m = tl.arange(0, BLOCK_M)
    tl.store(out + m[None, :] * N + columns[:, None], values.to(out.dtype.element_ty), mask=m[None, :] < M)


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def project(
    x, norm, query, key, value, query_bias, key_bias, value_bias, out, M, eps, K: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """out [M, QUERIES + 2 KEYS]: queries, keys and values of the normalised x."""
    tile = tl.program_id(0)
    N: tl.constexpr = QUERIES + 2 * KEYS
    first: tl.constexpr = QUERIES // BLOCK_N
    second: tl.constexpr = (QUERIES + KEYS) // BLOCK_N
    weight = tl.where(tile < first, query, tl.where(tile < second, key, value))
    start = tl.where(tile < first, tile, tl.where(tile < second, tile - first, tile - second))
    n = tl.arange(0, BLOCK_N)
    inner = start * BLOCK_N + n
    sums, squares = _multiply(x, norm, weight + inner.to(tl.int64) * K, M, K, True, BLOCK_M, BLOCK_N, BLOCK_K, PREFETCH)
    sums = sums * tl.rsqrt(squares / K + eps)[None, :]
    if BIASED:
        bias = tl.where(tile < first, query_bias, tl.where(tile < second, key_bias, value_bias))
        sums += tl.load(bias + inner).to(tl.float32)[:, None]
    _stored(out, sums, tile * BLOCK_N + n, M, N, BLOCK_M)


@triton.jit
def gate(
    x, norm, gate, up, out, M, eps, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out [M, N]: silu(gate) * up of the normalised x.  A program has BLOCK_N / 2 rows of each weight."""
    half: tl.constexpr = BLOCK_N // 2
    n = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * half + n % half
    weight = tl.where(n < half, gate, up)
    sums, squares = _multiply(x, norm, weight + rows.to(tl.int64) * K, M, K, True, BLOCK_M, BLOCK_N, BLOCK_K, PREFETCH)
    sums = sums * tl.rsqrt(squares / K + eps)[None, :]
    gated, lifted = tl.split(tl.permute(tl.reshape(sums, (2, half, BLOCK_M)), (1, 2, 0)))
    _stored(out, gated * tl.sigmoid(gated) * lifted, tl.program_id(0) * half + tl.arange(0, half), M, N, BLOCK_M)


@triton.jit
def add(
    x, weight, before, out, M, K: tl.constexpr, N: tl.constexpr, ADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out [M, N]: `before` plus the product of x, or just the product."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    sums, _ = _multiply(x, x, weight + n.to(tl.int64) * K, M, K, False, BLOCK_M, BLOCK_N, BLOCK_K, PREFETCH)
    if ADDED:
        sums += tl.load(before + m[None, :] * N + n[:, None], mask=m[None, :] < M, other=0.0).to(tl.float32)
    _stored(out, sums, n, M, N, BLOCK_M)


@triton.jit
def norm(x, weight, out, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, K]: x over its root mean square, times the weight."""
    k = tl.arange(0, BLOCK)
    _begin()
    at = tl.program_id(0) * K + k
    row = tl.load(x + at, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / K + eps)
    normed = row * scale * tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=k < K)


# ── heads, cache, attention ───────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def rotate(
    projected, query_norm, key_norm, cos, sin, starts, query, keys, values, width, eps, slot_stride, head_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the heads of one row; writes queries [M, h, d], and keys and values to the cache [slots, H,
    length, d]."""
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, D)
    half: tl.constexpr = D // 2
    other = (i + half) % D
    _begin()
    slot, token = row // width, row % width
    line = projected + row * (HEADS + 2 * KV) * D + head * D
    x = tl.load(line + i).to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV
    if not is_value:
        rotated = tl.load(line + other).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            weight = tl.where(is_query, query_norm, key_norm)
            x = x * scale * tl.load(weight + i).to(tl.float32)
            rotated = rotated * scale * tl.load(weight + other).to(tl.float32)
        rotated = tl.where(i < half, -rotated, rotated)
        x = x * tl.load(cos + row * D + i).to(tl.float32) + rotated * tl.load(sin + row * D + i).to(tl.float32)
    if is_query:
        tl.store(query + (row * HEADS + head) * D + i, x.to(query.dtype.element_ty))
    else:
        start = tl.load(starts + slot)
        own_head = tl.where(is_value, head - HEADS - KV, head - HEADS)
        place = slot.to(tl.int64) * slot_stride + own_head * head_stride + (start + token) * D
        tl.store(tl.where(is_value, values, keys) + place + i, x.to(keys.dtype.element_ty))


@triton.jit
def attend(
    query, keys, values, starts, tree, parts, largest, totals, width, scale, slot_stride, head_stride, splits,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One chunk of columns for query rows that share a key head: unnormalised sums of values [M, h, splits, d], largest
    scores and sums of weights [M, h, splits]."""
    slot, kv = tl.program_id(0) // KV, tl.program_id(0) % KV
    split = tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    r, d, c = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, D), tl.arange(0, CHUNK)
    token, head = r // group, kv * group + r % group
    is_row = token < width
    start = tl.load(starts + slot).to(tl.int32)
    end = start + width
    place = slot.to(tl.int64) * slot_stride + kv * head_stride
    lines = tl.minimum(split * CHUNK * D + tl.arange(0, CHUNK * D // LINE) * LINE, (end - 1) * D)
    _fetch(keys + place + lines)
    _fetch(values + place + lines)
    _begin()
    if split * CHUNK < end:
        line = (slot * width + token) * HEADS + head
        q = tl.load(query + line[:, None] * D + d[None, :], mask=is_row[:, None], other=0.0)
        column = split * CHUNK + c
        held = (column < end)[:, None]
        cell = place + column[:, None] * D + d[None, :]
        key = tl.load(keys + cell, mask=held, other=0.0)
        value = tl.load(values + cell, mask=held, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        if split * CHUNK + CHUNK > start:
            offset = column - start
            is_own = (offset >= 0) & (offset < width)
            allowed = tl.load(
                tree + (slot * width + token[:, None]) * width + offset[None, :],
                mask=is_row[:, None] & is_own[None, :], other=0,
            )  # fmt: skip
            scores = tl.where((offset < 0)[None, :] | (allowed != 0), scores, float("-inf"))
        best = tl.max(scores, 1)
        weights = tl.exp(scores - tl.where(best == float("-inf"), 0.0, best)[:, None])
        sums = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        out = line * splits + split
        tl.store(parts + out[:, None] * D + d[None, :], sums, mask=is_row[:, None])
        tl.store(largest + out, best, mask=is_row)
        tl.store(totals + out, tl.sum(weights, 1), mask=is_row)


@triton.jit
def combine(
    parts, largest, totals, starts, out, width, splits, HEADS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """out [M, h, d]: the chunks of one row and head, combined."""
    row, head = tl.program_id(0), tl.program_id(1)
    d, s = tl.arange(0, D), tl.arange(0, SPLITS)
    used = (tl.load(starts + row // width).to(tl.int32) + width + CHUNK - 1) // CHUNK
    at = (row * HEADS + head) * splits
    best, total, sums = float("-inf"), 0.0, tl.zeros((D,), tl.float32)
    _begin()
    for first in range(0, used, SPLITS):
        split = at + first + s
        is_used = first + s < used
        maxima = tl.load(largest + split, mask=is_used, other=float("-inf"))
        new = tl.maximum(best, tl.max(maxima, 0))
        shrunk, weights = tl.exp(best - new), tl.exp(maxima - new)
        total = total * shrunk + tl.sum(tl.load(totals + split, mask=is_used, other=0.0) * weights, 0)
        part = tl.load(parts + split[:, None] * D + d[None, :], mask=is_used[:, None], other=0.0)
        sums = sums * shrunk + tl.sum(part * weights[:, None], 0)
        best = new
    tl.store(out + (row * HEADS + head) * D + d, (sums / total).to(out.dtype.element_ty))
