"""Patch diffusion: the local layers of a target of bytes fill a block of masks in one or a few passes, in both
directions.  (BLT-DV: Fast Byte Latent Transformer, arXiv 2605.08044.)

The block is the anchor's byte and `block` masks after it.  Its rows see the text and each other, and use the latent of
the last patch that was read; the global model does not run.  Each of `steps` passes fills in the bytes with the highest
confidence, which the next pass sees.  The same target then verifies the block byte by byte.

q is the softmax of each row from the pass that filled it.  The likeliest byte is filled in, so rows depend only on the
text, and drawing them independently is exact.

`TargetModel` trains the target's weights further for such blocks.  The result is a new target, which can also decode
alone; the output is exact relative to it.

Differs from the paper: blocks follow sampled positions of a text, not each other over all of it; every second one is
masked whole; bytes are filled in by confidence alone; and the rows of text learn the target's own distribution by KL
(`ar`), the paper's learn the text by cross entropy.

Use it if the target reads bytes, has a global model far wider than its local layers, and can be trained.

B live slots, A drawn positions of a text, K masks of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState
from outrider.lab import byte_patches, stale, target_model
from outrider.nn.draft_model import Batch
from outrider.nn.drafting import serving
from outrider.nn.masks import trained_mask, with_mask
from outrider.nn.rows import sample_anchors
from outrider.targets.cache.attention_mask import Tree
from outrider.targets.hf import causal_lm
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["patch_diffusion"] = "patch_diffusion"
    block: PositiveInt = 8
    """Masks after the anchor, and bytes drafted per step."""
    steps: PositiveInt = 1
    """Passes of the local layers that fill a block."""
    mask_token: NonNegativeInt | None = None
    """Id of the target's token for masks.  Defaults to the tokenizer's mask token, else to the first unused row of the
    embedding."""
    anchors: PositiveInt = 32
    """Most blocks trained per text and step."""


class PatchDiffusion(Drafter):
    """Its memory is the target's own cache, which keeps nothing of a block."""

    def __init__(self, target: Target, config: Config):
        self.target = stale.patched(target, config.kind)
        self.mask_token, self.limit, self.passes = trained_mask(config, target), config.block, config.steps

    def allocate(self, cache: Cache) -> Cache:
        return cache

    @torch.inference_mode()
    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        logits = self._filled(memory, state)[:, : int(budget.max())]
        return serving.possible(serving.side_by_side(logits, budget, state), state)

    def _filled(self, cache: Any, state: DecodeState) -> Tensor:
        """Logits [B, K, V] of the block, each row's from the pass that filled it."""
        rows, width = len(state.rows), self.limit + 1
        device = state.device
        block = Tree(
            torch.ones(1, width, width, dtype=torch.bool, device=device), torch.arange(width, device=device)[None]
        )
        tokens = torch.full((rows, self.limit), self.mask_token, device=device)
        is_open, filled = torch.ones_like(tokens, dtype=torch.bool), None
        for more in reversed(range(self.passes)):
            with stale.reading_on(self.target, cache, state.rows) as read:
                logits = read(torch.cat([state.anchor[:, None], tokens], 1), block)[:, 1:]
            filled = logits if filled is None else torch.where(is_open[..., None], logits, filled)
            if not more:
                break
            chosen = surest(logits.masked_fill(~is_open[..., None], -torch.inf), -(-self.limit // self.passes))
            tokens = torch.where(chosen & is_open, logits.argmax(-1), tokens)
            is_open = is_open & ~chosen
        assert filled is not None
        return filled


def surest(logits: Tensor, count: int) -> Tensor:
    """[B, K] bool, True for the `count` rows of each slot that are most confident, by logits [B, K, V]."""
    sure = logits.softmax(-1).amax(-1).nan_to_num(-1.0)  # a row that was filled is -inf throughout
    return torch.zeros_like(sure, dtype=torch.bool).scatter(1, sure.topk(min(count, sure.shape[1]), 1).indices, True)


def build(config: Config, target: Target) -> PatchDiffusion:
    return PatchDiffusion(target, config)


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TargetModel(target_model.TargetModel):
    """A target that fills blocks: after a sampled position come the next byte, as the anchor, and K rows."""

    def __init__(self, config: Config, target: Target):
        super().__init__(with_mask(config, target), target)
        self.mask_token, self.block = PatchDiffusion(target, self.config).mask_token, config.block

    def predict(self, batch: Batch) -> target_model.Rows:
        """Every second block is masked whole, as the first pass finds it; of the others a share, drawn for each."""
        anchors = sample_anchors(batch, self.config.anchors, 2, self.block)
        shares = 2 * torch.rand(*anchors.at.shape, 1)  # on the CPU, whose random state a checkpoint stores
        chance = torch.rand(*anchors.at.shape, self.block)
        masked = ((chance < shares) | (chance == chance.amin(-1, keepdim=True))).to(anchors.at.device)
        # bytes that are not trained may belong to another text
        states = self.read(batch.tokens, batch.documents, anchors.at, masked | ~anchors.loss_mask)
        return target_model.Rows(self, batch, anchors._replace(loss_mask=anchors.loss_mask & masked), states)

    def read(self, tokens: Tensor, documents: Tensor, at: Tensor, inputs: Tensor | None = None) -> Tensor:
        """States [B, S + A * K, H] of texts [B, S] and of the rows after position `at` + 1 [B, A].

        inputs: which of these rows are masked, [B, A, K] bool; all unless given."""
        length, width = tokens.shape[1], self.block + 1
        mask, positions = target_model.rows_of(documents, at, width, causal=False)
        columns = at[..., None] + 1 + torch.arange(width, device=at.device)
        text_tokens = tokens.gather(1, columns.flatten(1).clamp(max=length - 1)).view(columns.shape)
        masked = torch.ones_like(text_tokens[..., 1:], dtype=torch.bool) if inputs is None else inputs
        block = torch.cat([text_tokens[..., :1], text_tokens[..., 1:].masked_fill(masked, self.mask_token)], -1)
        with byte_patches.held(width * at.shape[1]):
            both = torch.cat([tokens, block.flatten(1)], 1)
            states = causal_lm.states(self.lm, both, attention_mask=mask[:, None], position_ids=positions)
        rows = states[:, length:].unflatten(1, (at.shape[1], width))[:, :, 1:]
        return torch.cat([states[:, :length], rows.flatten(1, 2)], 1)

    def drafter(self) -> PatchDiffusion:
        """A drafter with a copy of the weights as its target, `drafter().target`."""
        return PatchDiffusion(self.trained_target(), self.config)
