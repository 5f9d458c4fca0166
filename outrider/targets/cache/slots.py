"""Keys and values of every slot in one buffer per layer: append a pass, keep one path of it, and forget the rest.

A slot's tokens fill columns 0, 1, ... without gaps.  Its length says which are valid; lowering it forgets tokens.  A
pass writes its rows after each slot's length; `keep` moves the accepted ones together and increases the length.  Layers
with a window store all keys too, and their mask hides those too far back, so trees, truncation and reused slots work
the same for all layers.

Recurrent layers have a state instead of keys; see `states`.

R rows of a pass, n tokens a row, h heads, d head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from outrider.decoding.draft import to_device
from outrider.targets.cache.attention_mask import AttentionLimit, PassLayout, additive, span
from outrider.targets.cache.stacks import LayerBuffer, Stacks
from outrider.targets.cache.states import RecurrentStates, StateCalls

STEP_WIDTH = 64
"""Maximum number of tokens per row of a step; wider passes read prompts.  Steps share one mask, and successive steps
have the same slots, so these are moved together once instead of being copied in every step."""
VIEWS = 64
"""Number of slot spans whose views are stored; after that, all are dropped."""
COLUMNS = 256
"""A captured pass on a GPU reads a multiple of this many columns."""


class SlotCache(StateCalls):
    """Keys and values of `slots` texts of at most `length` tokens.  To attention layers it looks like transformers'
    Cache.

    A layer's buffers are created when it first writes; see `stacks` for their memory.
    """

    is_compileable = False

    def __init__(self, slots: int, length: int, device: torch.device | str = "cpu", layers: int = 1, undo: int = 0):
        """layers: how many are likely to store keys and values of the same shape.  undo: tokens of a slot that `cut`
        can take back without loss if layers are recurrent; each costs a copy of the slot's states."""
        self.stacked, self.undo = layers, undo
        self.slots = slots
        self.length = length
        self.device = torch.device(device)
        self.stacks = Stacks(slots, length, layers, self.device)
        self.lengths = [0] * slots
        self.buffer_rows = list(range(slots))
        """Which row of the buffers holds each slot's keys and values; see `gather`."""
        self._gathered: Sequence[int] | None = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._indexers: dict[int, Tensor] = {}
        self.line = torch.arange(length, device=self.device)
        self._views: dict[tuple[int, int, int], list[Tensor]] = {}
        self._chain_masks: dict[tuple[torch.dtype, AttentionLimit | None], Tensor] = {}
        self.states = RecurrentStates(slots, undo)
        self.rows: list[int] = []
        """Slots of the open pass."""
        self._starts: list[int] = []
        """Length of each of them before the pass."""
        self._open_rows: list[int] = []
        """Buffer row of each of them."""
        self._span: slice | None = None
        """These buffer rows as a slice; None if they are not contiguous."""
        self.width = 0
        """Tokens per row of the open pass, padding included."""
        self.end = 0
        """Number of columns that some row of the open pass attends to."""
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        """Tokens of each slot, if the target passes them to `reads`."""
        self.prompts = [0] * slots
        """Text length that determined the rotary factors of a slot's prompt, -1 if it was read in parts; 0 after the
        first verified pass."""
        self.long = [False] * slots
        """Whether a slot was read as a text longer than the pretraining context."""
        self._reads: list[list[int]] | None = None
        self.in_steps = False
        """Whether recurrent layers must run position by position, so that any of their states can be stored."""
        self.is_even = True
        """Whether all rows of the open pass start at the same length, in contiguous buffer rows."""
        self._at: tuple[Tensor, Tensor] | None = None

    @property
    def layout(self) -> tuple[LayerBuffer, ...]:
        """Every buffer, in order of creation; empty before the first pass."""
        return self.stacks.layout

    @property
    def layers(self) -> list[int]:
        """Layers that store keys and values; empty before the first pass."""
        return sorted(self._layers)

    @property
    def buffers(self) -> list[Tensor]:
        """`views` of the open pass's rows."""
        assert self._span is not None
        return self.views(self._span)

    def views(self, rows: slice) -> list[Tensor]:
        """Keys, then values, of each layer that stores them, in these buffer rows: [R, h, length, d]."""
        key = rows.start, rows.stop, len(self._layers)
        if key not in self._views:
            if len(self._views) >= VIEWS:
                self._views.clear()
            self._views[key] = [buffer[rows] for _, both in sorted(self._layers.items()) for buffer in both]
        return self._views[key]

    def laid_out(self, layout: Sequence[LayerBuffer]) -> SlotCache:
        """This cache with these buffers, before any pass: a compiled step does not create any."""
        for buffer in layout:
            self.stacks.make(buffer)
        self._take()
        return self

    def _take(self) -> None:
        """Take every layer's buffers from the stacks."""
        made = {(b.layer, b.holds): part for b, part in zip(self.layout, self.stacks.parts(), strict=True)}
        self._indexers = {layer: part for (layer, holds), part in made.items() if holds == "index"}
        keys = {layer: part for (layer, holds), part in made.items() if holds == "keys"}
        self._layers, self._views = {layer: (part, made[layer, "values"]) for layer, part in keys.items()}, {}

    def reserve(self, columns: int) -> None:
        """Make room for texts of this many tokens.  If buffers grow, earlier views become invalid."""
        assert columns <= self.length, f"a pass up to {columns} tokens in a cache of {self.length}"
        if columns > self.stacks.columns:
            self.stacks.grow(columns, max(self.lengths))
            self._take()

    def gather(self, rows: Sequence[int]) -> None:
        """Move these slots to contiguous buffer rows in this order, so that a pass over them reads a slice."""
        if rows is self._gathered:
            return
        current = [self.buffer_rows[row] for row in rows]
        # start where most of them already are; if they don't fit there, at 0, so that more can follow
        [(first, _)] = Counter(index - n for n, index in enumerate(current)).most_common(1)
        first = first if 0 <= first <= self.slots - len(rows) else 0
        placement = dict(zip(rows, range(first, first + len(rows)), strict=True))
        if current != list(placement.values()):
            taken = set(placement.values())
            others = [row for row in range(self.slots) if row not in placement and self.buffer_rows[row] in taken]
            self._put(placement | dict(zip(others, sorted(set(current) - taken), strict=True)))
        self._gathered = rows

    @torch.inference_mode()
    def _put(self, placement: Mapping[int, int]) -> None:
        """Move slots to these buffer rows; the slots that occupied them are among those moved."""
        moved = [row for row, index in placement.items() if self.buffer_rows[row] != index and self.lengths[row]]
        come_from = {self.buffer_rows[row]: self.lengths[row] for row in moved}
        for stack in self.stacks.tensors if moved else ():
            # all are read before any is written, and only up to each text's length
            taken = [stack[:, at, :, :held].clone() for at, held in come_from.items()]
            for row, columns in zip(moved, taken, strict=True):
                stack[:, placement[row], :, : columns.shape[2]] = columns
        for row, index in placement.items():
            self.buffer_rows[row] = index
        for at in come_from.keys() - {placement[row] for row in moved}:
            self.stacks.give_back(at, come_from[at])

    # ── one pass ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, rows: Sequence[int], width: int, in_steps: bool = False, noted: int | None = None) -> None:
        """Begin a pass of `width` tokens per row; `update` writes there until the next one.

        in_steps: states are stored at each position, or only at the last `noted` ones.
        """
        self.rows, self.width, self.in_steps = list(rows), width, in_steps
        self._starts = [self.lengths[row] for row in self.rows]
        self._open_rows = [self.buffer_rows[row] for row in self.rows]
        self._span, self._at, self._reads = span(self._open_rows), None, None
        if self._span is None and width <= STEP_WIDTH:
            self.gather(self.rows)
            self._open_rows = [self.buffer_rows[row] for row in self.rows]
            self._span = span(self._open_rows)
        self.end = max(self._starts) + width
        self.reserve(self.end)
        self.is_even = len(set(self._starts)) == 1 and self._span is not None
        self.states.open(noted)

    def reads(self, tokens: Tensor) -> None:
        """Set the tokens [R, n] of the open pass: those that are kept are added to `texts`."""
        self._reads = tokens.tolist()

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write this layer's keys and values [R, h, n, d]; returns the rows' up to the longest, [R, h, end, d]."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._buffer(layer_idx, "keys", keys), self._buffer(layer_idx, "values", values)
        buffers = self._layers[layer_idx]
        return self._write(buffers[0], keys), self._write(buffers[1], values)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Write this layer's index keys of a sparse attention [R, n, d]; returns those up to the longest, [R, end,
        d]."""
        keys = keys.unsqueeze(1)
        if layer_idx not in self._indexers:
            self._indexers[layer_idx] = self._buffer(layer_idx, "index", keys)
        return self._write(self._indexers[layer_idx], keys)[:, 0]

    def cached(self, layer: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer for these slots, read-only: [R, h, n, d], with n the longest one's length."""
        longest = max(self.lengths[row] for row in rows)
        indices = [self.buffer_rows[row] for row in rows]
        keys, values = (buffer[span(indices) or indices][:, :, :longest] for buffer in self._layers[layer])
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Some families compute default positions from it; we always pass positions."""
        return max(self._starts, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def mask(self, tree_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [R or 1, 1, Q, end] of the open pass.

        tree_mask [R or 1, Q, n] bool: which of the pass's own tokens each query attends to; None is causal order, Q =
        n.  Every query attends to everything in its slot before the pass.
        """
        return additive(self._bool_mask(tree_mask), dtype)

    def masks(
        self, tree_mask: Tensor | None, dtype: torch.dtype, limits: Mapping[str, AttentionLimit | None],
        depths: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """A mask like `mask` for every kind of layer, within that kind's limit.  depths as in `positions`."""
        has_chunks = any(limit is not None and limit.kind == "chunk" for limit in limits.values())
        if tree_mask is None and self.is_even and not has_chunks:
            return {kind: self._chain_mask(dtype, limit) for kind, limit in limits.items()}
        mask, depths = self._bool_mask(tree_mask), self._order if depths is None else depths
        return {
            kind: additive(mask if limit is None else mask & self._layout.limit_mask(limit, depths), dtype)
            for kind, limit in limits.items()
        }

    def _chain_mask(self, dtype: torch.dtype, limit: AttentionLimit | None) -> Tensor:
        """The mask of a chain whose rows all start at the same length.  Steps use slices of one mask that covers all
        widths and lengths; chunks of prompts get their own."""
        width, start = self.width, self._starts[0]
        if width > STEP_WIDTH:
            return self._new_chain_mask(start, width, dtype, limit)
        key = dtype, limit
        if key not in self._chain_masks:
            self._chain_masks[key] = self._new_chain_mask(self.length, STEP_WIDTH, dtype, limit)
        mask = self._chain_masks[key][..., :width, self.length - start : self.length + width]
        # GPU kernels read masks in words of 16 bytes, and a slice may not be aligned
        return mask if self.device.type == "cpu" else mask.clone(memory_format=torch.contiguous_format)

    def _new_chain_mask(self, start: int, width: int, dtype: torch.dtype, limit: AttentionLimit | None) -> Tensor:
        query_positions = torch.arange(width, device=self.device)[:, None]
        key_positions = torch.arange(-start, width, device=self.device)
        mask = key_positions <= query_positions
        if limit is not None:
            mask &= key_positions > query_positions - limit.size
        return additive(mask[None], dtype)

    def _bool_mask(self, tree_mask: Tensor | None) -> Tensor:
        """The mask before limits are applied, [R or 1, Q, end] bool."""
        if tree_mask is None:
            tree_mask = torch.ones(1, self.width, self.width, dtype=torch.bool, device=self.device).tril()
        if self.is_even:
            return torch.nn.functional.pad(tree_mask, (self._starts[0], 0), value=True)
        return self._layout.mask(tree_mask)

    def positions(self, depths: Tensor | None = None) -> Tensor:
        """[R or 1, n] positions of the open pass's tokens.  depths [R or 1, n] counts from each row's start; None is
        0..n-1."""
        depths = self._order if depths is None else depths
        return depths + self._starts[0] if self.is_even else self._layout.positions(depths)

    @property
    def starts(self) -> Tensor:
        """[R] lengths of the open pass's rows before it."""
        return to_device(self._starts, self.device)

    @property
    def columns(self) -> Tensor:
        """[end] 0, 1, ... up to the last column that the open pass attends to."""
        return self.line[: self.end]

    @property
    def _order(self) -> Tensor:
        return self.line[None, : self.width]

    @property
    def _layout(self) -> PassLayout:
        return PassLayout(self.starts, self.columns, self.width)

    # ── after a pass ──────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, counts: Sequence[int]) -> None:
        """Keep the first counts[r] tokens of each row of the pass."""
        for row, start, count in zip(self.rows, self._starts, counts, strict=True):
            self.lengths[row] = start + count
        if self._reads is not None:
            for row, start, count, read in zip(self.rows, self._starts, counts, self._reads, strict=True):
                self.texts[row][start:] = read[:count]
        if self.states.work:
            self.states.append(self.rows, self._starts, self.width, counts)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's first token (the anchor) and the nodes on its path.  Node n is token n + 1."""
        for row, start, path in zip(self.rows, self._starts, paths, strict=True):
            self.straighten(row, start, path)
        if self._reads is not None:
            self._reads = [
                [read[0], *(read[node + 1] for node in path)] for read, path in zip(self._reads, paths, strict=True)
            ]
        self.append([len(path) + 1 for path in paths])

    def cut(self, row: int, length: int) -> None:
        """Forget all tokens of a slot after the first `length`.

        If layers are recurrent, it goes back to the last stored state up to that length, at worst to 0; `lengths` then
        has the new length, and the tokens after it must be reread.
        """
        if length < self.lengths[row]:
            self.lengths[row] = self.states.cut(row, length)

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.stacks.give_back(self.buffer_rows[row], self.lengths[row])
            self.lengths[row] = 0
            self.states.remembered.pop(row, None)

    # ── columns of a slot, copied ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of a slot, all layers together."""
        return self.stacks.column_bytes

    @property
    def stores_columns_alone(self) -> bool:
        """Whether texts with equal prefixes have equal columns and nothing else is stored for a text; known after the
        first pass."""
        return not (self.states.stored or self.states.work or any(self.texts))

    @torch.inference_mode()
    def copy_out(self, row: int, begin: int, end: int) -> list[Tensor]:
        """Copies of a slot's columns from `begin` to before `end`: for each stack of n buffers [n, h, end - begin, d].

        `copy_in` takes them, in this cache or in one of the same `layout` and number of `layers`.
        """
        assert end <= self.lengths[row], f"columns up to {end} of a slot that has {self.lengths[row]}"
        at = self.buffer_rows[row]
        stacks = zip(self.stacks.tensors, self.stacks.used, strict=True)
        return [stack[:used, at, :, begin:end].clone() for stack, used in stacks]

    @torch.inference_mode()
    def copy_in(self, row: int, columns: Sequence[Tensor]) -> None:
        """Append columns to a slot, whose length must equal the `begin` with which they were copied out."""
        begin, at = self.lengths[row], self.buffer_rows[row]
        end = begin + columns[0].shape[2]
        self.reserve(end)
        for stack, used, part in zip(self.stacks.tensors, self.stacks.used, columns, strict=True):
            stack[:used, at, :, begin:end] = part
        self.lengths[row] = end

    # ── buffers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _buffer(self, layer: int, holds: Literal["keys", "values", "index"], states: Tensor) -> Tensor:
        """A new buffer for states [R, h, n, d] like these."""
        _, heads, _, size = states.shape
        return self.stacks.make(LayerBuffer(layer, holds, heads, size, states.dtype, states.device))

    @torch.inference_mode()
    def straighten(self, row: int, start: int, path: Sequence[int]) -> None:
        """Move the nodes on a path to the columns after the anchor, which is in column `start`."""
        straight = next((i for i, node in enumerate(path) if node != i), len(path))
        if straight == len(path):
            return
        moved = to_device([start + 1 + node for node in path[straight:]], self.device)
        at, to = self.buffer_rows[row], slice(start + 1 + straight, start + 1 + len(path))
        for stack in self.stacks.tensors:
            stack[:, at, :, to] = stack[:, at].index_select(2, moved.to(stack.device))

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        if self.is_even:
            buffer[self._span, :, self._starts[0] : self.end] = states
            return buffer[self._span, :, : self.end]
        if self._at is None:  # only if layers write by themselves: a compiled step does not need it
            columns = torch.tensor(self._starts).unsqueeze(-1) + torch.arange(self.width)
            rows = to_device(self._open_rows, self.device).unsqueeze(-1)
            self._at = rows, columns.to(self.device, non_blocking=True)
        rows, columns = self._at
        if buffer.device != rows.device:  # a layer on another device
            rows, columns = rows.to(buffer.device), columns.to(buffer.device)
        buffer[rows, :, columns] = states.transpose(1, 2)
        # a slice is a view; a list of rows would copy everything
        return buffer[self._span or self._open_rows, :, : self.end]
