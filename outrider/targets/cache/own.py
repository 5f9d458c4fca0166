"""Slots for families with their own kind of cache, known only as an object that one pass returns and the next one
takes.

Some families store more than keys, values and states: compressed blocks, matrices, or a class that refuses other
caches.  Every pass of a slot then works on a copy.  If only part of it is accepted, that part is read again before the
next pass, so a step with a rejection costs one more pass, but no family is refused because of its kind of cache.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.targets.hf.anatomy import ARGUMENTS

PASTS = (*ARGUMENTS, "state", "mems", "past_buckets_states")
"""Names of the argument that takes the cache which an earlier pass returned."""


class OwnCache:
    """Texts of at most `length` tokens in `slots` slots, which are read one by one."""

    is_even = False
    layers: Sequence[int] = ()
    undo = 0

    def __init__(self, model: PreTrainedModel, name: str, slots: int, length: int):
        """name: of the argument that takes the past, and of the output that returns it."""
        self.model, self.name = model, name
        self.slots, self.length = slots, length
        self.lengths = [0] * slots
        self.rows: list[int] = []
        self._starts: list[int] = []
        self._pasts: list[Any] = [None] * slots
        self._unread: list[Tensor | None] = [None] * slots
        """Trailing tokens [1, n] of a slot that are not in its past yet."""
        self._open: dict[int, tuple[Tensor, Any]] = {}
        """By slot, the tokens of the open pass and the past after it."""

    def open(self, rows: Sequence[int], width: int, in_steps: bool = False, noted: int | None = None) -> None:
        """Begin a pass of `width` tokens per row; the other arguments are not used."""
        self.rows = list(rows)
        self._starts = [self.lengths[row] for row in rows]
        assert max(self._starts, default=0) + width <= self.length

    def pass_arguments(self) -> dict[str, Any]:
        """Arguments of a pass over the open row, except its tokens."""
        [row] = self.rows
        if self._unread[row] is not None:
            out = self.model(input_ids=self._unread[row], **self._arguments(self._pasts[row]))
            self._pasts[row], self._unread[row] = out[self.name], None
        return self._arguments(copy.deepcopy(self._pasts[row]))

    def _arguments(self, past: Any) -> dict[str, Any]:
        return {"use_cache": True} if past is None else {"use_cache": True, self.name: past}

    def took(self, tokens: Tensor, out: Any) -> None:
        """Store the output of the open row's pass over tokens [1, n]."""
        self._open[self.rows[0]] = tokens, out[self.name]

    def append(self, counts: Sequence[int]) -> None:
        """Keep the first counts[r] tokens of each row of the pass."""
        for row, start, count in zip(self.rows, self._starts, counts, strict=True):
            read, past = self._open.pop(row)
            self.lengths[row] = start + count
            if count == read.shape[1]:
                self._pasts[row] = past
            elif count:
                self._unread[row] = read[:, :count]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's first token (the anchor) and the nodes on its path, which are the first of a chain."""
        assert all(list(path) == list(range(len(path))) for path in paths)
        self.append([len(path) + 1 for path in paths])

    def cut(self, row: int, length: int) -> None:
        """Forget all tokens of a slot after the first `length`; here, the whole slot is forgotten and must be
        reread."""
        if length < self.lengths[row]:
            self.free([row])

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lengths[row], self._pasts[row], self._unread[row] = 0, None, None
            self._open.pop(row, None)


@torch.inference_mode()
def past_name(model: PreTrainedModel) -> str | None:
    """The name under which a pass returns the cache that the next one takes; None if there is none."""
    taken = inspect.signature(model.forward).parameters
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        out = model(input_ids=token, use_cache=True)
    except (RuntimeError, TypeError):
        return None
    return next((name for name in PASTS if name in taken and out.get(name) is not None), None)
