"""DFlash: draft a whole block in one pass, from the target's own hidden states.  (arXiv 2602.06036.)

States of a few target layers, fused, are extra keys and values in every layer of a small transformer.  A block is the
anchor and masks; its tokens attend to each other in both directions and to all context before the anchor.  Every slot
of the block predicts by itself.

Two layouts have the same weights.  DSpark's, the default: the anchor's slot predicts the first token, so K inputs give
K drafts.  The paper's (`anchor_predicts: no`): every mask predicts the token at its own position and the anchor's slot
predicts nothing, so K drafts take K masks.

Differs from the paper: the default layout; training samples new anchors in every batch.

Take it where a draft must cost one pass, however long it is, and nothing else; its later slots guess alone, which
`dspark` and `domino` mend for a little more.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from outrider.decoding.draft import Draft, sent
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import DrafterError
from outrider.fast.block import CompiledBlock, Drawn, Greedy, real
from outrider.fast.static.step import Committed, Proposed, StaticRule, StaticSlots, sizes_of
from outrider.fast.static.target import StaticCache
from outrider.kernels import prepacked
from outrider.method import Method
from outrider.nn import blocks, draft_model, draft_vocabulary, heads
from outrider.nn.blocks import Attend, BlockAttention, ContextLayer, FusedTaps, RMSNorm, attending, rotary
from outrider.nn.draft_model import Batch, DraftModel, MaskedModule, MaskToken, copy_layers, resolve_taps, with_mask
from outrider.nn.draft_vocabulary import DraftVocabulary
from outrider.nn.drafting.serving import Sampler
from outrider.nn.drafting.static import Unread
from outrider.nn.drafting.trees import RankTree
from outrider.nn.memory import FeatureDrafter, FeatureMemory
from outrider.nn.rows import Labelled, SharedLabels
from outrider.nn.sequence import check_heads
from outrider.nn.shape import LayerConfig
from outrider.sampling.judge import SamplingJudge
from outrider.targets.cache.attention_mask import PassLayout, additive
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import Target

METHOD = Method(
    cost="once", usual=4, tokens=15, length="block", chain={"siblings": ()},
    engines={
        "vllm": {
            "name": "dflash",
            "formats": ("speculators", "sglang", "zlab"),
            "varies": True,
            "bad": (
                {
                    "versions": "0\\.32\\.0",
                    "platform": "cpu",
                    "what": (
                        "vLLM 0.32.0 for CPUs norms DFlash's context keys of every layer by the first layer's "
                        "k_norm: fewer tokens are accepted than could be (measured here; on GPUs not measured)"
                    ),
                },
                {
                    "versions": "0\\.25\\.1",
                    "what": "DFlash accepts nothing on the new model runner of 0.25.1 (vllm-project/vllm#49559)",
                },
            ),
        },
        "sglang": {"name": "DFLASH", "flag": "speculative-dflash-block-size", "formats": ("sglang", "zlab")},
        "trtllm": {
            "name": "DFlash",
            "facts": ("mask_token_id", "target_layer_ids"),
            "formats": ("trtllm", "sglang", "zlab"),
        },
        "llamacpp": {
            "name": "draft-dflash", "formats": ("gguf",), "cuts": True,
            # its draft-dflash reads no anchor's slot; such a file has a Markov head of zeros
            "in_anchor": "draft-dspark",
        },
    },
    layers={
        "speculators": ("aux_hidden_state_layer_ids", 1),
        "sglang": ("dflash_config.target_layer_ids", 0),
        "zlab": ("dflash_config.target_layer_ids", 0),
        "trtllm": ("dflash_config.target_layer_ids", 0),
        "deepspec": ("target_layer_ids", 0),
        "gguf": ("dflash.target_layers", 1),
    },
    read_only=("zlab",),
    in_anchor={
        "speculators": ("sample_from_anchor", False), "gguf": ("dflash.sample_from_anchor", False),
        "deepspec": ("", True),
    },
)  # fmt: skip

Pick = Callable[[Tensor, int], Tensor]
"""(logits [B, D] of the tokens that can be drafted, slot) to the drafted token [B]."""
Decoded = tuple[Tensor, Tensor, Tensor | None]
"""Tokens [B, K], logits [B, K, D] of the tokens that can be drafted, and confidences [B, K] of one block a slot; None
without a confidence head."""


class BackboneConfig(LayerConfig):
    """Settings of every drafter with this backbone."""

    block: PositiveInt = 7
    """Tokens drafted per step, one after the other."""
    anchor_predicts: bool = True
    """The anchor's slot predicts the first token, and masks the next ones; no: each mask predicts its own position."""
    siblings: tuple[NonNegativeInt, ...] = ()
    """Next best tokens also verified at slot 0, 1, … of a greedy request's block, as leaves of a tree."""
    layers: PositiveInt = 5
    """Decoder layers of the draft model."""
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; five spread over the depth unless given."""
    init_from_layers: tuple[NonNegativeInt, ...] | None = None
    """Target layers, one per draft layer and counted from 0, whose weights training begins with; random unless
    given."""
    mask_token: MaskToken = None
    """Id of the target's token whose embedding fills masked slots, or `learnt` for a trained vector.  Unless given: the
    tokenizer's mask token, else the first unused row of the embedding, else learnt."""
    anchors: PositiveInt = 512
    """Most blocks trained per text and step."""
    vocabulary: PositiveInt | None = None
    """Number of tokens it can draft, the most frequent ones in training, by the target's own head over them; all unless
    given.  With a large vocabulary most of a draft's time, and of a training step's, is the head."""
    decay: PositiveFloat = 4.0
    """Tokens of a block after which the weight in training has fallen to 1/e: token k weighs exp(-k / decay)."""


