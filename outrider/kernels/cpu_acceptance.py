"""The acceptance rule and sampling on a CPU, from logits, reading only the rows on the accepted path.

In torch, p of every row is computed, checked and sampled with noise over the whole vocabulary, which takes a fifth of a
sampled step of a small model.  Settings with truncation are left to torch.  Uses the same noise and yields the same
tokens, except for ties that rounding decides.

B slots, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider import kernels
from outrider.decoding.accept import refuse_other_vocabulary
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.sampling.distribution import wide


def accept(draft: Draft, logits: Tensor, temperature: Tensor, streams: Streams) -> Tensor:
    """The acceptance rule for logits [B, N+1, V] at `temperature` [B]; 0 is greedy.

    Returns [B, N+4] int64: each slot's path, its length, the next token, number of invalid nodes, whether the logits
    read are finite.  Raises DrafterError for a q over another vocabulary.
    """
    logits = wide(logits).contiguous()
    slots, width, vocabulary = logits.shape
    q = draft.q
    if q is not None:
        refuse_other_vocabulary(q, vocabulary)
        q = q.to(logits.dtype).contiguous()
    out = torch.empty(slots, width + 3, dtype=torch.int64)
    held = [
        draft.tokens, draft.parents, draft.sizes, temperature.to(logits.dtype), streams.seeds, streams.index,
        streams.seeded,
    ]  # fmt: skip
    held = [each if each is None else each.contiguous() for each in held]  # kept alive until the kernel has returned
    pointers = [each if each is None else each.data_ptr() for each in (logits, q, *held)]
    is_double = logits.dtype == torch.float64
    kernels.call("accept", is_double, *pointers[:2], slots, width - 1, vocabulary, *pointers[2:], out.data_ptr())
    return out


def accept_greedy(draft: Draft, logits: Tensor, choice: Tensor | None = None) -> Tensor:
    """Like `accept`, for greedy slots; `choice` is not used."""
    nothing = torch.zeros(len(logits), dtype=torch.int64)
    return accept(replace(draft, q=None), logits, nothing, Streams(nothing, nothing))


def sample(logits: Tensor, temperature: Tensor, streams: Streams, depth: int) -> tuple[Tensor, Tensor]:
    """The distribution q [B, V] of logits [B, V] at `temperature` [B], and a drafted token per slot sampled from it."""
    logits, keys = wide(logits).contiguous(), streams.key(depth, Purpose.DRAFT).contiguous()
    q, tokens = torch.empty_like(logits), torch.empty_like(keys)
    temperature = temperature.to(logits.dtype).contiguous()
    kernels.call(
        "sample", logits.dtype == torch.float64, logits.data_ptr(), *logits.shape, temperature.data_ptr(),
        keys.data_ptr(), q.data_ptr(), tokens.data_ptr(),
    )  # fmt: skip
    return q, tokens
