"""The prefix cache: prefixes that several prompts share, such as a system prompt or a chat so far, are computed once.

A prefix is stored in blocks of tokens: the keys and values of all layers, and the taps and hidden states that a drafter
reads.  They are copied into the slot of a later prompt that begins with the same blocks, and passed to its drafter as
if the target had just computed them.

A block's key consists of the previous block and its own token ids.  The ids themselves are compared, so no hash
collision can confuse two texts.  Each tenant has its own blocks: otherwise the latency of a prompt would reveal what
others had sent.

Sharing by block is PagedAttention's (Kwon et al. 2309.06180); the tree of prefixes, whose least recently used leaf is
evicted first, is RadixAttention's (Zheng et al. 2312.07104).  Here a slot's columns are contiguous, so blocks are
copied into it and never used in place.

n tokens, T taps, H hidden size.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import PREFILL_CHUNK, Prefixes
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.targets.cache.slots import LayerBuffer, SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import Target, TargetSpec

BLOCK = 64
"""Tokens per block.  Smaller blocks share more of a prefix but need more copies."""

Key = tuple[int | str, bytes]
"""The number of the previous block, or the tenant for a first block, and the block's token ids."""


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """The target's states for consecutive tokens of a prompt."""

    number: int
    """Unique, and never reused."""
    columns: list[Tensor]
    """Keys and values from `SlotCache.copy_out`."""
    hidden: Tensor
    """[n, H] after the final norm."""
    taps: Tensor | None
    """[n, T, H]."""

    @property
    def size_bytes(self) -> int:
        return sum(map(_bytes, self.columns)) + _bytes(self.hidden) + _bytes(self.taps)


class Source(NamedTuple):
    """Identifies the target, taps and cache layout that blocks are valid for."""

    target: TargetSpec
    taps: tuple[int, ...]
    stacked: int
    layout: tuple[LayerBuffer, ...]


