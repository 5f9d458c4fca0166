"""The acceptance rule and sampling over large vocabularies on a GPU: logits are read once or twice and never copied.

With p [B, N+1, V] in float32, residuals and noise, the plain `accept` moves many times as many bytes as the logits
have.  These kernels compute p from logits where it is needed, and write only a few numbers per row and node.  They
support temperatures; top-k and other truncations are left to torch.  They use the same noise and choose the same
tokens, except for ties that rounding decides.

B slots, N nodes, R = B * (N + 1) rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.decoding.accept import refuse_other_vocabulary
from outrider.decoding.draft import Draft, to_device
from outrider.decoding.noise import Purpose, Streams
from outrider.kernels import logits as kernels

CHUNK = 2048
"""Tokens per program.  The same in all passes, so that sums don't depend on their sizes."""
WARPS = 4


class RowStatistics(NamedTuple):
    """Statistics of the rows of logits [B, n, V], from which a probability is computed with one more read."""

    logits: Tensor
    temperature: Tensor
    """[B], in the type of probabilities."""
    best: Tensor
    """[R] largest logit; infinite if one is NaN."""
    choice: Tensor
    """[R] int32, the first token with it."""
    total: Tensor
    """[R] sum of weights relative to it."""
    valid: Tensor
    """[B, N] int8, whether a node's q is a distribution."""
    coins: Tensor
    """[B, N] float64."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """N, V and the number of chunks."""
        _, width, vocabulary = self.logits.shape
        return width - 1, vocabulary, triton.cdiv(vocabulary, CHUNK)

    @property
    def splits(self) -> int:
        return triton.next_power_of_2(self.sizes[2])

    @property
    def launch_options(self) -> dict[str, Any]:
        """Options of all launches."""
        return {"WIDE": tl.float64 if self.temperature.dtype == torch.float64 else tl.float32, "num_warps": WARPS}

    def parts(self, rows: int, *types: torch.dtype) -> list[Tensor]:
        """Empty tensors for chunks, [rows, splits] of each dtype."""
        return [self.best.new_empty(rows, self.sizes[2], dtype=dtype) for dtype in types]


class Nodes(NamedTuple):
    """A draft in the form that the kernels read."""

    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    """[B], on the device."""
    q: Tensor
    """[B, N, V]; any tensor without q."""
    depths: Tensor
    """[R]."""
    ranks: int
    """Maximum number of later siblings of a node; 0 for chains."""

    @classmethod
    def of(cls, draft: Draft) -> Nodes:
        tokens, parents = draft.tokens.contiguous(), draft.parents.contiguous()
        (slots, nodes), ranks = tokens.shape, 0
        depths = draft.rows()[1] if draft.branches else torch.arange(nodes + 1, device=tokens.device)
        if draft.branches and draft.q is not None:
            ranks = max((tree.count(parent) - 1 for tree in draft.tree for parent in tree), default=0)
        q = tokens if draft.q is None else _dense_rows(draft.q)
        is_there = draft.sizes.device == tokens.device  # as in a captured step, which can't send anything
        sizes = draft.sizes if is_there else to_device(draft.live, tokens.device)
        return cls(tokens, parents, sizes, q, depths.expand(slots, -1).contiguous().flatten(), ranks)


def accept(draft: Draft, logits: Tensor, temperature: Tensor, streams: Streams) -> Tensor:
    """The acceptance rule for logits [B, N+1, V] at `temperature` [B]; 0 is greedy.

    Returns [B, N+4] int64: each slot's path, its length, the next token, number of invalid nodes, whether all logits
    are finite.  Raises DrafterError for a q over another vocabulary.
    """
    if draft.q is not None:
        refuse_other_vocabulary(draft.q, logits.shape[-1])
    nodes = Nodes.of(draft)
    rows = read(logits, temperature, nodes, streams) if draft.q is not None else read(logits, temperature)
    draws = None
    if draft.q is None or streams.seeded is not None:
        draws = drawn(rows, nodes.depths, streams, Purpose.TARGET, only_seeded=draft.q is not None)
    if draft.q is None:
        return walk(rows, nodes, None, draws)
    masses = masses_of(rows, nodes)
    walked = walk(rows, nodes, masses, draws, streams.seeded)
    emit(rows, nodes, masses, streams, walked)
    return walked


def accept_greedy(draft: Draft, logits: Tensor, choice: Tensor | None = None) -> Tensor:
    """Like `accept`, for greedy slots. choice [B, N+1] as in `Scores`; if given, logits are not read."""
    choice = likeliest(logits) if choice is None else choice.contiguous()
    return walk(RowStatistics(logits, *(choice,) * 6), Nodes.of(draft), None, choice)


def likeliest(logits: Tensor) -> Tensor:
    """Like `state.likeliest`, for logits [B, n, V]."""
    rows = read(logits, logits.new_zeros(len(logits)))
    return torch.where(rows.best.isfinite(), rows.choice.long(), -1).view(logits.shape[:-1])


def sample(logits: Tensor, temperature: Tensor, streams: Streams, depth: int) -> tuple[Tensor, Tensor]:
    """The distribution q [B, V] of logits [B, V] at `temperature` [B], and a drafted token per slot sampled from it."""
    rows = read(logits[:, None], temperature)
    q = torch.empty(logits.shape, dtype=rows.temperature.dtype, device=logits.device)
    depths = torch.full((len(logits),), depth, device=logits.device)
    return q, drawn(rows, depths, streams, Purpose.DRAFT, out=q)


# ── launches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(
    logits: Tensor, temperature: Tensor, nodes: Nodes | None = None, streams: Streams | None = None
) -> RowStatistics:
    """Read logits [B, n, V] once, and the q of the nodes if they have one."""
    logits, is_wide, device = _dense_rows(logits), logits.dtype == torch.float64, logits.device
    slots, width, _ = logits.shape
    wide, count = torch.float64 if is_wide else torch.float32, slots * width
    best, total = torch.empty(2, count, dtype=wide, device=device).unbind()
    choice = torch.empty(count, dtype=torch.int32, device=device)
    valid = torch.empty(slots, width - 1, dtype=torch.int8, device=device)
    coins = torch.empty(slots, width - 1, dtype=torch.float64, device=device)
    rows = RowStatistics(logits, temperature.to(wide), best, choice, total, valid, coins)
    sizes, has_q = rows.sizes, nodes is not None and streams is not None
    parts = rows.parts(count, wide, torch.int32, wide, wide, wide)
    tokens, q = (logits[0], logits) if nodes is None else (nodes.tokens, nodes.q)
    noise = (logits,) * 3 if nodes is None or streams is None else (streams.seeds, streams.index, nodes.depths)
    kernels.read[count, sizes[2]](
        logits, rows.temperature, q, *parts, *sizes, *_strides(logits), *_strides(q), CHUNK=CHUNK, HAS_Q=has_q,
        **rows.launch_options,
    )  # fmt: skip
    kernels.combine[count,](
        *parts, rows.temperature, tokens, q, *noise, best, choice, total, valid, coins, *sizes, *_strides(q),
        SPLITS=rows.splits, HAS_Q=has_q, **rows.launch_options,
    )  # fmt: skip
    return rows


def masses_of(rows: RowStatistics, nodes: Nodes) -> Tensor:
    """[B N, splits]: each chunk's part of the residual mass after the rejection of a node with later siblings."""
    [masses] = rows.parts(nodes.tokens.numel(), rows.temperature.dtype)
    for rank in range(nodes.ranks):
        kernels.masses[masses.shape](
            *rows[:5], *nodes[:3], rows.valid, nodes.q, masses, rank, *rows.sizes, *_strides(rows.logits),
            *_strides(nodes.q), CHUNK=CHUNK, SPLITS=rows.splits, **rows.launch_options,
        )  # fmt: skip
    return masses


