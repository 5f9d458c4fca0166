"""A drafter on another device than its target: what it reads crosses once a step, and so does what it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Drafter, Scores
from outrider.decoding.state import DecodeState


class Abroad:
    """`drafter`, whose weights are on `device`, for a target that is elsewhere.

    Taps, tokens and settings come to the drafter, its draft goes back; logits and hidden states stay with the target.
    """

    def __init__(self, drafter: Drafter, device: torch.device):
        self.drafter, self.device = drafter, device
        self.taps, self.limit = drafter.taps, drafter.limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def allocate(self, cache: Cache) -> Any:
        return self.drafter.allocate(cache)

    def admit(self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        self.drafter.admit(memory, rows, state.on(self.device), self._taps_of(scores))

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        return self.drafter.propose(memory, state.on(self.device), budget).on(state.device)

    def observe(self, memory: Any, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        # what it was drawn from is [B, N, V]: the drafter made it, and need not be sent it
        told = replace(draft, q=None).on(self.device)
        self.drafter.observe(memory, state.on(self.device), told, kept, self._taps_of(scores))

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        self.drafter.free(memory, rows)

    def _taps_of(self, scores: Scores) -> Scores:
        return scores if scores.taps is None else scores._replace(taps=scores.taps.to(self.device))
