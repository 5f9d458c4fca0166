"""Encodes rows of a target's states in fewer bytes: bf16, int8 by channel and row, int4 by channel and group.

A few channels and a few tokens have states a thousand times larger than the rest.  So int8 and int4 first divide
every channel by its mean size over the shard, then round each row with one scale (int8) or one per 64 channels (int4).
A Hadamard rotation would add little: int4's error on the demo target is 0.093 with it, and 0.094 to 0.099 without.
Encoded rows are a few named tensors: `channel` is shared by the shard, all others have one entry per row.

n rows, H channels, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from outrider.errors import DataError

Kind = Literal["bf16", "int8", "int4"]
GROUP = 64
"""Maximum number of channels per int4 scale."""
CLIPS = (1.0, 0.9, 0.8, 0.7)
"""Fractions of a group's largest value at which int4 may clip; the one with the smallest error is used."""
SHARED = "channel"
"""The tensor that all rows of a shard share."""
TOLERANCE: Mapping[Kind, float] = {"bf16": 0.01, "int8": 0.04, "int4": 0.25}
"""Largest relative error (root mean square) of a text's states that rounding alone can cause."""


def encode(kind: Kind, rows: Tensor) -> dict[str, Tensor]:
    """Encode rows [n, H] as named tensors.  Raises DataError for an odd H in int4."""
    if kind == "bf16":
        return {"values": rows.to(torch.bfloat16)}
    rows = rows.float()
    channel = _channel(rows)
    rows = rows / channel
    return (_int8(rows) if kind == "int8" else _int4(rows)) | {SHARED: channel}


def decode(kind: Kind, parts: Mapping[str, Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Rows [n, H] from the output of `encode`, written to `out` if given."""
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
    else:
        out.copy_(values)
    if kind == "int8":
        out.mul_(parts["scale"].to(dtype)[:, None])
    return out.mul_(parts[SHARED].to(dtype)) if SHARED in parts else out


def bytes_per_row(kind: Kind, width: int) -> float:
    """Bytes of one encoded row of `width` channels, including its scales."""
    return {"bf16": 2 * width, "int8": width + 4, "int4": width / 2 + 2 * width / _group(width)}[kind]


def bytes_per_token(kind: Kind, hidden: int, num_taps: int, top_logprobs: int = 0, final_share: float = 1.0) -> float:
    """Approximate bytes per token in a feature cache, including scales.

    final_share: share of the tokens whose final states are stored.
    """
    final_bytes = 6 * top_logprobs + 2 if top_logprobs else bytes_per_row(kind, hidden)
    # 12: the token's id, its row number and the row number of its final state
    return num_taps * bytes_per_row(kind, hidden) + final_share * final_bytes + 12


def select(parts: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
    """The encoded tensors of these rows only."""
    return {name: part if name == SHARED else part[rows] for name, part in parts.items()}


def relative_error(states: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference relative to that of `reference`, both [n, H].

    The median over rows is used, since single tokens may be a thousand times larger than the rest.
    """
    if not len(reference):
        return 0.0
    difference = (states.float() - reference.float()).square().mean(-1)
    size = reference.float().square().mean(-1)
    return float((difference / size.clamp(min=_TINY)).sqrt().median())


def _channel(rows: Tensor) -> Tensor:
    """[H], each channel's mean absolute value after every row is scaled to equal size."""
    size = rows.square().mean(1, keepdim=True).sqrt().clamp(min=_TINY)
    mean = (rows / size).abs().mean(0) if len(rows) else torch.ones(rows.shape[1], device=rows.device)
    return mean.clamp(min=_TINY)


def _int8(rows: Tensor) -> dict[str, Tensor]:
    scale = rows.abs().amax(1).clamp(min=_TINY) / 127
    return {"values": (rows / scale[:, None]).round().to(torch.int8), "scale": scale}


def _int4(rows: Tensor) -> dict[str, Tensor]:
    width = rows.shape[1]
    if width % 2:
        raise DataError(f"int4 needs an even number of channels, got {width}; choose int8 or bf16")
    groups = rows.unflatten(1, (-1, _group(width)))
    largest = groups.abs().amax(2)
    best_values = torch.zeros_like(groups)
    best_scale = torch.zeros_like(largest)
    least_error = torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        # via float16, the stored type, so that values are rounded with the scale that is read back
        scale = (largest * (clip / 7)).clamp(max=6e4).half().float()
        values = (groups / scale.clamp(min=_TINY)[..., None]).round().clamp(-8, 7)
        error = (values * scale[..., None] - groups).square().sum(2)
        is_better = error < least_error
        best_values = torch.where(is_better[..., None], values, best_values)
        best_scale = torch.where(is_better, scale, best_scale)
        least_error = torch.where(is_better, error, least_error)
    low, high = (best_values.flatten(1) + 8).to(torch.uint8).chunk(2, 1)
    return {"values": low | (high << 4), "scale": best_scale.half()}


def _group(width: int) -> int:
    """Number of channels per int4 scale."""
    return next(size for size in range(min(GROUP, width), 0, -1) if width % size == 0)


_TINY = 1e-30
