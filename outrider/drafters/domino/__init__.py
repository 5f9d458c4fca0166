"""Domino: a block drafted in parallel, then corrected by a GRU that reads its tokens so far.  (arXiv 2605.29707.)

A DFlash backbone gives a state z_k and base logits for every slot at once.  From the second slot on, a causal head adds
the low-rank term U2 SiLU(U1 [z_k; s_k]), where s_k is the state of a GRU that has read the embeddings of the anchor and
of the tokens drafted before slot k.  A Markov head sees only the previous token; this one sees the whole block so far.

Base-anchored curriculum: the loss is (1 - lam) times that of the corrected logits plus lam times that of the base
logits, with lam falling from 1 to 0 over the first part of training, so that the backbone learns to draft by itself
before the head relies on it.  U2 starts at zero, so that all logits are the base's.

Differs from the paper: each block is trained on its base logits with probability lam, otherwise on the corrected ones.
This is the paper's loss in expectation, for any loss and any weights of rows, with one head per row instead of two.

Use it for long blocks, whose later slots depend on more than the token before.  On the demo target's short blocks,
`dspark` has higher acceptance.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from outrider.errors import DrafterError
from outrider.method import Method
from outrider.nn.draft_model import Batch
from outrider.nn.drafting.block_model import BackboneConfig, Block, BlockModel, Decay, Decoded, Pick
from outrider.nn.drafting.block_rows import BlockRows
from outrider.nn.heads import PrefixGRU
from outrider.targets.protocol import Target

METHOD = Method(
    cost="once", tokens=7, length="block", chain={"siblings": ()},
    engines={
        "sglang": {"name": "DFLASH", "flag": "speculative-dflash-block-size", "formats": ("sglang",)},
    },
    instead={
        "vllm": "sglang runs it; or train a DSpark, whose head is also left to right",
        "trtllm": "sglang runs it; or train a DSpark",
        "llamacpp": "sglang runs it; or train a DSpark",
    },
    layers={
        "sglang": ("dflash_config.target_layer_ids", 0),
    },
    in_anchor={"": ("dflash_config.shift_label", False)},
)  # fmt: skip


class Config(BackboneConfig):
    kind: Literal["domino"] = "domino"
    block: Block = 16
    gru: PositiveInt = 1024
    """Size of the GRU's state."""
    rank: PositiveInt = 256
    """Rank of the low-rank correction."""
    pure_prefix: NonNegativeInt = 1
    """Number of leading slots of a block whose base logits are not corrected."""
    curriculum: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of training, 0 to 1, over which the weight of the base logits' loss falls from 1 to 0."""
    decay: Decay = 7.0


class Model(BlockModel):
    """Backbone, GRU and low-rank correction.  During the curriculum, the logged acceptance includes base blocks."""

    splits_texts = False

    def __init__(self, config: Config, target: Target):
        if config.pure_prefix >= config.block:
            raise DrafterError(
                f"pure_prefix must be below block ({config.block}), got {config.pure_prefix}: no slot would be "
                "corrected; lower it, or use dflash"
            )
        super().__init__(config, target)
        hidden = target.spec.hidden
        self.prefix_gru = PrefixGRU(hidden, config.gru)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + config.gru, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, config.vocabulary or target.spec.vocabulary, bias=False),
        )
        nn.init.zeros_(self.embed_proj[2].weight)  # type: ignore[arg-type]

    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None) -> Decoded:
        base, read = self.logits(states), self.prefix_gru.start(states[:, 0])
        tokens, corrected = [anchors], []
        for k in range(base.shape[1]):
            read = self.prefix_gru(self._words(tokens[-1]), read)
            is_pure = k < self.config.pure_prefix
            corrected.append(base[:, k] if is_pure else base[:, k] + self._delta(states[:, k], read))
            tokens.append(self.picked(corrected[-1], k, pick))
        return torch.stack(tokens[1:], 1), torch.stack(corrected, 1), None

    def corrections(self, states: Tensor, previous: Tensor) -> Tensor:
        """Corrections of the base logits of whole blocks: states [..., K, H] and the token before each slot [...,
        K]."""
        first = self.config.pure_prefix
        read = self.prefix_gru.along(self._words(previous))
        return nn.functional.pad(self._delta(states[..., first:, :], read[..., first:, :]), (0, 0, first, 0))

    def predict(self, batch: Batch) -> DominoRows:
        return DominoRows(self, batch)

    def _delta(self, states: Tensor, read: Tensor) -> Tensor:
        return self.embed_proj(torch.cat([states, read], -1))

    def _words(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.prefix_gru.weight_ih_l0.dtype)


class DominoRows(BlockRows):
    """Block rows with the correction, except in blocks that the curriculum trains by their base logits."""

    def __init__(self, model: Model, batch: Batch):
        super().__init__(model, model.backbone, batch)
        # on the CPU, whose random state a checkpoint stores
        chance = batch.random(torch.rand, len(self.labels) // self.slots // len(batch.tokens)).flatten()
        is_base = chance < base_share(model.progress, model.config.curriculum)
        self.is_base = is_base.to(self.labels.device).repeat_interleave(self.slots)
        """[M] bool, True for rows trained by their base logits."""

    def head(self, states: Tensor, rows: slice) -> Tensor:
        whole, is_base = self.whole(states, rows), self.is_base[rows].unflatten(0, (-1, self.slots))[..., None]
        return (self.model.logits(whole[0]) + self.model.corrections(*whole) * ~is_base).flatten(0, 1)


def base_share(progress: float, curriculum: float) -> float:
    """lam, the share of the base logits in the loss: initially 1, 0 from `curriculum` on."""
    return max(0.0, 1 - progress / curriculum) if curriculum else 0.0


build = Model.build