class Config(BackboneConfig):
    kind: Literal["dflash"] = "dflash"
    block: PositiveInt = 16
    """Tokens drafted per step, one after the other."""
    decay: PositiveFloat = 7.0
    """Tokens of a block after which the weight in training has fallen to 1/e: token k weighs exp(-k / decay)."""


class Backbone(MaskedModule, FusedTaps):
    """Takes context states and a block of anchor and masks; returns one state per drafted token."""

    def __init__(self, config: BackboneConfig, target: Target):
        if len(config.siblings) > config.block or 1 + max(config.siblings, default=0) > target.spec.vocabulary:
            raise DrafterError(
                f"siblings must be at most {config.block} numbers, one per slot of the block, each below the target's "
                f"vocabulary of {target.spec.vocabulary}, got {config.siblings}; give fewer or lower ones"
            )
        super().__init__(with_mask(config, target), target, resolve_taps(config.taps, target.spec))
        self.width = config.block if config.anchor_predicts else config.block + 1
        """Input slots of a block: the anchor and the masks."""
        hidden = target.spec.hidden
        self.hidden_norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.layers = nn.ModuleList(ContextLayer(hidden, self.shape) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.choose_mask()
        if config.init_from_layers is not None:
            copy_layers(self.layers, config.init_from_layers, target)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None,
        cache: SlotCache | None = None, attend: Attend | None = None,
    ) -> Tensor:  # fmt: skip
        """States of drafted blocks, [B, A, K, H].

        taps [B, C, T, H] at positions taps_at [B, C]; anchors [B, A] ids at positions anchors_at [B, A]; mask over C +
        A * width columns, or over all of `cache`; attend: in its place.
        """
        context = self.hidden_norm(self.fused(taps))
        x = self.words(anchors[..., None], self.width - 1).flatten(1, 2).to(context.dtype)
        x_at = (anchors_at[..., None] + torch.arange(self.width, device=anchors.device)).flatten(1)
        k_rotary = rotary(torch.cat([taps_at.expand(x_at.shape[0], -1), x_at], 1), self.shape)
        angle, attend = k_rotary[..., taps_at.shape[1] :, :], attending(mask, cache) if attend is None else attend
        for i, layer in enumerate(self.layers):
            x = layer(x, angle, attend, i, context, k_rotary)
        return self.norm(x).unflatten(1, (*anchors.shape[1:], self.width))[:, :, self.width - self.config.block :]

    def drafted(self, batch: Batch, at: Tensor, live: Tensor) -> Tensor:
        """The same for blocks under the tokens at positions `at` [B, A] of a batch's texts, as `BlockRows` wants
        them; for this process's of them, where several share the texts."""
        positions = batch.positions
        attend: Attend = BlockAttention(at, self.width, batch.documents, live)
        anchors, anchors_at = batch.tokens.gather(1, at), positions.gather(1, at)
        if batch.stripe is not None:
            attend = batch.stripe.attend(attend, positions.shape[1], at.shape[1], self.width)
            positions, anchors, anchors_at = map(batch.stripe.own, (positions, anchors, anchors_at))
        return self(batch.taps, positions, anchors, anchors_at, None, attend=attend)

    def weights(self, batch: Batch, at: Tensor) -> Tensor:
        """[K] weight of a learnt row of each depth."""
        return torch.exp(-torch.arange(self.config.block, device=at.device) / self.config.decay)

    def remember(self, taps: Tensor, taps_at: Tensor, cache: SlotCache) -> None:
        """Read context without drafting: every layer's keys and values of it go into the cache's open pass."""
        context = self.hidden_norm(self.fused(taps))
        k_rotary = rotary(taps_at, self.shape)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, ContextLayer)
            cache.update(*layer.self_attn.keys_values(context, k_rotary), i)


