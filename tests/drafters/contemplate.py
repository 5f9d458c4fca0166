"""Contemplate: soft-prompt rows beside the anchor and every node look ahead inside the target's own pass.  (ConFu's
shape.)

After every row of the verified pass stand `rows` more, whose embeddings are learnt: they see what that row sees, and
each other up to themselves, at the positions behind it.  What the target makes of them behind the last accepted token
is the next draft: row j guesses the token j + 1 places on.  Untrained here: it shows the way of a probe, not its worth.

B live slots, N drafted nodes, P = (N + 1) * rows rows of the probe, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

import outrider
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Scores
from outrider.nn.serving import Sampler
from outrider.targets.protocol import Target


class Config(outrider.DrafterConfig):
    kind: Literal["contemplate"] = "contemplate"
    rows: PositiveInt = 3
    """Contemplate rows behind every row of the pass, and tokens drafted per step."""
    seed: int = 0


class Contemplate(Drafter):
    """Its memory: of every slot the states [rows, H] behind its last token, None before the first pass."""

    def __init__(self, target: Target, config: Config):
        self.target, self.rows, self.limit = target, config.rows, config.rows
        self.probe_rows = (self.limit + 1) * self.rows
        self.hidden = target.spec.hidden
        noise = torch.Generator().manual_seed(config.seed)
        scale = target.embed(torch.arange(8, device=target.device)).std()
        self.prompt = torch.randn(self.rows, self.hidden, generator=noise).to(target.device) * scale
        """[rows, H], what training would learn."""

    def allocate(self, cache: Cache) -> list[Tensor | None]:
        return [None] * cache.slots

    @torch.inference_mode()
    def propose(self, memory: list[Tensor | None], state: DecodeState, budget: Tensor) -> Draft:
        known = [memory[row] for row in state.rows]
        sizes = budget.clamp(max=self.limit) * torch.tensor([own is not None for own in known])
        if not sizes.any():
            return Draft.empty(len(known), state.device)
        some = next(own for own in known if own is not None)
        logits = self.target.head(torch.stack([torch.zeros_like(some) if own is None else own for own in known]))
        sampler = Sampler(state)
        for depth in range(int(sizes.max())):
            sampler.next(logits[:, depth])
        return sampler.draft(sizes)

    def probe(self, memory: list[Tensor | None], state: DecodeState, draft: Draft) -> Probe:
        mask, depths = draft.rows()
        slots, width = depths.shape
        own = (
            torch.eye(width, dtype=torch.bool, device=mask.device)
            .repeat_interleave(self.rows, 0)
            .repeat_interleave(self.rows, 1)
        )
        order = torch.arange(self.rows, device=mask.device).repeat(width)
        beside = (own & (order[:, None] >= order)).expand(slots, -1, -1)
        return Probe(
            self.prompt.repeat(width, 1).expand(slots, -1, -1),
            torch.cat([mask.repeat_interleave(self.rows, 1), beside], 2),
            depths.repeat_interleave(self.rows, 1) + 1 + order,
        )

    def observe(
        self, memory: list[Tensor | None], state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> None:
        assert scores.probe is not None
        for b, row in enumerate(state.rows):
            last = accepted.rows(b)[-1]
            memory[row] = scores.probe[b, last * self.rows : (last + 1) * self.rows].clone()

    def free(self, memory: list[Any], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None


def build(config: Config, target: Target) -> Contemplate:
    return Contemplate(target, config)
