"""The states of recurrent layers, a row a slot, and those of a pass of which it is not known yet how much is accepted.

A pass in steps notes the states after every position, and `append` stores those after the last accepted token in the
slot. A few are remembered a slot, where a cache must take back what it appended; `cut` goes back to one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class States(NamedTuple):
    """One slot's recurrent states after its first `length` tokens."""

    length: int
    states: dict[Key, Tensor]


Key = tuple[int, str, int]
"""Layer, `conv` or `recurrent`, number of the state within the layer."""


class RecurrentStates:
    """The states of `slots` texts, of which `cut` takes back up to `undo` tokens without loss."""

    def __init__(self, slots: int, undo: int):
        self.slots, self.undo = slots, undo
        self.stored: dict[Key, Tensor] = {}
        """[slots, ...] after what each slot holds."""
        self.work: dict[Key, Tensor] = {}
        """[R, ...] of the open pass, after what it has read so far."""
        self.trail: dict[Key, list[Tensor]] = {}
        """In a pass in steps: the same after every position, or after the last `noted`."""
        self.noted: int | None = None
        self.remembered: dict[int, deque[States]] = {}
        """By slot, in the order of their lengths."""

    def open(self, noted: int | None) -> None:
        """Begin a pass, of whose positions the last `noted` are wanted, or all."""
        self.work, self.trail, self.noted = {}, {}, noted

    def read(self, key: Key, rows: Sequence[int], starts: Sequence[int]) -> Tensor | None:
        """[R, ...] as the open pass has it; None where all rows begin.  Layers may write into it."""
        if key not in self.work:
            if not any(starts) or key not in self.stored:
                return None
            stored = self.stored[key][rows]
            stored[[b for b, start in enumerate(starts) if not start]] = 0
            self.work[key] = stored
        return self.work[key]

    def note(self, layer: int) -> None:
        """Remember this layer's states as they are after one more position of the pass."""
        for key, state in self.work.items():
            if key[0] == layer:
                trail = self.trail.setdefault(key, [])
                trail.append(state.clone())
                if self.noted is not None:
                    del trail[: -self.noted]

    @torch.inference_mode()  # the passes that made states and buffers were in it
    def append(self, rows: Sequence[int], starts: Sequence[int], width: int, counts: Sequence[int]) -> None:
        """The first counts[r] tokens of each row of the pass, `width` wide, stay."""
        for key, work in self.work.items():
            if key not in self.stored:
                self.stored[key] = work.new_zeros(self.slots, *work.shape[1:])
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                self.stored[key][row] = self._after(key, count, b, width)
        if self.undo:
            for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
                history = self.remembered.setdefault(row, deque(maxlen=self.undo + 1))
                for n in range(max(1, count - self.undo) if self.trail else count, count + 1):
                    history.append(States(start + n, {key: self._after(key, n, b, width).clone() for key in self.work}))

    def _after(self, key: Key, count: int, b: int, width: int) -> Tensor:
        """A state of row b after the first `count` tokens of the open pass."""
        trail = self.trail.get(key)
        return self.work[key][b] if trail is None else trail[count - 1 - width + len(trail)][b]

    @torch.inference_mode()
    def cut(self, row: int, length: int) -> int:
        """Go back to the last length up to `length` whose states are remembered, at worst to 0; returns it."""
        if not self.stored:
            return length
        history = self.remembered.get(row, deque())
        while history and history[-1].length > length:
            history.pop()
        for key, state in history[-1].states.items() if history else ():
            self.stored[key][row] = state
        return history[-1].length if history else 0