class BlockModel(DraftModel):
    """A backbone, and what turns its states into tokens; `BlockDrafter` serves it."""

    has_confidence = False

    def __init__(self, config: BackboneConfig, target: Target):
        super().__init__()
        self.backbone = Backbone(config, target)
        self.config, self.target, self.taps = self.backbone.config, target, self.backbone.taps
        self.draft_vocabulary = None if config.vocabulary is None else DraftVocabulary(target, config.vocabulary)

    @property
    def reduced(self) -> DraftVocabulary | None:
        return self.draft_vocabulary

    def begin(self, counts: Tensor) -> None:
        if self.draft_vocabulary is not None:
            self.draft_vocabulary.begin(counts)

    def over_all_tokens(self) -> BlockModel:
        """The target's logits of the tokens that it did not learn are not corrected."""
        if self.draft_vocabulary is None:
            return self
        whole = type(self)(self.config.model_copy(update={"vocabulary": None}), self.target)
        whole.to(self.target.device, self.dtype)
        own, wide = self.state_dict(), whole.state_dict()
        ids = own.pop("draft_vocabulary.ids")
        for name, weight in own.items():
            if weight.shape != wide[name].shape:
                own[name] = torch.zeros_like(wide[name]).index_copy(0, ids, weight)
        whole.load_state_dict(own)
        return whole

    def logits(self, states: Tensor) -> Tensor:
        """Of the tokens that it can draft: [..., D] of states [..., H]."""
        return super().logits(states) if self.draft_vocabulary is None else self.draft_vocabulary(states)

    def picked(self, logits: Tensor, slot: int, pick: Pick | None) -> Tensor:
        """The tokens [B] of a slot's logits [B, D]: the likeliest without `pick`."""
        return self.named(logits.argmax(-1)) if pick is None else pick(logits, slot)

    def named(self, columns: Tensor) -> Tensor:
        """The target's tokens of columns of logits."""
        return columns if self.draft_vocabulary is None else self.draft_vocabulary.ids[columns]

    def whole(self, values: Tensor, others: float = -torch.inf) -> Tensor:
        """Values [..., V] of all the target's tokens, from those [..., D] of the tokens that can be drafted."""
        return values if self.draft_vocabulary is None else self.draft_vocabulary.whole(values, others)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, cache: SlotCache,
        pick: Pick | None,
    ) -> Decoded:  # fmt: skip
        """Draft one block a slot; as the backbone, with anchors [B], and as `decode`."""
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, cache)[:, 0]
        return self.decode(states, anchors, pick)

    @abstractmethod
    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None) -> Decoded:
        """The block of states [B, K, H] after anchors [B]; pick None takes the likeliest tokens."""

    def predict(self, batch: Batch) -> BlockRows:
        return BlockRows(self, self.backbone, batch)

    def drafter(self) -> BlockDrafter:
        return BlockDrafter(self)


class Model(BlockModel):
    """The backbone with the target's head on every slot."""

    def check_split(self, count: int) -> None:
        check_heads(self.backbone.shape.kv_heads, count)

    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None) -> Decoded:
        logits = self.logits(states)
        if pick is None:
            return self.named(logits.argmax(-1)), logits, None
        return torch.stack([self.picked(logits[:, k], k, pick) for k in range(logits.shape[1])], 1), logits, None


