"""Attention of a few rows over a long cache on a GPU: query heads that share keys become rows of one head.

If a pass has a mask and more than one row, as every verified draft has, transformers copies keys and values to every
query head of a group.  One layer of an 8B Qwen3 then takes 11.4 ms on an H200, with 64 slots of 8,192 tokens and 8 rows
each; here it takes 0.84 ms (benchmarks/results/gpu.json).

On Hopper, torch computes masked attention with cuDNN, which makes a new plan for every number of columns, and that
number changes with every step of a text: plans took 30 of the 43 ms of a plain step of the demo target.  So cuDNN is
used only in captured passes, which have few sizes.

R rows of a pass, n tokens a row, h query heads, g of them per head of keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FEW = 64
"""Maximum number of tokens per row; longer passes are prompts, whose attention is limited by computation, not by
reading."""
FEW_HEADS = 32
"""Key heads in a pass, R * h / g, up to which two matmuls are faster than one kernel, which then has too few blocks to
read a long cache at memory speed."""
PREFERRED = 9, 10
"""Major compute capabilities for which torch prefers cuDNN."""


def install() -> None:
    """Use `attend` in all models of this process whose attention is `sdpa`; other passes do not change."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def sizes_are_few() -> Iterator[None]:
    """Enables cuDNN's attention within this context, whose passes have few different sizes to plan for."""
    torch.backends.cuda.enable_cudnn_sdp(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in PREFERRED
    )
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Called by transformers: query [R, h, n, d], key and value [R, h / g, all, d], mask [R or 1, 1 or h, n, all];
    returns [R, n, h, d]."""
    rows, heads, width, _ = query.shape
    group = heads // key.shape[1]
    is_bare = all(more.get(name) is None for name in ("position_bias", "softcap")) and not dropout
    is_cudnn = query.dtype in (torch.bfloat16, torch.float16) and torch.backends.cuda.cudnn_sdp_enabled()
    if group > 1 and attention_mask is not None and width == 1 and is_bare and is_cudnn:
        # cuDNN then splits the columns among its blocks: 0.022 ms instead of 0.18 for one slot of 8,192 tokens
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    if group == 1 or attention_mask is None or not 1 < width <= FEW or not is_bare:
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return output
    grouped = query.reshape(rows, key.shape[1], group * width, -1)
    if attention_mask.shape[1] == 1:
        mask = attention_mask.repeat(1, 1, group, 1)
    else:
        mask = attention_mask.reshape(len(attention_mask), key.shape[1], group * width, -1)
    if rows * key.shape[1] <= FEW_HEADS and mask.is_floating_point():
        out = by_matmuls(grouped, key, value, mask, scaling)
    else:
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, width, -1).transpose(1, 2).contiguous(), None


def by_matmuls(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None = None) -> Tensor:
    """`scaled_dot_product_attention` with an additive mask, with its scores in memory, at least in float32: eight rows
    of one slot of 8,192 tokens take 0.065 ms per layer instead of 0.19."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.is_cuda and wide != query.dtype:
        scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT, out_dtype=wide).unflatten(0, query.shape[:2])
    else:
        scores = (query @ key.mT).to(wide)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return (scores * scale + mask).softmax(-1).to(value.dtype) @ value
