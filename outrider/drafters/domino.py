"""Domino: a block drafted in parallel, then corrected by what a GRU read of its own tokens so far.  (arXiv 2605.29707.)

A DFlash backbone gives a state z_k and base logits for every slot at once.  From the second slot on a causal head adds
U2 SiLU(U1 [z_k; s_k]) of low rank, where s_k is the state of a GRU behind the embeddings of the anchor and the tokens drafted
before slot k.  A Markov head knows one token back, this one the whole block.

Base-anchored curriculum: the loss is (1 - lam) of the corrected logits' and lam of the base logits', lam falling from 1 to 0
over the first part of training, so that the backbone learns to draft by itself before the head leans on it.  U2 begins at
zero: with it all logits are the base's.

Differs from the paper: each block trains by its base logits with chance lam, else by the corrected ones.  This is the paper's
loss in expectation, with any loss and any weights of rows and one head a row in place of two.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from outrider.drafters.dflash import Backbone, BackboneConfig, BlockDrafter, BlockRows, Pick
from outrider.errors import DrafterError
from outrider.nn.draft_model import Batch, DraftModel, with_mask
from outrider.nn.heads import PrefixGRU
from outrider.nn.shape import resolved
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target


class Config(BackboneConfig):
    kind: Literal["domino"] = "domino"
    block: PositiveInt = 16
    """Tokens drafted per step, one behind the other."""
    gru: PositiveInt = 1024
    """Size of the state that reads the block's tokens."""
    rank: PositiveInt = 256
    """Rank of the correction."""
    pure_prefix: NonNegativeInt = 1
    """Slots at a block's beginning that keep their base logits."""
    curriculum: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the training over which the base logits' part of the loss falls from 1 to 0."""
    decay: PositiveFloat = 7.0
    """Draft k weighs exp(-k / decay) in training."""


class Model(DraftModel):
    """Backbone, GRU and low-rank correction.  While the curriculum lasts, logged acceptance is that of base blocks too."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        if config.pure_prefix >= config.block:
            raise DrafterError(
                f"pure_prefix {config.pure_prefix} leaves none of a block's {config.block} slots to correct; choose fewer, "
                "or take dflash"
            )
        self.config, self.target = with_mask(resolved(config, target.spec)[0], target), target
        self.backbone = Backbone(self.config, target)
        self.taps = self.backbone.taps
        hidden = target.spec.hidden
        self.prefix_gru = PrefixGRU(hidden, config.gru)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + config.gru, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, target.spec.vocabulary, bias=False),
        )
        nn.init.zeros_(self.embed_proj[2].weight)  # type: ignore[arg-type]

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, kept: SlotCache,
        pick: Pick | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Draft one block a slot: tokens [B, K], logits [B, K, V], no confidence.  pick None takes the likeliest token."""
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, kept)[:, 0]
        base = self.target.head(states)
        token, read = anchors, self.prefix_gru.start(states[:, 0])
        tokens, corrected = [], []
        for k in range(base.shape[1]):
            read = self.prefix_gru(self._words(token), read)
            corrected.append(base[:, k] if k < self.config.pure_prefix else base[:, k] + self._delta(states[:, k], read))
            token = corrected[-1].argmax(-1) if pick is None else pick(corrected[-1], k)
            tokens.append(token)
        return torch.stack(tokens, 1), torch.stack(corrected, 1), None

    def corrections(self, states: Tensor, previous: Tensor) -> Tensor:
        """What is added to the base logits of whole blocks: states [..., K, H] and the token before each slot [..., K]."""
        first = self.config.pure_prefix
        read = self.prefix_gru.along(self._words(previous))
        return nn.functional.pad(self._delta(states[..., first:, :], read[..., first:, :]), (0, 0, first, 0))

    def predict(self, batch: Batch) -> DominoRows:
        return DominoRows(self, batch)

    def drafter(self) -> BlockDrafter:
        return BlockDrafter(self)

    def _delta(self, states: Tensor, read: Tensor) -> Tensor:
        return self.embed_proj(torch.cat([states, read], -1))

    def _words(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.prefix_gru.weight_ih_l0.dtype)


class DominoRows(BlockRows):
    """Block rows with the correction on them, but for the blocks that the curriculum leaves to the backbone."""

    def __init__(self, model: Model, batch: Batch):
        super().__init__(model.backbone, batch, self._corrected)
        self.model = model
        # on the CPU, whose random state a checkpoint keeps
        is_base = torch.rand(len(self.labels) // self.slots) < base_share(model.progress, model.config.curriculum)
        self.is_base = is_base.to(self.labels.device).repeat_interleave(self.slots)
        """[M], which rows train by their base logits."""

    def _corrected(self, states: Tensor, previous: Tensor, rows: slice) -> Tensor:
        added = self.model.corrections(states.unflatten(0, (-1, self.slots)), previous.unflatten(0, (-1, self.slots)))
        return self.target.head(states) + added.flatten(0, 1) * ~self.is_base[rows, None]


def base_share(progress: float, curriculum: float) -> float:
    """lam: the base logits' part of the loss, 1 at the beginning and 0 from `curriculum` on."""
    return max(0.0, 1 - progress / curriculum) if curriculum else 0.0


def build(config: Config, target: Target) -> BlockDrafter:
    return Model(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()
