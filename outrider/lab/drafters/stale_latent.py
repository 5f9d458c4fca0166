"""Stale latent: a target of bytes and patches drafts with its own local decoder, past the end of the patch.  (BLT-S:
Fast Byte Latent Transformer, arXiv 2605.08044.)

At the end of a patch, its latent is missing until the global model has read it.  The local layers continue with the
last latent for `length` bytes; then one whole pass reads all of them, runs the global model once over all new patches,
and verifies.  Up to the end of the anchor's patch, drafted bytes are the target's own.

Needs no training and has no weights.  Differs from the paper: sampling too, by the acceptance rule with the local
layers' distribution as q; if the anchor is the last byte of its patch, the draft starts with a stale latent.

Use it if the target reads bytes, has a global model far wider than its local layers, and can't be trained.

B live slots, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState
from outrider.lab import stale
from outrider.nn.drafting import serving
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["stale_latent"] = "stale_latent"
    length: PositiveInt = 8
    """Bytes drafted per step."""


class StaleLatent(Drafter):
    """Its memory is the target's own cache, which has the drafted bytes until they are verified."""

    def __init__(self, target: Target, config: Config):
        self.target, self.limit = stale.patched(target, config.kind), config.length

    def allocate(self, cache: Cache) -> Cache:
        return cache

    @torch.inference_mode()
    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        with stale.reading_on(self.target, memory, state.rows) as read:

            def read_one(tokens: Tensor) -> Tensor:
                """Logits [B, V] after one more byte of each slot, [B]."""
                return read(tokens[:, None])[:, -1]

            draft = serving.chain(read_one(state.anchor), read_one, budget, state)
        return serving.possible(draft, state)


def build(config: Config, target: Target) -> StaleLatent:
    return StaleLatent(target, config)
