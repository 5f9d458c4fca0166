"""How many tokens fit in memory, computed before any text is read.

If memory is allocated page by page (see `lazy_memory`), all texts share a budget of tokens, and a text that does not
fit waits.  Otherwise every slot may grow to its full length, so all slots must fit at that length.  Weights and a
drafter's own caches are not included.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from outrider import machine
from outrider.errors import ConfigError
from outrider.targets.cache import lazy_memory
from outrider.targets.protocol import Target

SHARE = 0.5
"""Fraction of the free memory for slots, unless a budget or a length is given."""
UNKNOWN_LENGTH = 4096
"""Maximum number of tokens of a slot if its memory is unknown."""


@runtime_checkable
class InColumns(Protocol):
    """A cache with a fixed number of bytes per token."""

    column_bytes: int


@torch.inference_mode()
def token_bytes(target: Target) -> int:
    """Bytes of one token in the target's cache, found by reading one; 0 if the family has its own kind of cache."""
    cache: Any = target.allocate(1, 8)
    target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1], ())
    return cache.column_bytes if isinstance(cache, InColumns) else 0


class Capacity(NamedTuple):
    """Limits on texts."""

    length: int
    """Maximum number of tokens of one text, prompt and answer."""
    tokens: int | None = None
    """Maximum number of tokens of all texts together, drafted ones included; None if every slot can hold its longest
    text."""


def capacity(target: Target, slots: int, length: int | None, budget_bytes: int | None, more: int = 0) -> Capacity:
    """Limits for this many slots: texts of `length` tokens, or as long as the context and the budget allow.

    budget_bytes: for all texts together; by default all free memory if `length` is given, otherwise half of it.  more:
    columns per slot for drafts, in addition to its text's.  Raises ConfigError if not even one text fits.
    """
    context, each = target.spec.context, token_bytes(target)
    if length is not None and length < 2:
        raise ConfigError(f"length must be at least 2 tokens, one for the prompt and one for the answer, got {length}")
    free = machine.free_memory(target.device)
    budget = budget_bytes if budget_bytes is not None else free if length is not None else int(SHARE * free)
    source = "free" if budget_bytes is None else "given"
    if each and lazy_memory.comes_by_page(target.device):
        refuse_above(budget, 1, min(length or 2, context), each, source, more)
        tokens = budget // each
        longest = min(length or context, context, tokens - more)
        return Capacity(longest, None if slots * (longest + more) <= tokens else tokens)
    refuse_above(budget, slots, min(length or 2, context), each, source, more)
    most = budget // (slots * each) - more if each else context if length is not None else UNKNOWN_LENGTH
    return Capacity(min(length or most, context, most))


def refuse_above(budget: int, slots: int, length: int, each: int, source: str, more: int = 0) -> None:
    """Raises ConfigError if slots of this many tokens, of `each` bytes, take more than a budget in bytes.

    source: "given" or "free".  more: as in `capacity`.
    """
    taken = slots * (length + more) * each
    if taken <= budget:
        return
    tokens, fit = max(0, budget // (slots * each) - more), budget // ((length + more) * each)
    limit = "memory_gb allows" if source == "given" else "are free for them"
    if slots == 1:
        raise ConfigError(
            f"a text of {length:,} tokens takes {_gb(taken)}, and {_gb(budget)} {limit}; one of {tokens:,} tokens "
            "fits: choose shorter texts, or another memory_gb"
        )
    raise ConfigError(
        f"{slots} slots of {length:,} tokens take up to {_gb(taken)}, and {_gb(budget)} {limit}; {slots} slots of "
        f"{tokens:,} tokens fit, or {fit} of {length:,}: choose fewer slots or shorter texts, or another memory_gb"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
