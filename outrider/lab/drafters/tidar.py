"""TiDAR: one pass of one model verifies a draft and makes the next one, in masks after every node.  (arXiv
2511.08923.)

The anchor and every drafted node are followed by `block` masks.  They see what their node sees and each other in both
directions; no row of the text sees them, and they are not cached.  The masks after the last accepted node give the next
draft, so a step is one pass of block + 1 + (block + 1) * block rows.  Slots of a block are independent, so q is the
softmax of each mask's own row.

One language model is trained for both: `TargetModel` trains a target's weights further on rows of text and on masks
after sampled positions.  The result is a new target, which can also decode alone; the output is exact relative to it,
not to the original target.  Masks are one of its tokens, so the drafter has no weights.

Differs from the paper: the mask at place t + 1 predicts token t + 2, as in a language model, not its own place, and
token t + 1 is always the acceptance rule's, so the first mask does not see it; masks follow sampled positions, not the
whole text in blocks; the rows of text learn the target's own distribution by KL (`ar`), so that the model stays near
it, the paper's learn labels by cross entropy; and prompts have no masks, so a text's first step drafts nothing.

Use it if the target's own weights can be trained for long and more rows in a pass are free.  After a short training it
is slower than the target alone.

B live slots, N drafted nodes, A drawn positions of a text, K masks of a block, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Scores
from outrider.lab import target_model
from outrider.lab.probe_rows import rows_after
from outrider.nn.drafting import serving
from outrider.nn.masks import trained_mask, with_mask
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["tidar"] = "tidar"
    block: PositiveInt = 4
    """Masks after every row of the verified pass, and tokens drafted per step."""
    mask_token: NonNegativeInt | None = None
    """Id of the target's token for masks.  Defaults to the tokenizer's mask token, else to the first unused row of the
    embedding."""
    anchors: PositiveInt = 64
    """Most blocks trained per text and step."""


class Tidar(Drafter):
    """Its memory: every slot's states [K, H] of the masks after its last token, None before the first pass."""

    def __init__(self, target: Target, config: Config):
        target.check_probe()
        self.target, self.limit, self.hidden = target, config.block, target.spec.hidden
        self.mask_token, self.probe_rows = trained_mask(config, target), (config.block + 1) * config.block

    def allocate(self, cache: Cache) -> list[Tensor | None]:
        return [None] * cache.slots

    @torch.inference_mode()
    def propose(self, memory: list[Tensor | None], state: DecodeState, budget: Tensor) -> Draft:
        stored = [memory[row] for row in state.rows]
        sizes = budget * torch.tensor([states is not None for states in stored])
        if not sizes.any():
            return Draft.empty(len(stored), state.device)
        some = next(states for states in stored if states is not None)
        stacked = torch.stack([torch.zeros_like(some) if states is None else states for states in stored])
        logits = self.target.head(stacked[:, : int(sizes.max())])
        return serving.possible(serving.side_by_side(logits, sizes, state), state)

    @torch.inference_mode()
    def probe(self, memory: list[Tensor | None], state: DecodeState, draft: Draft) -> Probe:
        mask, depths = rows_after(*draft.rows(), self.limit, causal=False)
        return Probe(self.target.embed(torch.full_like(depths, self.mask_token)), mask, depths)

    def observe(
        self, memory: list[Tensor | None], state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> None:
        assert scores.probe is not None
        for b, row in enumerate(state.rows):
            last = accepted.rows(b)[-1]
            memory[row] = scores.probe[b, last * self.limit : (last + 1) * self.limit].clone()

    def free(self, memory: list[Tensor | None], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None


def build(config: Config, target: Target) -> Tidar:
    return Tidar(target, config)


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TargetModel(target_model.ProbedTargetModel):
    """A target that drafts for itself in masks."""

    is_causal = False

    def __init__(self, config: Config, target: Target):
        super().__init__(with_mask(config, target), target)
        self.mask_token, self.block = Tidar(target, self.config).mask_token, config.block

    def inputs(self, tokens: Tensor, documents: Tensor, at: Tensor) -> Tensor:
        return self.words(at.new_full((len(at), at.shape[1] * self.block), self.mask_token))

    def drafter(self) -> Tidar:
        """A drafter with a copy of the weights as its target, `drafter().target`."""
        return Tidar(self.trained_target(), self.config)
