"""Draft models of blocks: a backbone reads a block of anchor and masks in one pass and gives a state per drafted token.

States of a few target layers, fused, are extra keys and values in every layer of the backbone (DFlash, arXiv
2602.06036).  How states become tokens is up to the method: a `BlockModel` decodes them.

B sequences or slots, A blocks of a sequence, K tokens of a block, C context positions, T taps, H hidden size, D tokens
that can be drafted, V vocabulary.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from outrider.decoding.protocols import Drafter
from outrider.errors import DrafterError
from outrider.nn import blocks, draft_model, draft_vocabulary, heads, masks
from outrider.nn.blocks import Attend, BlockAttention, ContextLayer, FusedTaps, RMSNorm, attending, rotary
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.draft_vocabulary import DraftVocabulary
from outrider.nn.drafting import trees
from outrider.nn.drafting.block_drafter import BlockDrafter
from outrider.nn.drafting.block_rows import BlockRows, prefix_tokens, sample_prefix_lengths
from outrider.nn.masks import MaskedModule, MaskToken, with_mask
from outrider.nn.sequence import check_heads
from outrider.nn.shape import InitLayers, LayerConfig, copy_layers, resolve_taps
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import Target

Pick = Callable[[Tensor, int], Tensor]
"""(logits [B, D], slot of the block) → the drafted tokens [B]."""
Decoded = tuple[Tensor, Tensor, Tensor | None]
"""Tokens [B, K], logits [B, K, D] and confidences [B, K] of one block per slot; None without a confidence head."""
Block = Annotated[PositiveInt, Field(description="Tokens drafted per step.")]
Decay = Annotated[
    PositiveFloat,
    Field(description="Tokens after which the training weight falls to 1/e: token k has weight exp(-k / decay)."),
]


class BackboneConfig(LayerConfig):
    """Settings of every drafter with this backbone."""

    block: Block = 7
    anchor_predicts: bool = True
    """The anchor's slot predicts the first token and masks predict the next ones; no: each mask predicts its own
    position."""
    siblings: tuple[NonNegativeInt, ...] = ()
    """Number of next best tokens that are also verified at slot 0, 1, … of a greedy request's block, as leaves of a
    tree."""
    layers: PositiveInt = 5
    """Decoder layers of the draft model."""
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; by default five, spread over the depth."""
    init_from_layers: InitLayers = None
    mask_token: MaskToken = None
    anchors: PositiveInt = 512
    """Maximum number of blocks trained per text and step."""
    vocabulary: PositiveInt | None = None
    """Number of tokens it can draft: the most frequent ones in the training data, with the target's own head over them;
    by default all.  With a large vocabulary, the head takes most of the time of a draft and of a training step."""
    decay: Decay = 4.0
    prefixes: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the blocks, 0 to 1, that are trained with their first n tokens given, with n sampled in proportion to
    0.9 ** n;
    the weight decays from the first token that is not given (D2SD's variable prefix)."""


class Backbone(MaskedModule, FusedTaps):
    """Takes context states and a block of anchor and masks; returns one state per drafted token."""

    def __init__(
        self, config: BackboneConfig, target: Target, layer: Callable[..., ContextLayer] = ContextLayer,
        window: int | None = None,
    ):  # fmt: skip
        """layer: makes a layer from hidden size and sizes.  window: positions that each slot attends to, itself and
        those just before it; None for all."""
        if len(config.siblings) > config.block or 1 + max(config.siblings, default=0) > target.spec.vocabulary:
            raise DrafterError(
                f"siblings must be at most {config.block} numbers, one per slot of the block, each below the target's "
                f"vocabulary of {target.spec.vocabulary}, got {config.siblings}; give fewer or lower ones"
            )
        super().__init__(with_mask(config, target), target, resolve_taps(config.taps, target.spec))
        self.width = config.block if config.anchor_predicts else config.block + 1
        """Input slots of a block: the anchor and the masks."""
        self.window = window
        hidden = target.spec.hidden
        self.hidden_norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.layers = nn.ModuleList(layer(hidden, self.shape) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.choose_mask()
        if config.init_from_layers is not None:
            copy_layers(self.layers, config.init_from_layers, target)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None,
        cache: SlotCache | None = None, attend: Attend | None = None, prefix: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """States of drafted blocks, [B, A, K, H].

        taps [B, C, T, H] at positions taps_at [B, C]; anchors [B, A] ids at positions anchors_at [B, A]; mask over C +
        A * width columns, or over all of `cache`; attend replaces mask and cache.  prefix [B, A, width]: ids that slots
        read in place of masks; -1 in the others.
        """
        context = self.hidden_norm(self.fused(taps))
        x = self.words(anchors[..., None], self.width - 1)
        if prefix is not None:
            x = torch.where((prefix >= 0)[..., None], self.target.embed(prefix.clamp(min=0)).to(x), x)
        x = x.flatten(1, 2).to(context.dtype)
        x_at = (anchors_at[..., None] + torch.arange(self.width, device=anchors.device)).flatten(1)
        k_rotary = rotary(torch.cat([taps_at.expand(x_at.shape[0], -1), x_at], 1), self.shape)
        q_rotary = k_rotary[..., taps_at.shape[1] :, :]
        if attend is None:
            attend = attending(mask, cache)
        for i, layer in enumerate(self.layers):
            x = layer(x, q_rotary, attend, i, context, k_rotary)
        return self.norm(x).unflatten(1, (*anchors.shape[1:], self.width))[:, :, self.width - self.config.block :]

    def drafted(self, batch: Batch, at: Tensor, live: Tensor, prefix_lengths: Tensor | None = None) -> Tensor:
        """As `block_rows.Blocks.drafted`."""
        positions = batch.positions
        attend: Attend = BlockAttention(at, self.width, batch.documents, live, self.window)
        anchors, anchors_at = batch.tokens.gather(1, at), positions.gather(1, at)
        prefix = None if prefix_lengths is None else prefix_tokens(batch.tokens, at, prefix_lengths, self.width)
        if batch.stripe is not None:
            attend = batch.stripe.attend(attend, positions.shape[1], at.shape[1], self.width)
            positions, anchors, anchors_at = map(batch.stripe.own, (positions, anchors, anchors_at))
            prefix = None if prefix is None else batch.stripe.own(prefix)
        return self(batch.taps, positions, anchors, anchors_at, None, attend=attend, prefix=prefix)

    def weights(self, batch: Batch, at: Tensor) -> Tensor:
        """[K] weight of a trained row of each depth."""
        return torch.exp(-torch.arange(self.config.block, device=at.device) / self.config.decay)

    def prefix_lengths(self, batch: Batch, blocks: int) -> Tensor | None:
        """As `block_rows.Blocks.prefix_lengths`."""
        share, block = self.config.prefixes, self.config.block
        return sample_prefix_lengths(batch, blocks, share, block) if self.training and share and block > 1 else None

    def remember(self, taps: Tensor, taps_at: Tensor, cache: SlotCache) -> None:
        """Read context without drafting: store every layer's keys and values of it in the cache's open pass."""
        context = self.hidden_norm(self.fused(taps))
        k_rotary = rotary(taps_at, self.shape)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, ContextLayer)
            cache.update(*layer.self_attn.keys_values(context, k_rotary), i)


class BlockModel(DraftModel):
    """A backbone and the part that turns its states into tokens.  It is served by `BlockDrafter`."""

    has_confidence = False
    splits_texts = True
    """Whether several processes can split each text in training."""
    code: tuple[ModuleType, ...] = ()
    """Modules with code of the model, besides the one of its class; a change in one recompiles its pass."""

    def __init__(
        self, config: BackboneConfig, target: Target, layer: Callable[..., ContextLayer] = ContextLayer,
        window: int | None = None,
    ):  # fmt: skip
        """As `Backbone`."""
        super().__init__()
        self.backbone = Backbone(config, target, layer, window)
        self.config, self.target, self.taps = self.backbone.config, target, self.backbone.taps
        self.draft_vocabulary = None if config.vocabulary is None else DraftVocabulary(target, config.vocabulary)

    @property
    def sources(self) -> tuple[ModuleType, ...]:
        """All modules with code that a compiled pass runs."""
        shared = (blocks, masks, draft_model, draft_vocabulary, heads, trees, sys.modules[__name__])
        return (*shared, sys.modules[type(self).__module__], *self.code)

    @property
    def reduced(self) -> DraftVocabulary | None:
        return self.draft_vocabulary

    def begin(self, counts: Tensor) -> None:
        if self.draft_vocabulary is not None:
            self.draft_vocabulary.begin(counts)

    def check_split(self, count: int) -> None:
        if not self.splits_texts:
            super().check_split(count)
        check_heads(self.backbone.shape.kv_heads, count)

    def over_all_tokens(self) -> BlockModel:
        """This model with the full vocabulary.  Learnt weights of the added tokens are zero."""
        if self.draft_vocabulary is None:
            return self
        whole = type(self)(self.config.model_copy(update={"vocabulary": None}), self.target)
        whole.to(self.target.device, self.dtype)
        weights, shapes = self.state_dict(), whole.state_dict()
        ids = weights.pop("draft_vocabulary.ids")
        for name, weight in weights.items():
            if weight.shape != shapes[name].shape:
                weights[name] = torch.zeros_like(shapes[name]).index_copy(0, ids, weight)
        whole.load_state_dict(weights)
        return whole

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., D] of states [..., H]."""
        return super().logits(states) if self.draft_vocabulary is None else self.draft_vocabulary(states)

    def picked(self, logits: Tensor, slot: int, pick: Pick | None) -> Tensor:
        """The tokens [B] that `pick` chooses from a slot's logits [B, D]; without it, the likeliest."""
        return self.named(logits.argmax(-1)) if pick is None else pick(logits, slot)

    def named(self, columns: Tensor) -> Tensor:
        """The target's token ids of columns of the logits."""
        return columns if self.draft_vocabulary is None else self.draft_vocabulary.ids[columns]

    def whole(self, values: Tensor, others: float = -torch.inf) -> Tensor:
        """Values [..., D] of the tokens that can be drafted as values [..., V] of all tokens, `others` elsewhere."""
        return values if self.draft_vocabulary is None else self.draft_vocabulary.whole(values, others)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, cache: SlotCache,
        pick: Pick | None,
    ) -> Decoded:  # fmt: skip
        """Draft one block per slot after anchors [B]; the other arguments as in `Backbone` and `decode`."""
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, cache)[:, 0]
        return self.decode(states, anchors, pick)

    @abstractmethod
    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None) -> Decoded:
        """The block of states [B, K, H] after anchors [B]; without `pick`, the likeliest tokens."""

    def predict(self, batch: Batch) -> BlockRows:
        return BlockRows(self, self.backbone, batch)

    def drafter(self) -> Drafter:
        return BlockDrafter(self)
