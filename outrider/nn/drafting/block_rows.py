"""Training rows of block drafters: blocks under random anchors, some with their first tokens given.

B sequences, S tokens, A anchors of a sequence, K tokens of a block, M rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.rows import RowLabels, SharedLabels, sample_anchors

PREFIX_DECAY = 0.9
"""A block's first n tokens are given with probability proportional to PREFIX_DECAY ** n, n from 1 to K - 1.  (D2SD,
arXiv 2606.04446.)"""


class Blocks(Protocol):
    """A module that drafts the blocks of a batch, such as `Backbone`."""

    config: Any
    """With `block` and `anchors`."""

    def prefix_lengths(self, batch: Batch, blocks: int) -> Tensor | None:
        """How many first tokens of each block are given, [B, blocks]; None for no tokens."""

    def drafted(self, batch: Batch, at: Tensor, live: Tensor, prefix_lengths: Tensor | None) -> Tensor:
        """States [B, A, K, H] of blocks after the tokens at positions `at` [B, A]; live [B, A] is False for padding.

        If several processes split the texts, those of this process.
        """

    def weights(self, batch: Batch, at: Tensor) -> Tensor:
        """Weight of a trained row of each depth, [K] or [B, A, K]."""


class BlockRows(SharedLabels):
    """Predictions of blocks under random anchors of a batch: K rows per block; row k of anchor a has label
    a + 1 + k."""

    before: Tensor | None = None
    """[blocks, H], what a method uses from the token before each anchor; None if nothing."""

    def __init__(self, model: DraftModel, blocks: Blocks, batch: Batch):
        self.slots = blocks.config.block
        at, live, labels_at, loss_mask = sample_anchors(batch, blocks.config.anchors, 1, self.slots)
        prefix_lengths = blocks.prefix_lengths(batch, at.shape[1])
        states = blocks.drafted(batch, at, live, prefix_lengths)
        weights = loss_mask * _weights(blocks, batch, at, prefix_lengths)
        if batch.stripe is not None:
            at, labels_at, weights = map(batch.stripe.own, (at, labels_at, weights))
            labels_at = labels_at.clamp(min=1)  # padding after the last block has position 0 and weight 0
        text = torch.arange(len(at), device=at.device).repeat_interleave(at.shape[1])
        labels_at, weights = labels_at.flatten(0, 1), weights.flatten(0, 1)
        self.previous = batch.tokens[text[:, None], labels_at - 1].flatten()
        """[M], the token before each row's label."""
        self.anchors_at = text * batch.tokens.shape[1] + labels_at[:, 0] - 1
        """[blocks], index of each anchor in the batch's tokens."""
        super().__init__(model, states.flatten(0, 2), batch.final, RowLabels.blocks(batch, text, labels_at, weights))

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self.model.taught(*self.whole(states, rows)).flatten(0, 1)

    def whole(self, states: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """These rows by block: states [n, K, H] and the token before each, [n, K]."""
        return states.unflatten(0, (-1, self.slots)), self.previous[rows].unflatten(0, (-1, self.slots))

    def before_of(self, rows: slice) -> Tensor | None:
        """`before` of these rows' blocks."""
        return None if self.before is None else self.before[rows.start // self.slots : rows.stop // self.slots]


def _weights(blocks: Blocks, batch: Batch, at: Tensor, prefix_lengths: Tensor | None) -> Tensor:
    """Weights of the rows, which decay from the first token that is not given; given tokens have weight 0."""
    if prefix_lengths is None:
        return blocks.weights(batch, at)
    order = torch.arange(blocks.config.block, device=at.device) - prefix_lengths[..., None]
    return (order >= 0) * blocks.weights(batch, at)[order.clamp(min=0)]


def sample_prefix_lengths(batch: Batch, blocks: int, share: float, block: int) -> Tensor:
    """How many first tokens of each block are given, [B, blocks]: 0, or for a `share` of the blocks 1 to block - 1."""
    # on the CPU, whose random state a checkpoint stores
    chance = batch.random(torch.rand, 2, blocks)
    cumulative = (PREFIX_DECAY ** torch.arange(1, block)).cumsum(0)
    lengths = 1 + torch.searchsorted(cumulative, chance[:, 1].contiguous() * cumulative[-1]).clamp(max=block - 2)
    return lengths.where(chance[:, 0] < share, 0).to(batch.tokens.device)


def prefix_tokens(tokens: Tensor, at: Tensor, lengths: Tensor, width: int) -> Tensor:
    """The first lengths[b, a] tokens after positions `at` [B, A] of texts [B, S], in the slots of a block that would
    otherwise hold masks: [B, A, width], -1 in the others."""
    order = torch.arange(width, device=at.device)
    positions = (at[..., None] + order).clamp(max=tokens.shape[1] - 1)
    following = tokens.gather(1, positions.flatten(1)).view(positions.shape)
    return following.where((order > 0) & (order <= lengths[..., None]), -1)
