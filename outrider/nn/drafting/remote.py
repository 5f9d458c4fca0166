"""A drafter on another device than its target: its inputs and its draft are each copied once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Scores


class RemoteDrafter(Drafter):
    """`drafter`, whose weights are on `device`, for a target on another device.

    Taps, tokens and settings are copied to the drafter and its draft back; logits and hidden states stay on the
    target's device.
    """

    def __init__(self, drafter: Drafter, device: torch.device):
        self.drafter, self.device = drafter, device
        self.taps, self.limit, self.hidden, self.watches = drafter.taps, drafter.limit, drafter.hidden, drafter.watches
        self.confidence_before_draw, self.probe_rows = drafter.confidence_before_draw, drafter.probe_rows
        self.steps, self.learns = drafter.steps, drafter.learns
        self.model = getattr(drafter, "model", None)
        """Its draft model, if it has one."""

    def refresh(self) -> None:
        self.drafter.refresh()

    def allocate(self, cache: Cache) -> Any:
        return self.drafter.allocate(cache)

    def admit(
        self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self.drafter.admit(memory, rows, self._here(state), self._taps_of(scores), lengths)

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        return _moved(self.drafter.propose(memory, self._here(state), budget), state.device)

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe | None:
        probe = self.drafter.probe(memory, self._here(state), _moved(draft, self.device))
        return probe and Probe(*(x.to(state.device) for x in (probe.embeddings, probe.mask, probe.depths)))

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        # q [B, N, V] is large, and the drafter created it itself
        local_draft = _moved(replace(draft, q=None), self.device)
        self.drafter.observe(memory, self._here(state), local_draft, accepted, self._taps_of(scores))

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        self.drafter.free(memory, rows)

    def _here(self, state: DecodeState) -> DecodeState:
        seeded = None if state.seeded is None else state.seeded.to(self.device)
        seeds = state.noise_seeds.to(self.device)
        return state.replaced(device=self.device, noise_seeds=seeds, seeded=seeded, judge=state.judge.on(self.device))

    def _taps_of(self, scores: Scores) -> Scores:
        taps, probe = (None if x is None else x.to(self.device) for x in (scores.taps, scores.probe))
        return scores._replace(taps=taps, probe=probe)


def _moved(draft: Draft, device: torch.device) -> Draft:
    return draft if draft.tokens.device == device else draft.each(lambda x: x.to(device))
