"""DFlash: draft a whole block in one pass, from the target's own hidden states.  (arXiv 2602.06036.)

States of a few target layers, fused, stand as extra keys and values in every layer of a small transformer.  A block is the
anchor and masks; its tokens see each other both ways and all context before the anchor.  Every slot predicts by itself.

Two layouts, with the same weights.  DSpark's, the default: the anchor's slot predicts the first token, so K inputs give K
drafts.  The paper's (`anchor_predicts: no`): every mask predicts what stands in its own place and the anchor's slot predicts
nothing, so K drafts take K masks.

Differs from the paper: the default layout; training samples anchors anew in every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from outrider import packed
from outrider.compiled.block import CompiledBlock, Drawn, Greedy, real
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import DrafterError
from outrider.nn import blocks, heads
from outrider.nn.blocks import ContextLayer, RMSNorm, angles, block_mask
from outrider.nn.draft_model import (
    Batch,
    DraftModel,
    MaskToken,
    copy_layers,
    drawn,
    mask_token,
    picked,
    resolve_taps,
    with_mask,
)
from outrider.nn.rows import DetachedRows, Labelled
from outrider.nn.serving import FeatureBuffer, Sampler
from outrider.nn.shape import LayerConfig, resolved
from outrider.nn.trees import RankTree
from outrider.sampling.judge import SamplingJudge
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target

Pick = Callable[[Tensor, int], Tensor]
"""(logits [B, V], slot) to the drafted token [B]."""


class BackboneConfig(LayerConfig):
    """What every drafter with this backbone can set."""

    block: PositiveInt = 7
    """Tokens drafted per step, one behind the other."""
    anchor_predicts: bool = True
    """The anchor's slot predicts the first token and masks the next ones; else each mask predicts its own place, one more."""
    runners_up: tuple[NonNegativeInt, ...] = ()
    """Next best tokens verified beside slot 0, 1, … of a greedy request's block: leaves, so that the draft is a tree."""
    layers: PositiveInt = 5
    """Decoder layers of the draft model."""
    taps: tuple[int, ...] | None = None
    """Target layers it sees, counted from 0; five spread over the depth unless given."""
    copies: tuple[NonNegativeInt, ...] | None = None
    """Target layers, one a draft layer and counted from 0, whose weights training begins with; random unless given."""
    mask_token: MaskToken = None
    """The target's token whose embedding stands in masked slots, or learnt for a vector of its own.  Unless given, the
    tokenizer's mask token, else the first row of the embedding that is no token, else learnt."""
    anchors: PositiveInt = 512
    """Most blocks trained per text and step."""
    decay: PositiveFloat = 4.0
    """Draft k weighs exp(-k / decay) in training."""


class Config(BackboneConfig):
    kind: Literal["dflash"] = "dflash"
    block: PositiveInt = 16
    """Tokens drafted per step, one behind the other."""
    decay: PositiveFloat = 7.0
    """Draft k weighs exp(-k / decay) in training."""


