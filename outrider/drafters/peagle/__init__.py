"""P-EAGLE: EAGLE-3's pairs with mask tokens after the newest one, so that one pass drafts all K tokens.  (arXiv
2602.01469.)

A pair is a position's fused taps and the next token.  Where EAGLE-3 feeds back its own state, depth d >= 1 of pair i
reads a learnt feature and a mask token at rotary position i + d.  It attends to the pairs up to i and to its masks of
depths up to d.  Every depth predicts independently, so q is the softmax of its own row.

Training drops depths using COD (PARD, arXiv 2504.18583): depth d retains a share ratio^d of the positions, never below
`floor`, and only positions that depth d - 1 retains.  A dropped depth is absent from the pass.

Differs from the paper: layers have q and k norms (the qwen3 form of the released checkpoints), the head is the target's
own, frozen, unless `vocabulary` is given; and a text is not split to fit a device: instead, `anchors` limits the number
of positions.

Use it if the drafter's own passes are the bottleneck: it needs only one.  It learns less than EAGLE-3 in the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from outrider.decoding.draft import Draft, to_device
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState
from outrider.method import Method
from outrider.nn.blocks import ContextLayer, FusedTaps, PairLayer, RMSNorm, attending, rotary
from outrider.nn.draft_model import Batch
from outrider.nn.drafting import serving
from outrider.nn.heads import ReducedHead, VocabularyModel
from outrider.nn.masks import MaskedModule, MaskToken, with_mask
from outrider.nn.memory import FeatureMemory, PairDrafter
from outrider.nn.rows import DetachedRows, RowLabels, pair_mask, sample_anchors
from outrider.nn.shape import LayerConfig, copy_layers, resolve_taps
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import Target

METHOD = Method(
    cost="once", tokens=7,
    engines={
        "vllm": {"name": "eagle3", "more": {"parallel_drafting": True}, "formats": ("speculators",), "varies": True},
    },
    instead={
        "sglang": "vllm runs it; or train a DFlash",
        "trtllm": "vllm runs it; or train a DFlash",
        "llamacpp": "vllm runs it; or train a DFlash",
    },
    layers={
        "speculators": ("eagle_aux_hidden_state_layer_ids", 1),
    },
)  # fmt: skip


class Config(LayerConfig):
    kind: Literal["peagle"] = "peagle"
    length: PositiveInt = 8
    """Tokens drafted per step, and depths trained."""
    norm_before_residual: bool = False
    """The first layer adds its output to the normalised feature, not to the feature itself."""
    layers: PositiveInt = 4
    """Decoder layers of the draft model; the first reads embedding and feature together."""
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; by default three: low, middle and high."""
    vocabulary: PositiveInt | None = None
    """Number of tokens it can draft (the most frequent ones), with a trained head; by default all tokens, with the
    target's head."""
    init_from_layers: tuple[NonNegativeInt, ...] | None = None
    """Target layers, one per draft layer except the first and counted from 0, whose weights the draft layers start
    from; random by default."""
    mask_token: MaskToken = None
    ratio: float = Field(0.7, gt=0, le=1)
    """Share of the previous depth's positions, above 0 and at most 1, that each depth retains in training."""
    floor: float = Field(0.2, ge=0, le=1)
    """Minimum share of the positions, 0 to 1, that any depth retains."""
    anchors: PositiveInt = 512
    """Maximum number of positions drafted from per text and step in training."""


class Model(VocabularyModel, MaskedModule, FusedTaps):
    """Takes pairs and masks; returns one state per row."""

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
        self, taps: Tensor, tokens: Tensor, masks: int, at: Tensor, mask: Tensor | None, cache: SlotCache | None = None
    ) -> Tensor:
        """States [B, C + masks, H] of pairs and the masks after them.

        taps [B, C, T, H] and tokens [B, C] of pairs; at [B or 1, C + masks] rotary positions; mask as the layers take
        it.
        """
        features = self.fused(taps)
        empty = self.fc(self.mask_hidden).to(features.dtype).expand(len(tokens), masks, -1)
        features = torch.cat([features, empty], 1)
        cos_sin, attend = rotary(at, self.shape), attending(mask, cache)
        x = self.layers[0](self.words(tokens, masks, features.dtype), features, cos_sin, attend)
        for i, layer in enumerate(list(self.layers)[1:], 1):
            x = layer(x, cos_sin, attend, i)
        return self.norm(x)

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> PEagle:
        return PEagle(self)


build = Model.build


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class PEagle(PairDrafter):
    """Drafts one chain per slot in one pass over the new pairs and the masks, whose keys are dropped."""

    def __init__(self, model: Model):
        super().__init__(model, model.config.length, model.config.length + 1)

    def allocate(self, cache: Cache) -> FeatureMemory:
        # the text, the masks, and as many columns again, since slots have unequal numbers of new pairs
        return FeatureMemory(cache.slots, cache.length + 2 * self.limit, len(self.model.layers), self.model)

    def draft(self, memory: FeatureMemory, state: DecodeState, sizes: Tensor) -> Draft:
        logits = self.model.logits(self._pass(memory, state.rows, state, int(sizes.max()) - 1))
        return serving.side_by_side(logits, sizes, state)

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        self._pass(memory, [row], state, 0, leave=1)

    def _pass(
        self, memory: FeatureMemory, rows: Sequence[int], state: DecodeState, masks: int, leave: int = 0
    ) -> Tensor:
        """Read the unread pairs, except the last `leave`, and `masks` after them.  Returns states [B, 1 + masks, H] of
        each slot's last pair and masks."""
        cache, (taps, tokens, counts) = memory.kv_cache, memory.features.take_with_tokens(rows, state, leave)
        new, real = taps.shape[1], to_device(counts, taps.device)
        cache.open(rows, new + masks)
        order = torch.arange(new + masks, device=taps.device)
        # masks come after the last real pair
        at = cache.positions(torch.where(order < new, order, real[:, None] + order - new))
        mask = cache.mask(pass_mask(new, masks, real) if masks else None, self.model.dtype)
        states = self.model(taps, tokens, masks, at.clamp(min=0), mask, cache)
        cache.append(counts)
        last_rows = torch.cat([(real - 1).clamp(min=0)[:, None], order[new:].expand(len(counts), -1)], 1)
        return states.gather(1, last_rows[..., None].expand(-1, -1, states.shape[-1]))


