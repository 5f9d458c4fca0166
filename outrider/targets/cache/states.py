"""The states of recurrent layers, one row per slot, and those of a pass whose tokens are not accepted yet.

A pass in steps records the states after every position, and `append` stores those after the last accepted token in the
slot.  If a cache must support undo, each slot keeps a few older states, and `cut` goes back to one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StateSnapshot(NamedTuple):
    """One slot's recurrent states after its first `length` tokens."""

    length: int
    states: dict[Key, Tensor]


Key = tuple[int, str, int]
"""Layer, `conv` or `recurrent`, number of the state within the layer."""


class RecurrentStates:
    """The states of `slots` texts, of which `cut` can take back up to `undo` tokens without loss."""

    def __init__(self, slots: int, undo: int):
        self.slots, self.undo = slots, undo
        self.stored: dict[Key, Tensor] = {}
        """[slots, ...] after each slot's last token."""
        self.work: dict[Key, Tensor] = {}
        """[R, ...] of the open pass, after the tokens read so far."""
        self.trail: dict[Key, list[Tensor]] = {}
        """In a pass in steps: the same after every position, or after the last `noted`."""
        self.noted: int | None = None
        self.remembered: dict[int, deque[StateSnapshot]] = {}
        """By slot, in the order of their lengths."""

    def open(self, noted: int | None) -> None:
        """Begin a pass; states are recorded at its last `noted` positions, or at all of them."""
        self.work, self.trail, self.noted = {}, {}, noted

    def read(self, key: Key, rows: Sequence[int], starts: Sequence[int]) -> Tensor | None:
        """[R, ...] in the open pass; None if all rows start a text.  Layers may write into it."""
        if key not in self.work:
            if not any(starts) or key not in self.stored:
                return None
            stored = self.stored[key][rows]
            stored[[b for b, start in enumerate(starts) if not start]] = 0
            self.work[key] = stored
        return self.work[key]

    def note(self, layer: int) -> None:
        """Record this layer's states after one more position of the pass."""
        for key, state in self.work.items():
            if key[0] == layer:
                trail = self.trail.setdefault(key, [])
                trail.append(state.clone())
                if self.noted is not None:
                    del trail[: -self.noted]

    @torch.inference_mode()  # in the same mode as the passes that created states and buffers
    def append(self, rows: Sequence[int], starts: Sequence[int], width: int, counts: Sequence[int]) -> None:
        """Keep the first counts[r] tokens of each row of the pass, which is `width` wide."""
        for key, work in self.work.items():
            if key not in self.stored:
                self.stored[key] = work.new_zeros(self.slots, *work.shape[1:])
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                self.stored[key][row] = self._after(key, count, b, width)
        if self.undo:
            for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
                history = self.remembered.setdefault(row, deque(maxlen=self.undo + 1))
                for n in range(max(1, count - self.undo) if self.trail else count, count + 1):
                    states = {key: self._after(key, n, b, width).clone() for key in self.work}
                    history.append(StateSnapshot(start + n, states))

    def _after(self, key: Key, count: int, b: int, width: int) -> Tensor:
        """A state of row b after the first `count` tokens of the open pass."""
        trail = self.trail.get(key)
        return self.work[key][b] if trail is None else trail[count - 1 - width + len(trail)][b]

    @torch.inference_mode()
    def cut(self, row: int, length: int) -> int:
        """Go back to the largest length up to `length` whose states are stored, at worst to 0; returns that length."""
        if not self.stored:
            return length
        history = self.remembered.get(row, deque())
        while history and history[-1].length > length:
            history.pop()
        for key, state in history[-1].states.items() if history else ():
            self.stored[key][row] = state
        return history[-1].length if history else 0


class StateCalls:
    """The methods of transformers' Cache that recurrent layers call, for the rows of an open pass."""

    states: RecurrentStates
    rows: list[int]
    _starts: list[int]
    """Length of each of them before the pass."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Last inputs of a convolution, [R, channels, kernel]; None if all rows start a text.  Layers may write into
        it."""
        return self.states.read((layer_idx, "conv", state_idx), self.rows, self._starts)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """State [R, ...]; None if all rows start a text.  Layers may write into it."""
        return self.states.read((layer_idx, "recurrent", state_idx), self.rows, self._starts)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: object,
    ) -> Tensor:
        """Earlier inputs followed by the new ones [R, channels, n]; the last `conv_kernel_size` are stored."""
        before = self.get_conv_state(layer_idx, state_idx)
        kernel = conv_kernel_size or conv_states.shape[-1]
        joined = conv_states if before is None else torch.cat([before, conv_states], -1)
        joined = torch.nn.functional.pad(joined, (max(0, kernel - joined.shape[-1]), 0))
        self.states.work[layer_idx, "conv", state_idx] = joined[..., -kernel:].clone()
        return joined

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> Tensor:
        self.states.work[layer_idx, "recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return any(self._starts)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether the pass continues a text; read by some families."""
        return any(self._starts)
