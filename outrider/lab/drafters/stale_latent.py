"""Stale latent: a target of bytes and patches drafts with its own local decoder, past the end of the patch.  (BLT-S:
Fast Byte Latent Transformer, arXiv 2605.08044.)

Where a patch ends, its latent is missing until the global model has read it.  The local layers write on without it, on
the last latent there is, for `length` bytes; then one whole pass reads all of them, runs the global model once over all
patches that ended among them, and verifies.  Up to the end of the patch in which the anchor stands, drafted bytes are
the target's own.

Needs no training and has no weights.  Differs from the paper: sampled too, by the acceptance rule, with the local
layers' own distribution as q; where the anchor is the last byte of its patch, the draft begins on a stale latent.

Use it where a target of bytes has a global model far wider than its local layers, and nothing can be trained.

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
    """Its memory is the target's own cache, where drafted bytes stand until the pass that verifies them."""

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