def pass_mask(new: int, masks: int, counts: Tensor) -> Tensor:
    """Attention mask of a pass, [B, n, n] bool: `new` pairs, of which counts [B] are real, and masks after them.

    A pair attends to those up to itself, a mask to all real pairs and the masks up to itself; only padding attends to
    padding.
    """
    order = torch.arange(new + masks, device=counts.device)
    to_here = order[:, None] >= order
    is_mask = order >= new
    return to_here & ((order < counts[:, None]) | is_mask)[:, None] | (order[:, None] == order)


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows(DetachedRows):
    """Predictions from sampled pairs: one row per retained depth; the label of row d of pair i is token i + 2 + d."""

    def __init__(self, model: Model, batch: Batch):
        config, count = model.config, batch.tokens.shape[1] - 1
        anchors = sample_anchors(batch, config.anchors, 2, config.length)
        draw_for = lambda shape: batch.random(torch.rand, *shape[1:])
        retained = conditional_drop(anchors.loss_mask, config.ratio, config.floor, draw_for)
        rows = drafting_rows(anchors.at, retained, count)
        mask = training_mask(pair_mask(batch.documents), rows)[:, None]
        at = batch.positions.gather(1, rows.pair) + rows.depth
        states = model(batch.taps[:, :-1], batch.tokens[:, 1:], at.shape[1] - count, at, mask)
        b, a, depth = retained.nonzero().unbind(-1)
        weight, block = torch.ones(len(b), device=b.device), b * anchors.at.shape[1] + a
        labels = RowLabels.of(batch, b, anchors.labels_at[b, a, depth], weight, depth, block)
        super().__init__(model, states[b, rows.of[b, a, depth]], batch.final, labels)


def conditional_drop(
    loss_mask: Tensor, ratio: float, floor: float, draw_for: Callable[[torch.Size], Tensor] = torch.rand
) -> Tensor:
    """The depths that COD retains, [B, A, D] bool, of positions whose depth 0 is in loss_mask [B, A, D].

    The positions of a text are put in a random order; the first max(ratio^d, floor) of them retain depth d, so a
    position that retains a depth also retains the previous one.  draw_for: random numbers for a shape [B, A].
    """
    live = loss_mask[..., 0]
    chance = draw_for(live.shape).to(live.device).masked_fill(~live, 2.0)
    place = chance.argsort(1).argsort(1)
    share = (ratio ** torch.arange(loss_mask.shape[-1], device=live.device)).clamp(min=floor)
    # plus a half: the number retained is rounded, not truncated
    return loss_mask & (place[..., None] + 0.5 < share * live.sum(1)[:, None, None])


class DraftingRows(NamedTuple):
    """The rows of a training pass, [B, C + R]: a text's pairs, then masks of some of them, then padding."""

    pair: Tensor
    depth: Tensor
    """0 for a pair; D, deeper than any mask, for padding."""
    of: Tensor
    """[B, A, D], the row of each retained depth."""


def drafting_rows(at: Tensor, retained: Tensor, count: int) -> DraftingRows:
    """The rows for pairs `at` [B, A] with retained depths [B, A, D] bool, in texts of `count` pairs."""
    depths = retained.shape[-1]
    is_mask = retained & (torch.arange(depths, device=at.device) > 0)
    of = torch.where(is_mask, count - 1 + is_mask.flatten(1).cumsum(1).view(retained.shape), at[..., None])
    order = is_mask.flatten(1).long().sort(dim=1, descending=True, stable=True).indices
    order = order[:, : int(is_mask.sum((1, 2)).max())]
    is_real = is_mask.flatten(1).gather(1, order)
    every = torch.arange(count, device=at.device).expand(len(at), -1)
    pair = torch.cat([every, at.gather(1, order // depths)], 1)
    return DraftingRows(pair, torch.cat([0 * every, torch.where(is_real, order % depths, depths)], 1), of)


def training_mask(text_mask: Tensor, rows: DraftingRows) -> Tensor:
    """Attention mask [B, C + R, C + R] bool of a training pass; text_mask [B, C, C] is the pairs' part of it.

    A mask of depth d attends to the same as its pair, and to that pair's masks of depths up to d; only padding attends
    to padding.
    """
    count = text_mask.shape[-1]
    to_text = text_mask.gather(1, rows.pair[..., None].expand(-1, -1, count))
    is_own = rows.pair[..., None] == rows.pair[:, None, count:]
    return torch.cat([to_text, is_own & (rows.depth[..., None] >= rows.depth[:, None, count:])], -1)
