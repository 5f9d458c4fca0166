"""P-EAGLE: EAGLE-3's pairs with masks behind the newest, so that one pass drafts all K tokens.  (arXiv 2602.01469.)

A pair is a position's fused taps and the token behind it.  Where EAGLE-3 would feed its own state back, depth d >= 1 stands on
a learnt feature and a mask token, at rotary position i + d; it sees all pairs up to its own, i, and its own masks of smaller
or equal depth.  Every depth predicts by itself, so q of each is a softmax of its own row.

Training drops depths by COD (PARD, An et al. 2504.18583): depth d keeps a share ratio^d of the positions, never below
`floor`, and a position only where depth d - 1 was kept.  A dropped depth is not there at all.

Differs from the paper: layers have q and k norms (the qwen3 form of the released checkpoints), the head is the target's own,
frozen, unless `vocabulary` is given, and a text is not split to fit a device: `anchors` bounds what is drafted from instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState
from outrider.nn import serving
from outrider.nn.blocks import ContextLayer, FusedTaps, PairLayer, RMSNorm, attending, rotary
from outrider.nn.draft_model import Batch, MaskedModule, MaskToken, copy_layers, draw, resolve_taps, sight, with_mask
from outrider.nn.heads import ReducedHead, VocabularyModel
from outrider.nn.memory import FeatureMemory, PairDrafter
from outrider.nn.rows import DetachedRows, Labelled
from outrider.nn.shape import LayerConfig
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target


class Config(LayerConfig):
    kind: Literal["peagle"] = "peagle"
    length: PositiveInt = 8
    """Tokens drafted per step, and depths trained."""
    norm_before_residual: bool = False
    """The first layer adds to the normed feature, not to the feature itself."""
    layers: PositiveInt = 4
    """Decoder layers of the draft model; the first reads embedding and feature side by side."""
    taps: tuple[int, ...] | None = None
    """Target layers it sees, counted from 0; three, low, middle and high, unless given."""
    vocabulary: PositiveInt | None = None
    """Tokens a draft may hold, the most frequent, with trained rows of their own; all, by the target's head, unless given."""
    init_from_layers: tuple[NonNegativeInt, ...] | None = None
    """Target layers, one a draft layer but the first and counted from 0, whose weights training begins with."""
    mask_token: MaskToken = None
    """The target's token whose embedding stands in masked slots, or learnt for a vector of its own.  Unless given, the
    tokenizer's mask token, else the first row of the embedding that is no token, else learnt."""
    ratio: float = Field(0.7, gt=0, le=1)
    """Share of the positions kept from one depth to the next in training."""
    floor: float = Field(0.2, ge=0, le=1)
    """Share that is kept at every depth."""
    anchors: PositiveInt = 512
    """Most positions drafted from per text and step in training."""


class Model(VocabularyModel, MaskedModule, FusedTaps):
    """Pairs and masks in, one state a row out, and a head on it."""

    def __init__(self, config: Config, target: Target):
        super().__init__(with_mask(config, target), target, resolve_taps(config.taps, target.spec, 3))
        hidden, shape = target.spec.hidden, self.shape
        first = PairLayer(hidden, shape, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(ContextLayer(hidden, shape) for _ in range(config.layers - 1))])
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, hidden * len(self.taps)) * 0.02)
        self.choose_mask()
        self.head = None if config.vocabulary is None else ReducedHead(target, config.vocabulary)
        if config.init_from_layers is not None:
            copy_layers(list(self.layers)[1:], config.init_from_layers, target)

    def forward(
        self, taps: Tensor, tokens: Tensor, masks: int, at: Tensor, mask: Tensor | None, kept: SlotCache | None = None
    ) -> Tensor:
        """States [B, C + masks, H] of pairs and the masks behind them.

        taps [B, C, T, H] and tokens [B, C] of pairs; at [B or 1, C + masks] rotary positions; mask as the layers take it.
        """
        features = self.fused(taps)
        empty = self.fc(self.mask_hidden).to(features.dtype).expand(len(tokens), masks, -1)
        features = torch.cat([features, empty], 1)
        turn, attend = rotary(at, self.shape), attending(mask, kept)
        x = self.layers[0](self.words(tokens, masks, features.dtype), features, turn, attend)
        for i, layer in enumerate(list(self.layers)[1:], 1):
            x = layer(x, turn, attend, i)
        return self.norm(x)

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> PEagle:
        return PEagle(self)


build = Model.build


# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PEagle(PairDrafter):
    """Drafts a chain a slot in one pass over the new pairs and the masks; the masks' keys are forgotten."""

    def __init__(self, model: Model):
        super().__init__(model, model.config.length, model.config.length + 1)

    def allocate(self, cache: Cache) -> FeatureMemory:
        # besides the text: masks, and as many columns again where slots bring unequal numbers of new pairs
        return FeatureMemory(cache.slots, cache.length + 2 * self.limit, len(self.model.layers), self.model)

    def draft(self, memory: FeatureMemory, state: DecodeState, sizes: Tensor) -> Draft:
        logits = self.model.logits(self._pass(memory, state.rows, state, int(sizes.max()) - 1))
        return serving.side_by_side(logits, sizes, state)

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        self._pass(memory, [row], state, 0, leave=1)

    def _pass(self, memory: FeatureMemory, rows: Sequence[int], state: DecodeState, masks: int, leave: int = 0) -> Tensor:
        """Read waiting pairs and `masks` behind them.  States [B, 1 + masks, H] of each slot's last pair and the masks."""
        kept, (taps, tokens, counts) = memory.kept, memory.waiting.pairs(rows, state, leave)
        new, real = taps.shape[1], torch.tensor(counts, device=taps.device)
        kept.open(rows, new + masks)
        order = torch.arange(new + masks, device=taps.device)
        # masks stand behind the last real pair
        at = kept.positions(torch.where(order < new, order, real[:, None] + order - new))
        mask = kept.mask(visible(new, masks, real) if masks else None, self.model.dtype)
        states = self.model(taps, tokens, masks, at.clamp(min=0), mask, kept)
        kept.append(counts)
        own = torch.cat([(real - 1).clamp(min=0)[:, None], order[new:].expand(len(counts), -1)], 1)
        return states.gather(1, own[..., None].expand(-1, -1, states.shape[-1]))


def visible(new: int, masks: int, counts: Tensor) -> Tensor:
    """What the rows of a pass see of it, [B, n, n] bool: `new` pairs, of which counts [B] are real, and masks behind them.

    A pair sees those up to itself, a mask all real pairs and the masks up to itself; padding is seen by padding alone.
    """
    order = torch.arange(new + masks, device=counts.device)
    to_here = order[:, None] >= order
    is_mask = order >= new
    return to_here & ((order < counts[:, None]) | is_mask)[:, None] | (order[:, None] == order)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows(DetachedRows):
    """Predictions from the drawn pairs: one row a depth that COD kept, row d of pair i labelled with token i + 2 + d."""

    def __init__(self, model: Model, batch: Batch):
        config, pairs = model.config, batch.tokens.shape[1] - 1
        drawn = draw(batch, config.anchors, 2, config.length)
        there = conditional_drop(drawn.learnt, config.ratio, config.floor)
        rows = drafting_rows(drawn.at, there, pairs)
        mask = training_sight(sight(batch.documents), rows)[:, None]
        at = rows.pair + rows.depth
        states = model(batch.taps[:, :-1], batch.tokens[:, 1:], at.shape[1] - pairs, at, mask)
        b, a, depth = there.nonzero().unbind(-1)
        labelled = Labelled.of(
            batch, b, drawn.labels_at[b, a, depth], torch.ones(len(b), device=b.device), depth, b * drawn.at.shape[1] + a
        )
        super().__init__(model, states[b, rows.of[b, a, depth]], batch.hidden, labelled)


def conditional_drop(learnt: Tensor, ratio: float, floor: float) -> Tensor:
    """Which depths of which positions COD keeps, [B, A, D] bool; of those whose depth 0 is learnt.  learnt [B, A, D] bool.

    The positions of a text are put in a random order; the first max(ratio^d, floor) of them keep depth d, so whoever keeps a
    depth kept the one before.
    """
    live = learnt[..., 0]
    chance = torch.rand(live.shape).to(live.device).masked_fill(~live, 2.0)
    place = chance.argsort(1).argsort(1)
    share = (ratio ** torch.arange(learnt.shape[-1], device=live.device)).clamp(min=floor)
    # half a place: the number kept is rounded, not cut
    return learnt & (place[..., None] + 0.5 < share * live.sum(1)[:, None, None])


class DraftingRows(NamedTuple):
    """The rows of a training pass, [B, C + R]: a text's pairs, then the masks behind some of them, padded at the end."""

    pair: Tensor
    depth: Tensor
    """0 of a pair; D, deeper than any mask, of padding."""
    of: Tensor
    """[B, A, D] which row each kept depth has."""


def drafting_rows(at: Tensor, there: Tensor, pairs: int) -> DraftingRows:
    """at [B, A] pairs that are drafted from, there [B, A, D] which depths are kept; `pairs` in a text."""
    depths = there.shape[-1]
    is_mask = there & (torch.arange(depths, device=at.device) > 0)
    of = torch.where(is_mask, pairs - 1 + is_mask.flatten(1).cumsum(1).view(there.shape), at[..., None])
    order = is_mask.flatten(1).long().sort(dim=1, descending=True, stable=True).indices
    order = order[:, : int(is_mask.sum((1, 2)).max())]
    is_real = is_mask.flatten(1).gather(1, order)
    every = torch.arange(pairs, device=at.device).expand(len(at), -1)
    pair = torch.cat([every, at.gather(1, order // depths)], 1)
    return DraftingRows(pair, torch.cat([0 * every, torch.where(is_real, order % depths, depths)], 1), of)


def training_sight(pairs: Tensor, rows: DraftingRows) -> Tensor:
    """What rows may look at, [B, C + R, C + R] bool; pairs [B, C, C] is what pairs see of pairs.

    A mask of depth d sees what its pair sees, and that pair's masks of depths up to d; so nothing sees padding but padding.
    """
    count = pairs.shape[-1]
    of_pairs = pairs.gather(1, rows.pair[..., None].expand(-1, -1, count))
    is_own = rows.pair[..., None] == rows.pair[:, None, count:]
    return torch.cat([of_pairs, is_own & (rows.depth[..., None] >= rows.depth[:, None, count:])], -1)