class Backbone(nn.Module):
    """Context states and a block of anchor and masks in, one state a drafted token out."""

    def __init__(self, config: BackboneConfig, target: Target):
        super().__init__()
        if len(config.runners_up) > config.block or 1 + max(config.runners_up, default=0) > target.spec.vocabulary:
            raise DrafterError(
                f"runners_up {config.runners_up} asks for more than a block of {config.block} slots and a vocabulary of "
                f"{target.spec.vocabulary} have; give at most one number a slot"
            )
        self.config, self.shape = resolved(config, target.spec)
        self.target = target
        self.width = config.block if config.anchor_predicts else config.block + 1
        """Input slots of a block: the anchor and the masks."""
        self.taps = resolve_taps(config.taps, target.spec)
        hidden = target.spec.hidden
        self.fc = nn.Linear(hidden * len(self.taps), hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.layers = nn.ModuleList(ContextLayer(hidden, self.shape) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.mask_token = mask_token(config.mask_token, target)
        if self.mask_token is None:
            self.mask = nn.Parameter(torch.randn(hidden) * 0.02)
        if config.copies is not None:
            copy_layers(self.layers, config.copies, target)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None,
        kept: SlotCache | None = None,
    ) -> Tensor:  # fmt: skip
        """States of drafted blocks, [B, A, K, H].

        taps [B, C, T, H] at positions taps_at [B, C]; anchors [B, A] ids at positions anchors_at [B, A]; mask over C +
        A * width columns, or over all that `kept` holds.
        """
        context = self._context(taps)
        x = self._inputs(anchors).to(context.dtype)
        x_at = (anchors_at[..., None] + torch.arange(self.width, device=anchors.device)).flatten(1)
        k_angles = angles(torch.cat([taps_at.expand(x_at.shape[0], -1), x_at], 1), self.shape)
        q_angles = k_angles[..., taps_at.shape[1] :, :]
        for i, layer in enumerate(self.layers):
            x = layer(x, context, q_angles, k_angles, mask, kept, i)
        return self.norm(x).unflatten(1, (*anchors.shape[1:], self.width))[:, :, self.width - self.config.block :]

    def drafted(self, batch: Batch, at: Tensor, live: Tensor) -> Tensor:
        """The same for blocks under the tokens at places `at` [B, A] of a batch's texts, as `BlockRows` asks for them."""
        places = torch.arange(batch.tokens.shape[1], device=at.device)[None]
        mask = block_mask(at, batch.tokens.shape[1], self.width, batch.documents, live)
        return self(batch.taps, places, batch.tokens.gather(1, at), at, mask)

    def weights(self, at: Tensor) -> Tensor:
        """[K] what a learnt row of each depth weighs."""
        return torch.exp(-torch.arange(self.config.block, device=at.device) / self.config.decay)

    def remember(self, taps: Tensor, taps_at: Tensor, kept: SlotCache) -> None:
        """Take context in without drafting: every layer's keys and values of it go into `kept`'s open pass."""
        context = self._context(taps)
        k_angles = angles(taps_at, self.shape)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, ContextLayer)
            kept.update(*layer.self_attn.keys_values(context, k_angles), i)

    def _context(self, taps: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(taps.flatten(2).to(self.fc.weight.dtype)))

    def _inputs(self, anchors: Tensor) -> Tensor:
        """Embeddings of every block's anchor and masks, [B, A * width, H]."""
        masks = self.width - 1
        if self.mask_token is not None:
            ids = nn.functional.pad(anchors.unsqueeze(-1), (0, masks), value=self.mask_token)
            return self.target.embed(ids.flatten(1))
        words = self.target.embed(anchors).unsqueeze(2)
        return torch.cat([words, self.mask.to(words.dtype).expand(*anchors.shape, masks, -1)], 2).flatten(1, 2)


class BlockModel(Protocol):
    """A draft model on this backbone, as `BlockDrafter` serves it."""

    backbone: Backbone

    def __call__(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, kept: SlotCache,
        pick: Pick | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...  # fmt: skip


class Model(DraftModel):
    """The backbone with the target's head on every slot."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config, self.target = with_mask(resolved(config, target.spec)[0], target), target
        self.backbone = Backbone(self.config, target)
        self.taps = self.backbone.taps

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, kept: SlotCache,
        pick: Pick | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Draft one block a slot: tokens [B, K], logits [B, K, V], no confidence.  pick None takes the most likely token."""
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, kept)[:, 0]
        logits = self.target.head(states)
        if pick is None:
            return logits.argmax(-1), logits, None
        return torch.stack([pick(logits[:, k], k) for k in range(logits.shape[1])], 1), logits, None

    def predict(self, batch: Batch) -> BlockRows:
        return BlockRows(self.backbone, batch, lambda states, _previous, _rows: self.target.head(states))

    def drafter(self) -> BlockDrafter:
        return BlockDrafter(self)


