"""TiDAR: one pass of one model verifies a draft and writes the next one, in masks behind every place where it may end.
(arXiv 2511.08923.)

Behind the anchor and every drafted node stand `block` masks.  They see what that row sees and each other in both
directions; no row of the text sees them, and none is cached.  After the acceptance rule has found where the draft
ends, the masks behind that row are the next draft: a step is one pass of block + 1 + (block + 1) * block rows.  Slots
of a block are independent, so q is the softmax of each mask's own row.

The model is a language model whose weights were trained for both: `TargetModel` continues a target's weights on rows of
text, and on masks behind drawn positions of it.  The result is a target of its own, which writes alone as well: texts
are exact relative to it, not to the target that it began from.  Masks are a token of it, so the drafter has no weights.

Differs from the paper: the mask at place t + 1 predicts token t + 2, as a language model's rows do, not its own place,
and token t + 1 is always the acceptance rule's, so the first mask does not know it; masks stand behind drawn positions,
not behind the whole text in blocks; the rows of text learn the target's own distribution by KL (`ar`), so that the
model stays near it, where the paper has cross entropy of labels; and none stands behind a prompt, so a text's first
step drafts nothing.

Use it where the target's own weights may be trained for long, and more rows in a pass cost nothing; after a short
training it is slower than the target alone.

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
    """Masks behind every row of the verified pass, and tokens drafted per step."""
    mask_token: NonNegativeInt | None = None
    """Id of the target's token that stands for masks.  Unless given: the tokenizer's mask token, else the first unused
    row of the embedding."""
    anchors: PositiveInt = 64
    """Most blocks trained per text and step."""


class Tidar(Drafter):
    """Its memory: of every slot the states [K, H] of the masks behind its last token, None before the first pass."""

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
    """The target that drafts for itself in masks."""

    is_causal = False

    def __init__(self, config: Config, target: Target):
        super().__init__(with_mask(config, target), target)
        self.mask_token, self.block = Tidar(target, self.config).mask_token, config.block

    def inputs(self, tokens: Tensor, documents: Tensor, at: Tensor) -> Tensor:
        return self.words(at.new_full((len(at), at.shape[1] * self.block), self.mask_token))

    def drafter(self) -> Tidar:
        """For its own copy of the weights, which is `drafter().target`."""
        return Tidar(self.trained_target(), self.config)