class PrefixStore(Prefixes):
    """Blocks of prompts, evicted least recently used first.  For one thread.

    budget_bytes: most memory of all blocks, on the target's device; 0 stores nothing.
    is_shared: tenants (`Request.tenant`) share blocks; by default each has its own.
    block: tokens per block.  Only whole blocks are stored; the rest of a prefix is computed again.

    It serves one target and drafter; it is cleared if their shape changes.
    """

    def __init__(self, budget_bytes: int, is_shared: bool = False, block: int = BLOCK):
        self.budget_bytes, self.is_shared, self.block = budget_bytes, is_shared, block
        self.bytes = 0
        """Memory of all blocks."""
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        """The least recently used first.  A block comes before its predecessor in a prompt, so the first is a leaf."""
        self._numbers = count()
        self._reading: dict[int, tuple[Request, list[Key]]] = {}
        """By slot in prefill: its request, and the blocks of its prompt so far."""
        self._tails: dict[int, tuple[Request, Tensor, Tensor | None]] = {}
        """By slot in prefill: its request, and the states of the tokens after its last whole block."""
        self._source: Source | None = None
        self._warned: set[str] = set()

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def supports(self, target: Target, cache: Any) -> bool:
        """Whether this cache stores nothing but keys and values by column; if not, warns once with the reason."""
        reason = _reason_against(target, cache)
        if reason:
            self._warn(f"prefixes of prompts are not cached for {target.spec.name}: {reason}")
        return not reason

    def shares(self, state: DecodeState, row: int, other: int) -> bool:
        """Whether a slot could reuse the next block that another slot will compute."""
        begin, tenants = state.prefilled[row], [state.requests[one].tenant for one in (row, other)]
        ends = begin + self.block
        if not self.budget_bytes or begin % self.block or not begin <= state.prefilled[other] < ends:
            return False
        if not (self.is_shared or len(set(tenants)) == 1):
            return False
        return len(state.tokens[row]) > ends and state.tokens[row][:ends] == state.tokens[other][:ends]

    def take(
        self, target: Target, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, row: int,
        most: int | None = None,
    ) -> int:  # fmt: skip
        """Copy the stored blocks that continue a slot's prefill into the cache, pass them to the drafter, and add their
        tokens to `state.prefilled`.

        Returns the number of these tokens: a multiple of `block`, at most `most`, never the prompt's last token, which
        is the anchor.  Called before each chunk, so that it finds blocks that other slots have computed in the
        meantime.
        """
        if not self.budget_bytes or not self.supports(target, cache):
            return 0
        begin, end = state.prefilled[row], len(state.tokens[row]) - 1
        if begin % self.block or begin >= end:
            return 0
        if not cache.layout and self._source is not None:  # a cache allocates its buffers in the first pass
            cache.laid_out(self._source.layout)
        self._fit(target, drafter, cache)
        keys = self._stored_keys(row, state, end)
        stored = keys[begin // self.block :][: None if most is None else most // self.block]
        self._use(keys)
        step = max(1, PREFILL_CHUNK // self.block)
        for at in range(0, len(stored), step):
            blocks = [self._blocks[key] for key in stored[at : at + step]]
            for block in blocks:
                cache.copy_in(row, block.columns)
            state.prefilled[row] += len(blocks) * self.block
            drafter.admit(memory, [row], state, _scores(target, blocks), [len(blocks) * self.block])
        self._over(row, state)
        return len(stored) * self.block

    def put(
        self, target: Target, drafter: Drafter, cache: Any, state: DecodeState, counts: Mapping[int, int],
        scores: Scores,
    ) -> None:  # fmt: skip
        """Store the blocks completed by one pass over the next counts[row] prompt tokens of each slot; `scores` is its
        result, and `state.prefilled` includes it.

        A block is stored only if all blocks before it are stored.
        """
        if not self.budget_bytes or not self.supports(target, cache):
            return
        self._fit(target, drafter, cache)
        for b, (row, length) in enumerate(counts.items()):
            taps = None if scores.taps is None else scores.taps[b, :length]
            hidden, taps = self._with_tail(state, row, scores.hidden[b, :length], taps)
            begin = state.prefilled[row] - len(hidden)
            keys = self._stored_keys(row, state, begin)
            if len(keys) * self.block >= begin:
                self._put(keys, cache, state, row, hidden, taps)
            self._over(row, state)

    def _with_tail(
        self, state: DecodeState, row: int, hidden: Tensor, taps: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Prepends the states left over from the previous chunk, and keeps those that do not fill a block now."""
        request, before, tapped = self._tails.pop(row, (None, hidden[:0], None))
        if request is state.requests[row] and len(before) + len(hidden) <= state.prefilled[row]:
            hidden = torch.cat([before, hidden])
            taps = None if taps is None or tapped is None else torch.cat([tapped, taps])
        left = state.prefilled[row] % self.block
        if 0 < left <= len(hidden) and state.prefilled[row] < len(state.tokens[row]) - 1:
            tail_taps = None if taps is None else taps[-left:].clone()
            self._tails[row] = state.requests[row], hidden[-left:].clone(), tail_taps
        return hidden, taps

    def clear(self) -> None:
        """Remove all blocks."""
        self._tails.clear()
        self._blocks.clear()
        self._reading.clear()
        self.bytes = 0

    # ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fit(self, target: Target, drafter: Drafter, cache: SlotCache) -> None:
        source = Source(target.spec, drafter.taps, cache.stacked, cache.layout)
        if source != self._source:
            self.clear()
            self._source = source

    def _stored_keys(self, row: int, state: DecodeState, end: int) -> list[Key]:
        """The stored blocks of the first `end` tokens of a slot's prompt; more if they were found before."""
        request, tokens = state.requests[row], state.tokens[row]
        reader, keys = self._reading.get(row, (request, []))
        if reader is not request or (keys and keys[-1] not in self._blocks):  # from another request, or evicted since
            keys = []
        while (len(keys) + 1) * self.block <= end:
            key = self._key(request, keys, tokens)
            if key not in self._blocks:
                break
            keys.append(key)
        self._reading[row] = request, keys
        return keys

    def _over(self, row: int, state: DecodeState) -> None:
        if state.prefilled[row] >= len(state.tokens[row]) - 1:
            self._reading.pop(row, None)

    def _key(self, request: Request, keys: Sequence[Key], tokens: Sequence[int]) -> Key:
        """The key of the prompt's block after `keys`."""
        first = "" if self.is_shared else request.tenant
        block = tokens[len(keys) * self.block : (len(keys) + 1) * self.block]
        return self._blocks[keys[-1]].number if keys else first, array("q", block).tobytes()

    def _use(self, keys: Sequence[Key]) -> None:
        """Mark the blocks of one prefix as just used, each slightly before its predecessor."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _put(
        self, keys: list[Key], cache: SlotCache, state: DecodeState, row: int, hidden: Tensor, taps: Tensor | None
    ) -> None:  # fmt: skip
        """Store a slot's whole blocks after `keys`, and append theirs.  hidden [n, H] and taps [n, T, H] of the last n
        tokens."""
        self._use(keys)
        read = state.prefilled[row]
        begin = read - len(hidden)
        size = self.block * (cache.column_bytes + _bytes(hidden[:1]) + _bytes(None if taps is None else taps[:1]))
        while (at := len(keys) * self.block) + self.block <= read:
            key = self._key(state.requests[row], keys, state.tokens[row])
            if key not in self._blocks:
                if not self._make_room(size, keys):
                    break
                span = slice(at - begin, at - begin + self.block)
                columns, tapped = cache.copy_out(row, at, at + self.block), None if taps is None else taps[span].clone()
                # clones: slices would keep the whole pass in memory
                self._blocks[key] = Block(next(self._numbers), columns, hidden[span].clone(), tapped)
                self.bytes += size
            keys.append(key)
            self._use(keys)

    def _make_room(self, size: int, keys: Sequence[Key]) -> bool:
        """Evict blocks until `size` bytes are free; returns False if only the blocks of this prefix are left."""
        if size > self.budget_bytes:
            self._warn(
                f"a block of {self.block} tokens takes {size} bytes, and the prefix cache has {self.budget_bytes}; no "
                "prefix is stored; raise serve.prefix_bytes"
            )
            return False
        while self.bytes + size > self.budget_bytes:
            oldest = next(iter(self._blocks))
            if keys and oldest == keys[-1]:
                return False
            self.bytes -= self._blocks.pop(oldest).size_bytes
        return True

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.getLogger(__name__).warning(message)


def _reason_against(target: Target, cache: Any) -> str:
    """Why common prefixes can't share columns; "" if they can."""
    if not isinstance(cache, SlotCache):
        return "its cache does not store keys and values by slot"
    family = target.family if isinstance(target, TransformersTarget) else None
    if family is not None and family.rotary is not None:
        return "its rotary factors depend on the length of the whole prompt"
    if (family is not None and family.is_recurrent) or not cache.stores_columns_alone:
        return "its cache stores more than keys and values"
    return ""


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.itemsize


@torch.inference_mode()
def _scores(target: Target, blocks: Sequence[Block]) -> Scores:
    """The target's result for these blocks, as one slot's chunk.  A copy that a drafter may keep."""
    hidden = torch.cat([block.hidden for block in blocks])
    tapped = [block.taps for block in blocks if block.taps is not None]
    return Scores(target.head(hidden[None, -1:]), hidden[None], torch.cat(tapped)[None] if tapped else None)
