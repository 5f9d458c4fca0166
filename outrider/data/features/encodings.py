"""Rows of a target's states in fewer bytes: bf16, fp8 by row, int8 by channel and row, int4 by group.

States have a few channels, and a few tokens, that are a thousand times larger than the rest.  So int8 and int4 divide
every channel by its mean size over the shard first; what is left of a row is rounded by a scale of its own, or of 64
channels each.  A Hadamard matrix, which would spread them over all channels, has little left to win: int4's error
on the demo target is 0.093 with it, and 0.094 to 0.099 without.  Encoded rows are a few tensors by name: `channel` is
the shard's, all others have one row per row.

n rows, H channels, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from outrider.errors import DataError

Kind = Literal["bf16", "fp8", "int8", "int4"]
GROUP = 64
"""Most channels of one int4 scale."""
CLIPS = (1.0, 0.9, 0.8, 0.7)
"""Shares of a group's largest value that its int4 scale may reach to; the best of them is taken."""
SHARED = "channel"
"""The tensor that all rows of a shard share."""
TOLERANCE: Mapping[Kind, float] = {"bf16": 0.01, "fp8": 0.06, "int8": 0.04, "int4": 0.25}
"""Largest relative error (root mean square) of a text's states that is the rounding's own."""


def encode(kind: Kind, rows: Tensor) -> dict[str, Tensor]:
    """The tensors that stand for rows [n, H].  Raises DataError for an odd H in int4."""
    if kind == "bf16":
        return {"values": rows.to(torch.bfloat16)}
    rows = rows.float()
    if kind == "fp8":
        scale = rows.abs().amax(1).clamp(min=_TINY) / 448  # the type's largest value
        return {"values": (rows / scale[:, None]).to(torch.float8_e4m3fn), "scale": scale}
    channel = _channel(rows)
    rows = rows / channel
    return (_int8(rows) if kind == "int8" else _int4(rows)) | {SHARED: channel}


def decode(kind: Kind, parts: Mapping[str, Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Rows [n, H] of what `encode` gave, written to `out` where it is given."""
    values = parts["values"]
    if out is None:
        width = values.shape[1] * (2 if kind == "int4" else 1)
        out = torch.empty(len(values), width, dtype=dtype, device=values.device)
    if kind == "int4":
        half, scale = values.shape[1], parts["scale"].to(dtype)
        # the low halves of the bytes are the first half of the channels
        out[:, :half] = values & 15
        out[:, half:] = values >> 4
        out.sub_(8).unflatten(1, (scale.shape[1], -1)).mul_(scale[..., None])
    elif kind == "fp8":
        # by a table: a CPU converts this type ten times slower
        table = torch.arange(256, dtype=torch.uint8, device=values.device).view(torch.float8_e4m3fn).to(dtype)
        found = table.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape)
        torch.mul(found, parts["scale"].to(dtype)[:, None], out=out)
    else:
        out.copy_(values)
    if kind == "int8":
        out.mul_(parts["scale"].to(dtype)[:, None])
    return out.mul_(parts[SHARED].to(dtype)) if SHARED in parts else out


def bytes_per_row(kind: Kind, width: int) -> float:
    """Bytes of one encoded row of so many channels, its scales included."""
    return {"bf16": 2 * width, "fp8": width + 4, "int8": width + 4, "int4": width / 2 + 2 * width / _group(width)}[kind]


def bytes_per_token(
    kind: Kind, hidden: int, taps: int, top_logprobs: int = 0, rotate: int = 0, final: float = 1.0
) -> float:
    """About what a token takes in a feature cache, scales included.

    taps: their number.  final: share of the tokens whose final states are stored.
    """
    of_final = 6 * top_logprobs + 2 if top_logprobs else bytes_per_row(kind, hidden)
    width, rows = (rotate, 1) if rotate else (hidden, taps)
    # its id, the number of its row, and the number of its final state's row
    return rows * bytes_per_row(kind, width) + final * of_final + 12


def select(parts: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
    """The tensors of these rows alone."""
    return {name: part if name == SHARED else part[rows] for name, part in parts.items()}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of a difference, over that of the wanted values; of the median row, since single tokens may be
    a thousand times larger than the rest.  Both [n, H]."""
    if not len(wanted):
        return 0.0
    difference, size = (found.float() - wanted.float()).square().mean(-1), wanted.float().square().mean(-1)
    return float((difference / size.clamp(min=_TINY)).sqrt().median())


def _channel(rows: Tensor) -> Tensor:
    """[H], each channel's mean size in rows of equal size."""
    size = rows.square().mean(1, keepdim=True).sqrt().clamp(min=_TINY)
    mean = (rows / size).abs().mean(0) if len(rows) else torch.ones(rows.shape[1], device=rows.device)
    return mean.clamp(min=_TINY)


def _int8(rows: Tensor) -> dict[str, Tensor]:
    scale = rows.abs().amax(1).clamp(min=_TINY) / 127
    return {"values": (rows / scale[:, None]).round().to(torch.int8), "scale": scale}


def _int4(rows: Tensor) -> dict[str, Tensor]:
    width = rows.shape[1]
    if width % 2:
        raise DataError(f"int4 holds an even number of channels, got {width}; choose int8, fp8 or bf16")
    groups = rows.unflatten(1, (-1, _group(width)))
    largest = groups.abs().amax(2)
    best, error = torch.zeros_like(groups), torch.full_like(largest, torch.inf)
    chosen = torch.zeros_like(largest)
    for clip in CLIPS:
        # in the type it is stored in, so that values are rounded for the scale that is read
        scale = (largest * (clip / 7)).clamp(max=6e4).half().float()
        whole = (groups / scale.clamp(min=_TINY)[..., None]).round().clamp(-8, 7)
        found = (whole * scale[..., None] - groups).square().sum(2)
        better = found < error
        best, error = torch.where(better[..., None], whole, best), torch.where(better, found, error)
        chosen = torch.where(better, scale, chosen)
    low, high = (best.flatten(1) + 8).to(torch.uint8).chunk(2, 1)
    return {"values": low | (high << 4), "scale": chosen.half()}


def _group(width: int) -> int:
    """Channels of one int4 scale."""
    return next(size for size in range(min(GROUP, width), 0, -1) if width % size == 0)


_TINY = 1e-30
