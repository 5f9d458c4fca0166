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
from types import ModuleType
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.errors import DrafterError
from outrider.fast.block import CompiledBlock, Drawn, Greedy
from outrider.fast.static.step import Proposed, StaticRule, StaticSlots, sizes_of
from outrider.kernels import prepacked
from outrider.method import Method
from outrider.nn import blocks, draft_model, draft_vocabulary, heads
from outrider.nn.blocks import Attend, BlockAttention, ContextLayer, FusedTaps, RMSNorm, attending, rotary
from outrider.nn.draft_model import Batch, DraftModel, MaskedModule, MaskToken, copy_layers, resolve_taps, with_mask
from outrider.nn.draft_vocabulary import DraftVocabulary
from outrider.nn.drafting.backbone import BackboneDrafter, StaticBackbone, is_greedy
from outrider.nn.drafting.serving import Sampler
from outrider.nn.drafting.trees import RankTree
from outrider.nn.memory import FeatureMemory
from outrider.nn.rows import Labelled, SharedLabels
from outrider.nn.sequence import check_heads
from outrider.nn.shape import LayerConfig
from outrider.sampling.judge import SamplingJudge
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
    prefixes: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the blocks, 0 to 1, that are trained with their first tokens known, as many as are drawn with 0.9 ** n;
    the weight falls from the first one that is not (D2SD's variable prefix)."""


class Config(BackboneConfig):
    kind: Literal["dflash"] = "dflash"
    block: PositiveInt = 16
    """Tokens drafted per step, one after the other."""
    decay: PositiveFloat = 7.0
    """Tokens of a block after which the weight in training has fallen to 1/e: token k weighs exp(-k / decay)."""


class Backbone(MaskedModule, FusedTaps):
    """Takes context states and a block of anchor and masks; returns one state per drafted token."""

    def __init__(
        self, config: BackboneConfig, target: Target, layer: Callable[..., ContextLayer] = ContextLayer,
        window: int | None = None,
    ):  # fmt: skip
        """layer: makes one of hidden size and sizes.  window: positions back from each slot that it attends to, its own
        included; all unless given."""
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
        cache: SlotCache | None = None, attend: Attend | None = None, known: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """States of drafted blocks, [B, A, K, H].

        taps [B, C, T, H] at positions taps_at [B, C]; anchors [B, A] ids at positions anchors_at [B, A]; mask over C +
        A * width columns, or over all of `cache`; attend: in its place.  known [B, A, width]: ids that slots read in
        place of masks; -1 in the others.
        """
        context = self.hidden_norm(self.fused(taps))
        x = self.words(anchors[..., None], self.width - 1)
        if known is not None:
            x = torch.where((known >= 0)[..., None], self.target.embed(known.clamp(min=0)).to(x), x)
        x = x.flatten(1, 2).to(context.dtype)
        x_at = (anchors_at[..., None] + torch.arange(self.width, device=anchors.device)).flatten(1)
        k_rotary = rotary(torch.cat([taps_at.expand(x_at.shape[0], -1), x_at], 1), self.shape)
        angle, attend = k_rotary[..., taps_at.shape[1] :, :], attending(mask, cache) if attend is None else attend
        for i, layer in enumerate(self.layers):
            x = layer(x, angle, attend, i, context, k_rotary)
        return self.norm(x).unflatten(1, (*anchors.shape[1:], self.width))[:, :, self.width - self.config.block :]

    def drafted(self, batch: Batch, at: Tensor, live: Tensor, num_known: Tensor | None = None) -> Tensor:
        """The same for blocks under the tokens at positions `at` [B, A] of a batch's texts, as `BlockRows` wants
        them; for this process's of them, where several share the texts.  num_known [B, A]: as of `prefixes`."""
        positions = batch.positions
        attend: Attend = BlockAttention(at, self.width, batch.documents, live, self.window)
        anchors, anchors_at = batch.tokens.gather(1, at), positions.gather(1, at)
        known = None if num_known is None else known_tokens(batch.tokens, at, num_known, self.width)
        if batch.stripe is not None:
            attend = batch.stripe.attend(attend, positions.shape[1], at.shape[1], self.width)
            positions, anchors, anchors_at = map(batch.stripe.own, (positions, anchors, anchors_at))
            known = None if known is None else batch.stripe.own(known)
        return self(batch.taps, positions, anchors, anchors_at, None, attend=attend, known=known)

    def weights(self, batch: Batch, at: Tensor) -> Tensor:
        """[K] weight of a learnt row of each depth."""
        return torch.exp(-torch.arange(self.config.block, device=at.device) / self.config.decay)

    def prefixes(self, batch: Batch, blocks: int) -> Tensor | None:
        """How many first tokens of each block are known in training, [B, blocks]; None where that is none."""
        share, most = self.config.prefixes, self.config.block - 1
        if not (self.training and share and most):
            return None
        # on the CPU, whose random state a checkpoint stores
        chance = batch.random(torch.rand, 2, blocks)
        cumulative = (KNOWN ** torch.arange(1, most + 1)).cumsum(0)
        count = 1 + torch.searchsorted(cumulative, chance[:, 1].contiguous() * cumulative[-1]).clamp(max=most - 1)
        return count.where(chance[:, 0] < share, 0).to(batch.tokens.device)

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
    code: tuple[ModuleType, ...] = ()
    """Modules with its code, besides its own and those of the backbone; a compiled pass is made again where one has
    changed."""

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

    def drafter(self) -> Drafter:
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


class BlockDrafter(BackboneDrafter):
    """Drafts one block per slot, with siblings where its config has some."""

    def __init__(self, model: BlockModel):
        self.tree = sibling_tree(model.config.block, model.config.siblings)
        super().__init__(model, len(self.tree.paths))
        # a greedy request's tree has siblings, for which the head has no confidence
        self.confidence_before_draw = model.has_confidence and self.limit == self.block
        own: tuple[ModuleType, ...] = (
            blocks,
            draft_model,
            draft_vocabulary,
            heads,
            sys.modules[__name__],
            sys.modules[type(model).__module__],
        )
        own += model.code
        self.greedy, self.drawn = self.steps = (
            CompiledBlock(Greedy(model, self.tree), own),
            CompiledBlock(Drawn(model), own),
        )

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
        if is_greedy(state) and self.limit > self.block:
            return self.tree.draft(tokens, budget)
        return Draft.chain(tokens, budget.clamp(max=self.block), q, confidence)

    def _run(
        self, taps: Tensor, state: DecodeState, counts: list[int], cache: SlotCache
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `CompiledBlock.run`."""
        sampler = Sampler(state)
        pick: Pick | None = None if is_greedy(state) else lambda logits, _slot: sampler.next(self.model.whole(logits))
        with prepacked.enabled():
            tokens, logits, confidence = self.model(*self.inputs(taps, counts, state, cache), pick)
        if pick is None and not self.tree.is_chain:
            tokens = self.model.named(self.tree.choices(logits))
        return tokens, torch.stack(sampler.q, 1) if sampler.q else None, confidence

    def _compiled(self, state: DecodeState) -> CompiledBlock | None:
        """The compiled step that drafts for these requests, or None."""
        if is_greedy(state):
            return self.greedy
        # all slots draw from all tokens; checked last: on a GPU, where there is no graph, it would wait for the device
        is_drawn = (
            self.drawn.graph is not None and isinstance(state.judge, SamplingJudge) and state.judge.settings.is_tempered
        )
        return self.drawn if is_drawn and not state.judge.bans else None

    def static(self, memory: FeatureMemory, is_greedy: bool) -> StaticBlock:
        return StaticBlock(self, memory, self.tree if is_greedy else sibling_tree(self.block, ()), is_greedy)


class StaticBlock(StaticBackbone):
    """A block, and its siblings, in a static step."""

    def __init__(self, drafter: BlockDrafter, memory: FeatureMemory, tree: RankTree, is_greedy: bool):
        super().__init__(drafter, memory)
        self.tree, self.parents, self.has_q = tree, tree.parents, not is_greedy
        self.has_confidence = self.model.has_confidence and tree.is_chain
        self.choices = tree.indices.to(self.start.device).repeat(len(self.start), 1)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        q: list[Tensor] = []

        def pick(logits: Tensor, slot: int) -> Tensor:
            token, own = rule.drawn(self.model.whole(logits), slots, slot)
            q.extend([] if own is None else [own])
            return token

        tokens, logits, confidence = self.model(*self.inputs(slots), pick)
        if not self.tree.is_chain:
            tokens = self.model.named(logits.topk(self.tree.width, -1).indices.flatten(1).gather(1, self.choices))
        self.read_all()
        return Proposed(tokens, sizes_of(slots, len(self.parents)), torch.stack(q, 1) if q else None, confidence)


KNOWN = 0.9
"""A block's first n tokens are known with a probability in proportion to KNOWN ** n, n from 1 to one less than it has.
(D2SD, arXiv 2606.04446.)"""


def known_tokens(tokens: Tensor, at: Tensor, count: Tensor, width: int) -> Tensor:
    """The first count[b, a] tokens after positions `at` [B, A] of texts [B, S], in the slots that hold masks else:
    [B, A, width], -1 in the others."""
    order = torch.arange(width, device=at.device)
    there = (at[..., None] + order).clamp(max=tokens.shape[1] - 1)
    found = tokens.gather(1, there.flatten(1)).view(there.shape)
    return found.where((order > 0) & (order <= count[..., None]), -1)


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

    blocks: the module that drafts them, such as `Backbone`; it has `prefixes`, `drafted` and `weights`.
    """

    def __init__(self, model: DraftModel, blocks: Any, batch: Batch):
        config, self.slots = blocks.config, blocks.config.block
        at, live, labels_at, learnt = draft_model.draw(batch, config.anchors, 1, config.block)
        known: Tensor | None = blocks.prefixes(batch, at.shape[1])
        states = blocks.drafted(batch, at, live, known)
        if known is None:
            weights = learnt * blocks.weights(batch, at)
        else:  # the first token that is not known weighs 1
            place = torch.arange(self.slots, device=at.device) - known[..., None]
            weights = learnt * (place >= 0) * blocks.weights(batch, at)[place.clamp(min=0)]
        if batch.stripe is not None:  # blocks behind the last one have nothing to learn, and labels of any place
            at, labels_at, weights = map(batch.stripe.own, (at, labels_at, weights))
            labels_at = labels_at.clamp(min=1)
        text = torch.arange(len(at), device=at.device).repeat_interleave(at.shape[1])
        self.previous = batch.tokens[text[:, None], labels_at.flatten(0, 1) - 1].flatten()
        """[M], the token before each row's label."""
        rows = Labelled.blocks(batch, text, labels_at.flatten(0, 1), weights.flatten(0, 1))
        super().__init__(model, states.flatten(0, 2), batch.final, rows)

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self.model.taught(*self.whole(states, rows)).flatten(0, 1)

    def whole(self, states: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """These rows by block: states [n, K, H] and the token before each, [n, K]."""
        return states.unflatten(0, (-1, self.slots)), self.previous[rows].unflatten(0, (-1, self.slots))