def build(config: Config, target: Target) -> BlockDrafter:
    return Model(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()


# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class BlockMemory:
    """Context keys and values of every slot, and taps that no pass has taken in yet."""

    def __init__(self, slots: int, length: int, backbone: Backbone):
        target = backbone.target
        self.kept = SlotCache(slots, length, target.device, len(backbone.layers))
        like = torch.empty(len(backbone.taps), target.spec.hidden, device=target.device, dtype=backbone.fc.weight.dtype)
        self.waiting = FeatureBuffer(slots, like)


class BlockDrafter(Drafter):
    """Drafts a block a slot in one pass.  Committed taps wait until the next pass takes them in together with the block."""

    def __init__(self, model: BlockModel):
        assert isinstance(model, nn.Module)
        packed.pack(model)
        self.model = model
        self.backbone = model.backbone
        self.taps, self.hidden = model.backbone.taps, model.backbone.target.spec.hidden
        self.block = model.backbone.config.block
        self.tree = runners_up_tree(self.block, model.backbone.config.runners_up)
        self.limit = len(self.tree.paths)
        # a greedy request's tree has runners-up, of which the head says nothing
        self.confidence_before_draw = getattr(model, "confidence_head", None) is not None and self.limit == self.block
        own = (blocks, heads, sys.modules[__name__], sys.modules[type(model).__module__])
        self.greedy, self.drawn = self.steps = CompiledBlock(Greedy(model, self.tree), own), CompiledBlock(Drawn(model), own)

    def allocate(self, cache: Cache) -> BlockMemory:
        # besides the context: the block, and as many columns again where slots bring unequal numbers of new taps
        backbone = self.backbone
        return BlockMemory(cache.slots, cache.length + 2 * backbone.width, backbone)

    def admit(
        self, memory: BlockMemory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        assert scores.taps is not None
        memory.waiting.admit(rows, scores.taps, lengths)
        self._settle(memory, rows)

    @torch.inference_mode()
    def propose(self, memory: BlockMemory, state: DecodeState, budget: Tensor) -> Draft:
        rows, kept = state.rows, memory.kept
        self._settle(memory, rows)
        taps, counts = memory.waiting.take(rows)
        is_greedy = state.judge.temperature is None and not state.judge.bans
        step = self._compiled(state)
        if step is not None and step.fits(kept, rows, max(2, taps.shape[1]) + self.backbone.width):
            taps = nn.functional.pad(taps, (0, 0, 0, 0, 0, max(0, 2 - taps.shape[1])))
            kept.open(rows, taps.shape[1] + self.backbone.width)
            tokens, q, confidence = step.run(taps, state, counts, kept)
        else:
            sampler = Sampler(state)
            pick: Pick | None = None if is_greedy else lambda logits, _slot: sampler.next(logits)
            kept.open(rows, taps.shape[1] + self.backbone.width)
            mask = self._mask(kept, taps.shape[1], counts)
            starts = [kept.lengths[row] for row in rows]
            taps_at = torch.tensor([list(range(start, start + taps.shape[1])) for start in starts], device=state.device)
            anchors_at = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)], device=state.device)
            with packed.products():
                tokens, logits, confidence = self.model(taps, taps_at, state.anchor, anchors_at, mask, kept, pick)
            if pick is None:
                tokens = tokens if self.tree.is_chain else self.tree.choices(logits)
            q = torch.stack(sampler.q, 1) if sampler.q else None
        kept.append(counts)
        if is_greedy and self.limit > self.block:
            return self.tree.draft(tokens, budget)
        return Draft.chain(tokens, budget.clamp(max=self.block), q, confidence)

    def observe(self, memory: BlockMemory, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        assert scores.taps is not None
        memory.waiting.observe(state.rows, scores.taps, kept)

    def _compiled(self, state: DecodeState) -> CompiledBlock | None:
        """What drafts for these requests in one graph, where it is there."""
        if state.judge.bans:
            return None
        if state.judge.temperature is None:
            return self.greedy
        # asked last: on a GPU, where there is no graph, it would wait for the device
        return self.drawn if self.drawn.graphs and _draws_from_all(state) else None

    def free(self, memory: BlockMemory, rows: Sequence[int]) -> None:
        memory.kept.free(rows)
        memory.waiting.free(rows)

    def _settle(self, memory: BlockMemory, rows: Sequence[int]) -> None:
        """Take in what waits where it is more than a step brings, such as a prompt; each slot by itself, so none is padded."""
        for row in rows:
            if memory.waiting.count(row) > self.block + 1:
                self._take_in(memory, row)

    @torch.inference_mode()
    def _take_in(self, memory: BlockMemory, row: int) -> None:
        taps, [count] = memory.waiting.take([row])
        start = memory.kept.lengths[row]
        memory.kept.open([row], count)
        self.backbone.remember(taps, torch.arange(start, start + count, device=taps.device)[None], memory.kept)
        memory.kept.append([count])

    def _mask(self, kept: SlotCache, width: int, counts: list[int]) -> Tensor | None:
        """None where no slot has padding among its new taps and all stand at the same place: then all is visible."""
        if kept.is_even and min(counts) == width:
            return None
        seen = real(width, torch.tensor(counts, device=kept.device), self.backbone.width)
        return kept.mask(seen, self.backbone.fc.weight.dtype)


def _draws_from_all(state: DecodeState) -> bool:
    """Every live slot draws at a temperature above 0 from all tokens."""
    return isinstance(state.judge, SamplingJudge) and state.judge.settings.is_tempered


def runners_up_tree(block: int, runners_up: Sequence[int]) -> RankTree:
    """A block's chain with runners-up beside its first slots.

    The runner-up of rank r beside slot k stands where the chain's slot k + 2 r does: about as likely, by experience.
    """
    nodes = [(k, 0) for k in range(block)]
    nodes += [(k, rank + 1) for k, count in enumerate(runners_up) for rank in range(count)]
    nodes.sort(key=lambda node: (node[0] + 2 * node[1], node[1]))
    return RankTree(tuple((0,) * slot + (rank,) for slot, rank in nodes))


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Blocks(Protocol):
    """What drafts whole blocks in training: `Backbone`, or a model with layers of its own."""

    config: Any
    """`block` and `anchors` are among its fields."""
    target: Target

    def drafted(self, batch: Batch, at: Tensor, live: Tensor) -> Tensor:
        """States [B, A, K, H] of blocks under the tokens at places `at` [B, A]; one that is not live [B, A] teaches nothing."""

    def weights(self, at: Tensor) -> Tensor:
        """What a learnt row weighs, [K] or [B, A, K]."""


class BlockRows(DetachedRows):
    """Predictions of blocks drawn under random anchors of a batch: K rows a block, row k labelled with token a + 1 + k.

    head: (states [m, H], the token before each [m], which rows) to logits [m, V].
    """

    def __init__(self, blocks: Blocks, batch: Batch, head: Callable[[Tensor, Tensor, slice], Tensor]):
        config, length = blocks.config, batch.tokens.shape[1]
        self._head, self.slots = head, config.block
        at, live = draw_anchors(batch, config.anchors)
        states = blocks.drafted(batch, at, live)
        wanted = at[..., None] + torch.arange(config.block, device=at.device)
        inside = (wanted + 1 < length) & live[..., None]
        labels_at, before_at = (wanted + 1).clamp(max=length - 1), wanted.clamp(max=length - 1)
        is_own = picked(batch.documents, labels_at) == batch.documents.gather(1, at)[..., None]
        learnt = picked(batch.loss_mask, labels_at) & inside & is_own
        self.previous = picked(batch.tokens, before_at).flatten()
        rows = Labelled(
            picked(batch.tokens, labels_at).flatten(), (learnt.cumprod(-1) * blocks.weights(at)).flatten(),
            torch.arange(config.block, device=at.device).repeat(at.numel()),
            torch.arange(at.numel(), device=at.device).repeat_interleave(config.block),
            (before_at + _row_offsets(batch.tokens)[..., None]).flatten(),
        )  # fmt: skip
        super().__init__(blocks.target, states.flatten(0, 2), batch.hidden, rows)

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self._head(states, self.previous[rows], rows)


def draw_anchors(batch: Batch, most: int) -> tuple[Tensor, Tensor]:
    """Up to `most` positions a text whose next token is one to learn, drawn without replacement: [B, A] and which are live."""
    follows = batch.loss_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
    return drawn(follows, most)


def _row_offsets(tokens: Tensor) -> Tensor:
    return (torch.arange(len(tokens), device=tokens.device) * tokens.shape[1])[:, None]
