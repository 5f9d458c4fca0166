"""Training rows of SpecBlock: blocks after sampled pairs, weighted by whether the draft got that far.

B texts, A pairs of a text, K slots of a block, M rows, m rows of one chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from outrider.nn.blocks import rollout_mask
from outrider.nn.draft_model import Batch
from outrider.nn.heads import class_weights, rank_class, rank_loss
from outrider.nn.rows import RowLabels, SharedLabels, pair_mask, sample_anchors, whole_blocks


class Rows(SharedLabels):
    """Predictions of blocks after sampled pairs: block b of pair i starts after m_1 + ... + m_{b-1} tokens, m sampled.

    Every block has all rows with a label; those after a wrong slot weigh 0.
    """

    def __init__(self, model: Any, batch: Batch):
        config, device = model.config, batch.tokens.device
        anchors = sample_anchors(batch, config.anchors, 2, config.blocks * config.slots)
        # on the CPU, whose random state a checkpoint stores
        taken = torch.randint(1, config.slots + 1, (config.blocks - 1,)).tolist()
        states = rollout(model, batch, anchors.at, taken)
        begins = torch.tensor([sum(taken[:b]) for b in range(config.blocks)], device=device)
        depths = begins[:, None] + torch.arange(config.slots, device=device)
        loss_mask = anchors.loss_mask[..., depths]
        where = loss_mask.nonzero().unbind(-1)
        text, pair, number, slot = where
        labels_at = anchors.labels_at[..., depths][where]
        block = (text * anchors.at.shape[1] + pair) * config.blocks + number
        rows = RowLabels.of(batch, text, labels_at, torch.ones_like(block), depths[number, slot], block)
        super().__init__(model, states[where], batch.final, rows)
        is_right, self.ranks = self._judged()
        right = torch.ones_like(loss_mask)
        right[where] = is_right
        counts = F.pad(right[..., :-1], (1, 0), value=True).long().cumprod(-1)
        self.weight = counts[where] * torch.as_tensor(config.decay, device=device) ** slot
        self.class_weights = class_weights(self.ranks[self.weight > 0])

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        logits = self.model.rank_head(self.states[rows].detach(), draft.detach())
        true = self.ranks[rows]
        return {"rank": rank_loss(logits.float(), true) * self.class_weights[true]}

    @torch.no_grad()
    def _judged(self) -> tuple[Tensor, Tensor]:
        """[M] bool, True if a row's likeliest token is the text's, and [M], the rank class of the target's choice."""
        right, ranks = [self.labels[:0].bool()], [self.labels[:0]]
        for part in whole_blocks(self.block, max(1, 2**22 // self.vocabulary)):
            draft = self.model.logits(self.states[part])
            right.append(draft.argmax(-1) == self.labels[part])
            ranks.append(rank_class(draft, self.target_logits(part).argmax(-1)))
        # older torch would reuse the head's weights, cast here without a gradient, for the loss
        torch.clear_autocast_cache()
        return torch.cat(right), torch.cat(ranks)


def rollout(model: Any, batch: Batch, at: Tensor, taken: Sequence[int]) -> Tensor:
    """States [B, A, blocks, K, H] of the successive blocks of the pairs `at` [B, A].

    Block b + 2 continues slot taken[b] - 1 of the previous one, with the text's token.
    """
    slots, length = model.config.slots, batch.tokens.shape[1] - 1
    text_mask, cache = pair_mask(batch.documents), DynamicCache()
    every = torch.arange(length, device=at.device).expand(len(at), -1)
    mask = rollout_mask(text_mask, every, [], slots)[:, None]
    fused, first = model.fused(batch.taps[:, :-1]), batch.tokens[:, 1:]
    states = [model.first(fused, first, batch.positions[:, :-1], mask, at, cache)]
    for b, count in enumerate(taken):
        later = sum(taken[: b + 1])
        tokens = batch.tokens.gather(1, (at + later + 1).clamp(max=length))
        positions = batch.positions.gather(1, at) + later
        mask = rollout_mask(text_mask, at, taken[: b + 1], slots)[:, None]
        states.append(model(states[-1][:, :, count - 1], tokens, positions, mask, cache))
    return torch.stack(states, 2)