def drawn(
    rows: RowStatistics,
    depths: Tensor,
    streams: Streams,
    purpose: Purpose,
    only_seeded: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """[R] tokens sampled from every row.  only_seeded: only for seeded slots. out [R, V]: receives p."""
    best, token = rows.parts(len(rows.best), torch.float64, torch.int32)
    tokens = torch.empty(len(best), dtype=torch.int64, device=best.device)
    kernels.draw[best.shape](
        *rows[:5], streams.seeds, streams.index, _bits(streams.seeded, best), depths, best, token,
        best if out is None else out, *rows.sizes, *_strides(rows.logits), CHUNK=CHUNK, PURPOSE=int(purpose),
        HAS_SEEDED=streams.seeded is not None, ONLY_SEEDED=only_seeded, WRITES=out is not None, **rows.launch_options,
    )  # fmt: skip
    kernels.drawn[len(best),](best, token, tokens, best.shape[1], SPLITS=rows.splits, num_warps=1)
    return tokens


def walk(
    rows: RowStatistics, nodes: Nodes, masses: Tensor | None, draws: Tensor | None, seeded: Tensor | None = None,
    left: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B, N+4] as in `accept`, but without the next token if nodes are judged by q.

    masses: None without q.  draws [R]: the target's own tokens, -1 after logits that are not finite.  left [B, N]:
    receives the residual probability of each tested node.
    """
    (slots, count), is_judged = nodes.tokens.shape, masses is not None
    out = torch.full((slots, count + 4), -1, dtype=torch.int64, device=nodes.tokens.device)
    if left is None:
        left = torch.empty(slots, count, dtype=rows.temperature.dtype, device=out.device)
    kernels.walk[slots,](
        *rows[:5], *nodes[:3], rows.valid, rows.coins, left if masses is None else masses, nodes.q, _bits(seeded, out),
        out if draws is None else draws, left, out, *rows.sizes, *_strides(rows.logits), *_strides(nodes.q),
        SPLITS=rows.splits, HAS_Q=is_judged, HAS_DRAWS=draws is not None, IS_GREEDY=not rows.best.is_floating_point(),
        **{**rows.launch_options, "num_warps": 1},
    )  # fmt: skip
    return out


def emit(
    rows: RowStatistics, nodes: Nodes, masses: Tensor, streams: Streams, walked: Tensor, out: Tensor | None = None
) -> None:  # fmt: skip
    """Sample the token after each path into `walked`. out [B, V]: receives its unnormalised distribution."""
    wide = rows.temperature.dtype
    best, rest_best, token, rest_token, mass = rows.parts(
        len(walked), torch.float64, torch.float64, torch.int32, torch.int32, wide
    )
    parts = best, token, rest_best, rest_token, mass
    kernels.emit[best.shape](
        *rows[:5], *nodes[:3], rows.valid, masses, nodes.q, streams.seeds, streams.index,
        _bits(streams.seeded, best), walked, *parts, mass if out is None else out, *rows.sizes,
        *_strides(rows.logits), *_strides(nodes.q), CHUNK=CHUNK, SPLITS=rows.splits,
        HAS_SEEDED=streams.seeded is not None, WRITES=out is not None, **rows.launch_options,
    )  # fmt: skip
    kernels.resolve[len(walked),](*parts, walked, *rows.sizes[::2], SPLITS=rows.splits, num_warps=1)


def _strides(rows: Tensor) -> tuple[int, int]:
    """Strides of slots and rows."""
    return rows.stride(0), rows.stride(1)


def _dense_rows(x: Tensor) -> Tensor:
    """x [B, n, V] with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bits(flags: Tensor | None, instead: Tensor) -> Tensor:
    """Flags as bytes; if there are none, any tensor, which is not read."""
    return instead if flags is None else flags.view(torch.uint8)
