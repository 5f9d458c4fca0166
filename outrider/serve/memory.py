"""How long slots can be: their keys and values are allocated once, at the start, within a budget."""

from __future__ import annotations

from typing import Any

import torch

from outrider import machine
from outrider.errors import ConfigError
from outrider.targets.cache import SlotCache
from outrider.targets.ensemble import EnsembleCache
from outrider.targets.protocol import Target
from outrider.targets.tensor_parallel import TensorParallelCache

SHARE = 0.5
"""Of the memory that is free, what slots take unless a budget is given."""
UNKNOWN_LENGTH = 4096
"""Tokens of a slot, at most, where its memory is not known."""


@torch.inference_mode()
def token_bytes(target: Target) -> int:
    """Bytes of one token of a slot in the target's cache, seen by reading one; 0 where it has a cache of its own
    kind."""
    cache: Any = target.allocate(1, 8)
    target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1], ())
    return cache.column_bytes if isinstance(cache, SlotCache | EnsembleCache | TensorParallelCache) else 0


def slot_length(target: Target, slots: int, length: int | None, budget_bytes: int | None) -> int:
    """Most tokens of a slot, prompt and answer: `length`, or as many as the context and the budget allow.

    budget_bytes: of all slots together; half of the free memory unless given.  Raises ConfigError where `length` does
    not fit into a budget that was given, or nothing does.
    """
    context, each = target.spec.context, token_bytes(target)
    if length is not None and length < 2:
        raise ConfigError(f"length must be at least 2 tokens, a prompt's and an answer's, got {length}")
    budget = int(SHARE * _free(target.device)) if budget_bytes is None else budget_bytes
    most = budget // (slots * each) if each else UNKNOWN_LENGTH
    if length is not None and budget_bytes is None:
        return min(length, context)
    if most < max(length or 0, 2):
        wanted = f"{slots} slots of {length or 2} tokens take {slots * (length or 2) * each:,} bytes"
        raise ConfigError(
            f"{wanted}, but the budget is {budget:,}; allow fewer slots or shorter ones ({most} tokens), or more memory"
        )
    return min(length or most, context, most)


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.free_memory()