build = Model.build


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class BlockDrafter(FeatureDrafter):
    """Drafts one block per slot in one pass, which also reads the buffered taps of committed tokens."""

    def __init__(self, model: BlockModel):
        self.backbone, self.block = model.backbone, model.config.block
        self.tree = sibling_tree(self.block, model.config.siblings)
        super().__init__(model, len(self.tree.paths), self.block + 1)
        if model.reduced is not None:
            prepacked.pack(model.reduced.head(model.dtype))
        # a greedy request's tree has siblings, for which the head has no confidence
        self.confidence_before_draw = model.has_confidence and self.limit == self.block
        own = (blocks, draft_model, draft_vocabulary, heads, sys.modules[__name__], sys.modules[type(model).__module__])
        self.greedy, self.drawn = self.steps = (
            CompiledBlock(Greedy(model, self.tree), own),
            CompiledBlock(Drawn(model), own),
        )

    def allocate(self, cache: Cache) -> FeatureMemory:
        # besides the context: the block, and as many columns again, since slots bring unequal numbers of new taps
        length = cache.length + 2 * self.backbone.width
        return FeatureMemory(cache.slots, length, len(self.backbone.layers), self.model)

    @torch.inference_mode()
    def propose(self, memory: FeatureMemory, state: DecodeState, budget: Tensor) -> Draft:
        rows, cache = state.rows, memory.kv_cache
        self.catch_up(memory, rows, state)
        taps, counts = memory.features.take(rows)
        step = self._compiled(state)
        if step is not None and step.fits(cache, rows, max(2, taps.shape[1]) + self.backbone.width):
            tokens, q, confidence = step.run(taps, state, counts, cache)
        else:
            cache.open(rows, taps.shape[1] + self.backbone.width)
            tokens, q, confidence = self._run(taps, state, counts, cache)
        cache.append(counts)
        if _is_greedy(state) and self.limit > self.block:
            return self.tree.draft(tokens, budget)
        return Draft.chain(tokens, budget.clamp(max=self.block), q, confidence)

    def _run(
        self, taps: Tensor, state: DecodeState, counts: list[int], cache: SlotCache
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `CompiledBlock.run`."""
        new, real_taps, sampler = taps.shape[1], sent(counts, state.device), Sampler(state)
        pick: Pick | None = None if _is_greedy(state) else lambda logits, _slot: sampler.next(self.model.whole(logits))
        mask = None  # where no slot has padding and all are equally long, every row attends to everything
        if not cache.is_even or min(counts) < new:
            mask = cache.mask(real(new, real_taps, self.backbone.width), self.backbone.fc.weight.dtype)
        with prepacked.enabled():
            taps_at, anchors_at = cache.positions()[:, :new], cache.starts + real_taps
            tokens, logits, confidence = self.model(taps, taps_at, state.anchor, anchors_at, mask, cache, pick)
        if pick is None and not self.tree.is_chain:
            tokens = self.model.named(self.tree.choices(logits))
        return tokens, torch.stack(sampler.q, 1) if sampler.q else None, confidence

    def _compiled(self, state: DecodeState) -> CompiledBlock | None:
        """The compiled step that drafts for these requests, or None."""
        if _is_greedy(state):
            return self.greedy
        # all slots draw from all tokens; checked last: on a GPU, where there is no graph, it would wait for the device
        is_drawn = (
            self.drawn.graph is not None and isinstance(state.judge, SamplingJudge) and state.judge.settings.is_tempered
        )
        return self.drawn if is_drawn and not state.judge.bans else None

    def static(self, memory: FeatureMemory, is_greedy: bool) -> StaticBlock:
        return StaticBlock(self, memory, self.tree if is_greedy else sibling_tree(self.block, ()), is_greedy)

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        taps, [count] = memory.features.take([row])
        memory.kv_cache.open([row], count)
        self.backbone.remember(taps, memory.kv_cache.positions(), memory.kv_cache)
        memory.kv_cache.append([count])


class StaticBlock(Unread):
    """The same in a static step: the taps of the last step wait in a tensor, right-padded."""

    def __init__(self, drafter: BlockDrafter, memory: FeatureMemory, tree: RankTree, is_greedy: bool):
        super().__init__(drafter, memory, drafter.block + 1)
        self.model, self.backbone, self.tree = drafter.model, drafter.backbone, tree
        self.parents, self.has_q = tree.parents, not is_greedy
        if self.model.reduced is not None:
            self.borrowed = [self.model.reduced.head(self.model.dtype)]
        self.has_confidence = self.model.has_confidence and tree.is_chain
        kv_cache = memory.kv_cache
        self.choices = tree.indices.to(self.start.device).repeat(len(self.start), 1)
        if not kv_cache.layers:  # buffers are made by the first pass
            kv_cache.open([0], 1)
            self.backbone.remember(self.features[:1, :1], self.start[:1, None], kv_cache)
        self.caches = [StaticCache(kv_cache, self.width + self.backbone.width)]

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        new, width, [cache] = self.width, self.backbone.width, self.caches
        layout = PassLayout(self.start, cache.columns, new + width)
        mask = additive(layout.mask(real(new, self.counts, width)), self.backbone.fc.weight.dtype)
        at, anchors_at = self.start[:, None] + torch.arange(new, device=mask.device), self.start + self.counts
        q: list[Tensor] = []

        def pick(logits: Tensor, slot: int) -> Tensor:
            token, own = rule.drawn(self.model.whole(logits), slots, slot)
            q.extend([] if own is None else [own])
            return token

        there: Any = cache.within(layout)
        tokens, logits, confidence = self.model(self.features, at, slots.anchor, anchors_at, mask, there, pick)
        if not self.tree.is_chain:
            tokens = self.model.named(logits.topk(self.tree.width, -1).indices.flatten(1).gather(1, self.choices))
        self.read_all()
        return Proposed(tokens, sizes_of(slots, len(self.parents)), torch.stack(q, 1) if q else None, confidence)

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        self.take(committed, self.model.target_states(scores))


def _is_greedy(state: DecodeState) -> bool:
    """Every live slot takes the likeliest of all tokens."""
    return state.judge.temperature is None and not state.judge.bans


def sibling_tree(block: int, siblings: Sequence[int]) -> RankTree:
    """A block's chain with siblings at its first slots.

    The sibling of rank r at slot k is ordered as the chain's slot k + 2 r, which is about as likely by measurement.
    """
    nodes = [(k, 0) for k in range(block)]
    nodes += [(k, rank + 1) for k, count in enumerate(siblings) for rank in range(count)]
    nodes.sort(key=lambda node: (node[0] + 2 * node[1], node[1]))
    return RankTree(tuple((0,) * slot + (rank,) for slot, rank in nodes))


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class BlockRows(SharedLabels):
    """Predictions of blocks drawn under random anchors of a batch: K rows per block, row k has label token a + 1 + k.

    blocks: the module that drafts them, such as `Backbone`; it has `drafted` and `weights`.
    """

    def __init__(self, model: DraftModel, blocks: Any, batch: Batch):
        config, self.slots = blocks.config, blocks.config.block
        at, live, labels_at, learnt = draft_model.draw(batch, config.anchors, 1, config.block)
        states = blocks.drafted(batch, at, live)
        if batch.stripe is not None:  # blocks behind the last one have nothing to learn, and labels of any place
            at, labels_at, learnt = map(batch.stripe.own, (at, labels_at, learnt))
            labels_at = labels_at.clamp(min=1)
        text = torch.arange(len(at), device=at.device).repeat_interleave(at.shape[1])
        self.previous = batch.tokens[text[:, None], labels_at.flatten(0, 1) - 1].flatten()
        """[M], the token before each row's label."""
        rows = Labelled.blocks(batch, text, labels_at.flatten(0, 1), (learnt * blocks.weights(batch, at)).flatten(0, 1))
        super().__init__(model, states.flatten(0, 2), batch.final, rows)

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self.model.taught(*self.whole(states, rows)).flatten(0, 1)

    def whole(self, states: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """These rows by block: states [n, K, H] and the token before each, [n, K]."""
        return states.unflatten(0, (-1, self.slots)), self.previous[rows].unflatten(0, (-1, self.slots))
