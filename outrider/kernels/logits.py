"""The Triton kernels of `gpu_acceptance`: they read logits in chunks and write a few numbers per row and node.

A row's results don't depend on the other rows: chunks have a fixed size and are combined in a fixed order.  Results of
chunks are [rows, splits].  The noise is that of `decoding.noise`, number by number.

B slots, N nodes, R = B * (N + 1) rows of a pass, V vocabulary; WIDE is the type in which probabilities are computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
INDEX_STEP = tl.constexpr(3 * (0x9E3779B97F4A7C15 - 2**64) + 2**64)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)
"""Constants of `decoding.noise`."""
DRAFT, ACCEPT, TARGET = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""`Purpose`, in numbers."""
MIN_MASS = tl.constexpr(1e-12)
"""A residual with less mass is a rounding error."""
LAST = tl.constexpr(2**31 - 1)


# ── noise ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _key(seed, index, depth, PURPOSE: tl.constexpr):
    """As `Streams._hash`."""
    counter = (index + depth) * INDEX_STEP + PURPOSE
    if PURPOSE == DRAFT:
        counter += _mix(index + 1)
    return _mix(_mix(seed + STEP) ^ _mix(counter))


@triton.jit
def _unit(x):
    """float64 in (0, 1)."""
    return (((x >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _race(weights, key, x):
    """Largest weight / exponential noise of tokens x, and the first token with it."""
    best = tl.full((), 0.0, tl.float64)
    token = tl.min(x, 0)
    if tl.max(weights, 0) > 0:  # skip the noise of chunks without possible tokens
        times = weights.to(tl.float64) / -tl.log(_unit(_mix(key + x.to(tl.int64) * STEP)))
        best = tl.max(times, 0)
        token = tl.min(tl.where(times == best, x, LAST), 0)
    return best, token


@triton.jit
def _first_of_largest(best, token, at, splits, SPLITS: tl.constexpr):
    """Largest of a row's chunks, and the first token with it."""
    s = tl.arange(0, SPLITS)
    maxima = tl.load(best + at * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(maxima, 0)
    held = tl.load(token + at * splits + s, mask=s < splits, other=LAST)
    return top, tl.min(tl.where((maxima == top) & (s < splits), held, LAST), 0)


# ── distributions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _weights(logits, x, best, choice, temperature):
    """exp((logits - best) / temperature) of tokens x; one-hot at `choice` for temperature 0."""
    warm = tl.where(temperature == 0, 1.0, temperature)
    return tl.where(temperature == 0, tl.where(x == choice, 1.0, 0.0), tl.exp((logits - best) / warm))


@triton.jit
def _judged(q, x, is_in, token, is_known, is_valid, WIDE: tl.constexpr):
    """q of tokens x as the rule uses it: one-hot if it is not valid, 0 if the node's id is out of range."""
    stored = tl.load(q + x, mask=is_in, other=0.0).to(WIDE)
    return tl.where(is_valid, stored, tl.where((x == token) & is_known, 1.0, 0.0).to(WIDE))


@triton.jit
def _mass(masses, at, splits, SPLITS: tl.constexpr):
    s = tl.arange(0, SPLITS)
    return tl.sum(tl.load(masses + at * splits + s, mask=s < splits, other=0.0), 0)


@triton.jit
def _left(
    p, x, is_in, slot, parent, before, tokens, parents, valid, q, q_slot, q_node, masses, N, V, splits,
    SPLITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """p of tokens x after the rejection of all children of `parent` among the nodes before `before`."""
    for m in range(before):
        node = slot * N + m
        if tl.load(parents + node) == parent:
            token = tl.load(tokens + node)
            is_known = (token >= 0) & (token < V)
            is_valid = tl.load(valid + node) != 0
            child_q = _judged(q + slot * q_slot + m * q_node, x, is_in, token, is_known, is_valid, WIDE)
            mass = _mass(masses, node, splits, SPLITS)
            p = tl.where(mass > MIN_MASS, tl.maximum(p - child_q, 0.0) / tl.maximum(mass, MIN_MASS), p)
    return p


# ── rows and nodes ────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["N", "splits"])
def read(
    logits, temperature, q, best, choice, total, sums, minima, N, V, splits, slot_stride, row_stride, q_slot, q_node,
    CHUNK: tl.constexpr, HAS_Q: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of a row: its largest logit (infinite if one is NaN), the first token with it, and the sum of weights
    relative to it [R, splits]; sum and minimum of its node's q."""
    row, split = tl.program_id(0), tl.program_id(1)
    slot, n = (row // (N + 1)).to(tl.int64), row % (N + 1)
    x = split * CHUNK + tl.arange(0, CHUNK)
    is_in = x < V
    logit = tl.load(logits + slot * slot_stride + n.to(tl.int64) * row_stride + x, mask=is_in, other=float("-inf"))
    logit = logit.to(WIDE)
    logit = tl.where(logit == logit, logit, float("inf"))
    top = tl.max(logit, 0)
    at = row * splits + split
    tl.store(best + at, top)
    tl.store(choice + at, tl.min(tl.where((logit == top) & is_in, x, LAST), 0))
    warm = tl.load(temperature + slot).to(WIDE)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(total + at, tl.sum(tl.exp((logit - shift) / tl.where(warm == 0, 1.0, warm)), 0))
    if HAS_Q:  # noqa: SIM102 — the outer one is decided while the kernel is compiled
        if n > 0:
            place = q + slot * q_slot + (n - 1).to(tl.int64) * q_node + x
            q_values = tl.load(place, mask=is_in, other=0.0).to(WIDE)
            node = (slot * N + n - 1) * splits + split
            tl.store(sums + node, tl.sum(q_values, 0))
            tl.store(minima + node, tl.min(q_values, 0))


@triton.jit(do_not_specialize=["N", "splits"])
def combine(
    best, choice, total, sums, minima, temperature, tokens, q, seeds, index, depths, row_best, row_choice, row_total,
    valid, coins, N, V, splits, q_slot, q_node, SPLITS: tl.constexpr, HAS_Q: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row's chunks combined: largest logit, the first token with it and the sum of weights [R]; whether the node's q
    is a distribution, and its coin [B, N]."""
    row, s = tl.program_id(0), tl.arange(0, SPLITS)
    slot, n = (row // (N + 1)).to(tl.int64), row % (N + 1)
    is_used = s < splits
    top, first = _first_of_largest(best, choice, row, splits, SPLITS)
    maxima = tl.load(best + row * splits + s, mask=is_used, other=float("-inf"))
    warm = tl.load(temperature + slot).to(WIDE)
    part = tl.load(total + row * splits + s, mask=is_used, other=0.0)
    shrunk = tl.exp((maxima - top) / tl.where(warm == 0, 1.0, warm))
    tl.store(row_best + row, top)
    tl.store(row_choice + row, first)
    tl.store(row_total + row, tl.where(warm == 0, 1.0, tl.sum(tl.where(part > 0, part * shrunk, 0.0), 0)))
    if HAS_Q:  # noqa: SIM102 — the outer one is decided while the kernel is compiled
        if n > 0:
            node = slot * N + n - 1
            place = node * splits + s
            mass = tl.sum(tl.load(sums + place, mask=is_used, other=0.0), 0)
            lowest = tl.min(tl.load(minima + place, mask=is_used, other=0.0), 0)
            token = tl.load(tokens + node)
            is_known = (token >= 0) & (token < V)
            held = tl.load(q + slot * q_slot + (n - 1).to(tl.int64) * q_node + token, mask=is_known, other=0.0)
            is_valid = is_known & (lowest >= 0) & (tl.abs(mass - 1) < 1e-3) & (held > 0)
            tl.store(valid + node, is_valid.to(tl.int8))
            key = _key(tl.load(seeds + slot), tl.load(index + slot), tl.load(depths + row) - 1, ACCEPT)
            tl.store(coins + node, _unit(_mix(key + (n - 1).to(tl.int64) * STEP)))


@triton.jit(do_not_specialize=["rank", "N", "splits"])
def masses(
    logits, temperature, row_best, row_choice, row_total, tokens, parents, sizes, valid, q, out, rank, N, V, splits,
    slot_stride, row_stride, q_slot, q_node, CHUNK: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk's part of the residual mass after the rejection of a node with `rank` earlier siblings, [B N,
    splits]."""
    node, split = tl.program_id(0), tl.program_id(1)
    slot, n = (node // N).to(tl.int64), node % N
    parent, elders = tl.load(parents + node), 0
    for m in range(n):
        elders += (tl.load(parents + slot * N + m) == parent).to(tl.int32)
    if (elders == rank) & (n < tl.load(sizes + slot)):
        x = split * CHUNK + tl.arange(0, CHUNK)
        is_in = x < V
        row = slot * (N + 1) + parent + 1
        logit = tl.load(logits + slot * slot_stride + (parent + 1) * row_stride + x, mask=is_in, other=float("-inf"))
        warm = tl.load(temperature + slot).to(WIDE)
        p = _weights(logit.to(WIDE), x, tl.load(row_best + row), tl.load(row_choice + row), warm)
        p = _left(
            p / tl.load(row_total + row), x, is_in, slot, parent, n, tokens, parents, valid, q, q_slot, q_node, out,
            N, V, splits, SPLITS, WIDE,
        )  # fmt: skip
        token = tl.load(tokens + node)
        is_known = (token >= 0) & (token < V)
        place = q + slot * q_slot + n.to(tl.int64) * q_node
        own_q = _judged(place, x, is_in, token, is_known, tl.load(valid + node) != 0, WIDE)
        tl.store(out + node * splits + split, tl.sum(tl.maximum(p - own_q, 0.0), 0))


# ── draws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["N", "splits"])
def draw(
    logits, temperature, row_best, row_choice, row_total, seeds, index, seeded, depths, best, token, out, N, V, splits,
    slot_stride, row_stride, CHUNK: tl.constexpr, PURPOSE: tl.constexpr, HAS_SEEDED: tl.constexpr,
    ONLY_SEEDED: tl.constexpr, WRITES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of the race over a row's distribution: best [R, splits] and the token with it.

    WRITES: writes the distribution to `out` [R, V].  For a draft, a seeded slot uses the target's noise.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    slot, n = (row // (N + 1)).to(tl.int64), row % (N + 1)
    if ONLY_SEEDED:  # noqa: SIM102 — the outer one is decided while the kernel is compiled
        if tl.load(seeded + slot) == 0:
            return
    x = split * CHUNK + tl.arange(0, CHUNK)
    is_in = x < V
    logit = tl.load(logits + slot * slot_stride + n.to(tl.int64) * row_stride + x, mask=is_in, other=float("-inf"))
    warm = tl.load(temperature + slot).to(WIDE)
    p = _weights(logit.to(WIDE), x, tl.load(row_best + row), tl.load(row_choice + row), warm) / tl.load(row_total + row)
    if WRITES:
        tl.store(out + row.to(tl.int64) * V + x, p, mask=is_in)
    seed, at, depth = tl.load(seeds + slot), tl.load(index + slot), tl.load(depths + row)
    key = _key(seed, at, depth, PURPOSE)
    if HAS_SEEDED and PURPOSE == DRAFT:
        key = tl.where(tl.load(seeded + slot) != 0, _key(seed, at, depth, TARGET), key)
    top, first = _race(tl.where(is_in, p, 0.0), key, x)
    tl.store(best + row * splits + split, top)
    tl.store(token + row * splits + split, first)


@triton.jit(do_not_specialize=["splits"])
def drawn(best, token, out, splits, SPLITS: tl.constexpr):
    """out [R]: the token that won each row's race."""
    row = tl.program_id(0)
    _, first = _first_of_largest(best, token, row, splits, SPLITS)
    tl.store(out + row, first.to(tl.int64))


# ── acceptance ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["N", "splits"])
def walk(
    logits, temperature, row_best, row_choice, row_total, tokens, parents, sizes, valid, coins, masses, q, seeded,
    draws, left, out, N, V, splits, slot_stride, row_stride, q_slot, q_node, SPLITS: tl.constexpr, HAS_Q: tl.constexpr,
    HAS_DRAWS: tl.constexpr, IS_GREEDY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out [B, N + 4]: a slot's path, its length, the next token, number of invalid nodes, and whether all rows are
    finite.

    HAS_Q: nodes are judged by coins and q; left [B, N] gets the residual probability of each tested one, and `emit`
    draws the next token.  HAS_DRAWS: seeded slots, or all without q, follow the target's `draws` [R].
    """
    slot = tl.program_id(0).to(tl.int64)
    first, line, size = slot * (N + 1), out + slot * (N + 4), tl.load(sizes + slot)
    follows = 0
    if HAS_DRAWS:
        follows = 1
        if HAS_Q:
            follows = (tl.load(seeded + slot) != 0).to(tl.int32)
    at, count, invalid = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for n in range(N):
        node = slot * N + n
        token = tl.load(tokens + node)
        is_known = (token >= 0) & (token < V)
        is_live = n < size
        is_right = is_known
        if HAS_Q:
            is_valid = tl.load(valid + node) != 0
            is_right = tl.where(follows != 0, is_known, is_valid)
        invalid += (is_live & (is_right == 0)).to(tl.int64)
        if is_live & is_known & (tl.load(parents + node) == at):
            row = first + at + 1
            passes = follows != 0
            if HAS_DRAWS:
                passes = passes & (tl.load(draws + row) == token)
            if HAS_Q:  # noqa: SIM102 — the outer one is decided while the kernel is compiled
                if follows == 0:
                    logit = tl.load(logits + slot * slot_stride + (at + 1) * row_stride + token).to(WIDE)
                    warm = tl.load(temperature + slot).to(WIDE)
                    p = _weights(logit, token, tl.load(row_best + row), tl.load(row_choice + row), warm)
                    p = _left(
                        p / tl.load(row_total + row), token, is_known, slot, at, n, tokens, parents, valid, q, q_slot,
                        q_node, masses, N, V, splits, SPLITS, WIDE,
                    )  # fmt: skip
                    place = q + slot * q_slot + n * q_node
                    own_q = _judged(place, token, is_known, token, is_known, is_valid, WIDE)
                    passes = tl.load(coins + node) * own_q.to(tl.float64) < p.to(tl.float64)
                    tl.store(left + node, p)
            if passes:
                tl.store(line + count, n)
                at = tl.full((), 0, tl.int64) + n
                count += 1
    tl.store(line + N, count)
    if HAS_DRAWS:
        tl.store(line + N + 1, tl.load(draws + first + at + 1))
    tl.store(line + N + 2, invalid)
    finite = tl.full((), 1, tl.int64)
    for n in range(N + 1):
        if IS_GREEDY:
            is_finite = tl.load(draws + first + n) >= 0
        else:
            is_finite = tl.abs(tl.load(row_best + first + n)) < float("inf")
        finite = finite * is_finite.to(tl.int64)
    tl.store(line + N + 3, finite)


@triton.jit(do_not_specialize=["N", "splits"])
def emit(
    logits, temperature, row_best, row_choice, row_total, tokens, parents, sizes, valid, masses, q, seeds, index,
    seeded, walked, best, token, rest_best, rest_token, rest_mass, out, N, V, splits, slot_stride, row_stride, q_slot,
    q_node, CHUNK: tl.constexpr, SPLITS: tl.constexpr, HAS_SEEDED: tl.constexpr, WRITES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of the race for the token after the path: over the residual after the last rejected child, and over the
    one before it, which is used if the former is only rounding errors.  [B, splits]; WRITES: writes the first to out
    [B, V]."""
    slot, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, size = walked + slot * (N + 4), tl.load(sizes + slot)
    count = tl.load(line + N)
    at = tl.load(line + count - 1, mask=count > 0, other=-1)
    youngest = tl.full((), -1, tl.int32)
    for m in range(N):
        is_child = (m < size) & (tl.load(parents + slot * N + m) == at)
        youngest = tl.where(is_child, m, youngest)
    if HAS_SEEDED:
        youngest = tl.where(tl.load(seeded + slot) != 0, -1, youngest)
    row = slot * (N + 1) + at + 1
    x = split * CHUNK + tl.arange(0, CHUNK)
    is_in = x < V
    logit = tl.load(logits + slot * slot_stride + (at + 1) * row_stride + x, mask=is_in, other=float("-inf"))
    warm = tl.load(temperature + slot).to(WIDE)
    p = _weights(logit.to(WIDE), x, tl.load(row_best + row), tl.load(row_choice + row), warm) / tl.load(row_total + row)
    p = tl.where(is_in, p, 0.0)
    rest = p
    if youngest >= 0:
        p = _left(
            p, x, is_in, slot, at, youngest, tokens, parents, valid, q, q_slot, q_node, masses, N, V, splits, SPLITS,
            WIDE,
        )  # fmt: skip
        node = slot * N + youngest
        last = tl.load(tokens + node)
        is_known = (last >= 0) & (last < V)
        place = q + slot * q_slot + youngest.to(tl.int64) * q_node
        rest = tl.maximum(p - _judged(place, x, is_in, last, is_known, tl.load(valid + node) != 0, WIDE), 0.0)
    if WRITES:
        tl.store(out + slot * V + x, rest, mask=is_in)
    key = _key(tl.load(seeds + slot), tl.load(index + slot), count, TARGET)
    cell = slot * splits + split
    top, first = _race(rest, key, x)
    tl.store(rest_best + cell, top)
    tl.store(rest_token + cell, first)
    tl.store(rest_mass + cell, tl.sum(rest, 0))
    if youngest >= 0:
        top, first = _race(p, key, x)
    tl.store(best + cell, top)
    tl.store(token + cell, first)


@triton.jit(do_not_specialize=["N", "splits"])
def resolve(best, token, rest_best, rest_token, rest_mass, walked, N, splits, SPLITS: tl.constexpr):
    """The next token of a slot, from the chunks of its race."""
    slot = tl.program_id(0).to(tl.int64)
    _, before = _first_of_largest(best, token, slot, splits, SPLITS)
    _, after = _first_of_largest(rest_best, rest_token, slot, splits, SPLITS)
    chosen = tl.where(_mass(rest_mass, slot, splits, SPLITS) > MIN_MASS, after, before)
    tl.store(walked + slot * (N + 4) + N + 1, chosen.to(tl.int64))
