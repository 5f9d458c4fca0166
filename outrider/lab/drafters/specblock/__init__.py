"""SpecBlock: blocks of K slots, one pass each, one after another; a tree where the draft is unsure.  (arXiv
2605.07243.)

A block reads a feature and the next token.  The feature is a position's fused taps for the first block, and the draft's
own state of the slot that it continues for later ones.  Slot k reads feature, token and a learnt query at rotary
position i + 1 + k, and attends to all slots of earlier positions and its own up to k.  Between two layers each slot
reads its predecessor, h_k <- W [h_k; h_{k-1}], so slots depend on each other and the pass stays parallel.

A rank head predicts for each slot the rank of the target's choice in the draft's order: 1, 2-4, 5-10 or beyond.  A
greedy draft is a tree: block 1's likeliest tokens as a chain; at the first slot that is not sure of rank 1 the 4 or 10
best tokens, none beyond rank 10, each continued by a block of its own, which branches likewise, up to `blocks` one
after another, at most 10 side by side; of all that, the likeliest paths.  Drawn drafts are chains of as many blocks; q
of each slot is a softmax of its row.

In training a slot weighs 0.8^k where the earlier slots of its block are right (the likeliest token is the text's).

Differs from the paper: training unrolls two blocks and not three unless `blocks` is 3, M drawn once per batch; later
blocks are trained from `anchors` positions instead of all; the rank's loss has the row's weight, 0.8^k too, and its
class weights are scaled to a mean of 1; the head is the target's own, frozen, unless `vocabulary` is given; W begins as
the identity on h_k.

Use it if training may take long: its acceptance is higher than EAGLE-3's after the same number of steps, but a step
takes four times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState
from outrider.lab.drafters.specblock.rows import Rows
from outrider.lab.drafters.specblock.tree import WIDTHS, Offers, Path, doubt, likeliest, positions
from outrider.method import Method
from outrider.nn.blocks import ContextLayer, FusedTaps, RMSNorm, Shift, attending, rotary
from outrider.nn.draft_model import Batch
from outrider.nn.drafting import serving, trees
from outrider.nn.heads import RankHead, ReducedHead, VocabularyModel
from outrider.nn.memory import FeatureMemory, PairDrafter
from outrider.nn.shape import InitLayers, LayerConfig, copy_layers, resolve_taps
from outrider.sampling.distribution import log_probs
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import Target

METHOD = Method(
    instead={
        "vllm": "train a DFlash: a block without a tree",
    },
)  # fmt: skip

CHUNK = 64
"""First blocks per pass in training; more would waste more masked attention between them."""


class Config(LayerConfig):
    REMOVED: ClassVar[Mapping[str, str]] = {"choose_blocks": "set 'blocks' instead"}
    kind: Literal["specblock"] = "specblock"
    slots: PositiveInt = 4
    """Tokens drafted by one block."""
    blocks: PositiveInt = 2
    """Number of successive blocks, in training and in drafts."""
    nodes: PositiveInt = 60
    """Most tokens of a draft, per step."""
    layers: PositiveInt = 2
    """Decoder layers of the draft model."""
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; by default three: low, middle and high."""
    vocabulary: PositiveInt | None = None
    """Number of tokens it can draft, the most frequent ones, by a trained head; by default all, by the target's
    head."""
    init_from_layers: InitLayers = None
    anchors: PositiveInt = 512
    """Most positions drafted from per text and step in training."""
    decay: PositiveFloat = 0.8
    """Weight of a slot in training relative to the previous one in its block: slot k weighs decay ** k."""


class Model(VocabularyModel, FusedTaps):
    """Takes features and tokens; returns K states for each."""

    rows_are_independent = False  # rank classes are weighted by their counts in the batch

    def __init__(self, config: Config, target: Target):
        super().__init__(config, target, resolve_taps(config.taps, target.spec, 3))
        hidden, shape = target.spec.hidden, self.shape
        self.cond_norm, self.word_norm, self.query_norm = (RMSNorm(hidden, shape.rms_norm_eps) for _ in range(3))
        self.queries = nn.Parameter(torch.randn(config.slots, hidden))
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(ContextLayer(hidden, shape) for _ in range(config.layers))
        self.shifts = nn.ModuleList(Shift(hidden) for _ in range(config.layers - 1))
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.head = None if config.vocabulary is None else ReducedHead(target, config.vocabulary)
        self.rank_head = RankHead(hidden)
        if config.init_from_layers is not None:
            copy_layers(self.layers, config.init_from_layers, target)

    def forward(self, features: Tensor, tokens: Tensor, at: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """States [B, n, K, H] of blocks on features [B, n, H] and the next tokens [B, n], at positions `at` [B or 1,
        n].

        mask is over the n * K rows, block by block, after what `cache` holds.
        """
        x, attend = self._rows(features, tokens), attending(mask, cache)
        cos_sin = rotary(self._positions(at), self.shape)
        for i, layer in enumerate(self.layers):
            x = layer(self._shifted(i, x), cos_sin, attend, i)
        return self.norm(x).unflatten(1, (-1, self.config.slots))

    def first(self, features: Tensor, tokens: Tensor, at: Tensor, mask: Tensor, anchors: Tensor, cache: Any) -> Tensor:
        """States [B, A, K, H] of first blocks of the pairs `anchors` [B, A], as `forward` gives them for blocks of all
        pairs, at positions `at` [B, n].

        These attend to the other blocks, which are computed up to the last layer's keys and values.
        mask [B, 1, n * K, n * K] hides everything after its row.
        """
        x, step = self._rows(features, tokens), self.config.slots * CHUNK
        cos_sin = rotary(self._positions(at), self.shape)
        *lower, last = self.layers
        assert isinstance(last, ContextLayer)
        for i, layer in enumerate(lower):
            parts = zip(self._shifted(i, x).split(step, 1), cos_sin.split(step, -2), mask.split(step, 2), strict=True)
            prefixes = [
                (part, part_rotary, attending(rows_mask[..., : n * step], cache))
                for n, (part, part_rotary, rows_mask) in enumerate(parts, 1)
            ]
            x = torch.cat([layer(part, part_rotary, attend, i) for part, part_rotary, attend in prefixes], 1)
        x = self._shifted(len(lower), x)
        rows = (
            self.config.slots * anchors[..., None] + torch.arange(self.config.slots, device=anchors.device)
        ).flatten(1)
        texts = torch.arange(len(rows), device=rows.device)[:, None]
        anchor_rotary = rotary(self._positions(at.gather(1, anchors)), self.shape)
        normed, attend = last.input_layernorm(x), attending(mask[texts, 0, rows][:, None], cache)
        x = x[texts, rows] + last.self_attn(normed[texts, rows], anchor_rotary, attend, len(lower), normed, cos_sin)
        return self.norm(x + last.mlp(last.post_attention_layernorm(x))).unflatten(1, (-1, self.config.slots))

    def _rows(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Input of the first layer, [B, n * K, H]."""
        words = self.word_norm(self.target.embed(tokens).to(features.dtype))
        inputs = torch.cat([self.cond_norm(features), words], -1)[:, :, None].expand(-1, -1, self.config.slots, -1)
        queries = self.query_norm(self.queries.to(features.dtype)).expand(*inputs.shape[:-1], -1)
        return self.fuse(torch.cat([inputs, queries], -1)).flatten(1, 2)

    def _positions(self, at: Tensor) -> Tensor:
        """Rotary positions [.., n * K] of blocks at `at` [.., n]."""
        return (at[..., None] + 1 + torch.arange(self.config.slots, device=at.device)).flatten(1)

    def _shifted(self, layer: int, x: Tensor) -> Tensor:
        """x [B, n * K, H] as input of this layer."""
        return self.shifts[layer - 1](x.unflatten(1, (-1, self.config.slots))).flatten(1, 2) if layer else x

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> SpecBlock:
        return SpecBlock(self)


build = Model.build


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Blocks(NamedTuple):
    """Blocks side by side in every slot: the first one after its newest pair, or W that go on from earlier ones."""

    rows: Sequence[int]
    states: Tensor
    """[B, W, K, H]."""
    logits: Tensor
    """[B, W, K, V]."""
    at: Tensor
    """[B, W], the position of the pair that each stands for."""
    sees: Tensor
    """[B, W, E] bool: which of the newest pair's first block and all later ones, the cache's last E entries, its rows
    may attend to, its own included."""


class SpecBlock(PairDrafter):
    """Drafts a tree at temperature 0 if the target verifies trees, else a chain of blocks."""

    def __init__(self, model: Model):
        self.config, self.longest = model.config, model.config.slots * model.config.blocks
        chain = min(self.longest, self.config.nodes)
        self.has_trees = serving.verifies_trees(model.target, "specblock", f"chains of at most {chain}")
        super().__init__(model, self.config.nodes if self.has_trees else chain, self.longest + 1)

    def allocate(self, cache: Cache) -> FeatureMemory:
        # the text, the tokens of a step, and later blocks for every candidate
        count = cache.length + self.longest + 1 + max(WIDTHS) * (self.config.blocks - 1)
        return FeatureMemory(cache.slots, count * self.config.slots, self.config.layers, self.model)

    def draft(self, memory: FeatureMemory, state: DecodeState, sizes: Tensor) -> Draft:
        cache = memory.kv_cache
        go_on = functools.partial(self._next, cache)
        first = self._first(memory, state)
        lengths = [cache.lengths[row] for row in state.rows]
        if state.judge.temperature is None and not state.judge.bans and self.has_trees:
            draft = self._tree(first, go_on, sizes)
        else:
            draft = self._chain(first, go_on, sizes.clamp(max=self.longest), state)
        for row, length in zip(state.rows, lengths, strict=True):  # drop later blocks
            cache.lengths[row] = length
        return draft

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        self._read(memory, [row], state, leave=1)

    def _read(
        self, memory: FeatureMemory, rows: Sequence[int], state: DecodeState, leave: int
    ) -> tuple[Tensor, Tensor]:
        """Read the unread pairs.  Returns the states [B, K, H] of each slot's last one and its position [B]."""
        cache, slots = memory.kv_cache, self.config.slots
        taps, tokens, counts = memory.features.take_with_tokens(rows, state, leave)
        cache.open(rows, slots * tokens.shape[1])
        at = cache.positions()[:, ::slots] // slots
        states = self.model(self.model.fused(taps), tokens, at, cache.mask(None, self.model.dtype), cache)
        last = (torch.tensor(counts, device=at.device) - 1).clamp(min=0)
        begins = cache.starts // slots
        cache.append([slots * count for count in counts])
        return states[torch.arange(len(counts), device=at.device), last], begins + last

    def _first(self, memory: FeatureMemory, state: DecodeState) -> Blocks:
        states, at = self._read(memory, state.rows, state, leave=0)
        sees = torch.ones(len(at), 1, self.config.slots, dtype=torch.bool, device=at.device)
        return Blocks(state.rows, states[:, None], self.model.logits(states)[:, None], at[:, None], sees)

    def _next(self, cache: SlotCache, blocks: Blocks, chosen: Tensor, slot: Tensor, tokens: Tensor) -> Blocks:
        """Blocks after these tokens [B, C], which stand in slot `slot` [B, C] of block `chosen` [B, C]."""
        slots, (batch, width) = self.config.slots, tokens.shape
        cache.open(blocks.rows, slots * width)
        number, here = torch.arange(slots * width, device=tokens.device), torch.arange(batch)[:, None]
        is_same_block = (number[:, None] // slots == number // slots) & (number[:, None] >= number)
        mask = cache.mask(is_same_block[None], self.model.dtype)
        sees = blocks.sees[here, chosen]
        entries, before = sees.shape[-1], blocks.states.shape[1]
        # of the block that each continues, none after the slot that it continues
        place = torch.arange(entries, device=tokens.device) - (entries + slots * (chosen[..., None] - before))
        sees = sees & ~((place > slot[..., None]) & (place < slots))
        entry = cache.columns - cache.starts[:, None] + entries  # [B, columns]
        is_entry = (entry >= 0) & (entry < entries)
        allowed = sees.gather(2, entry.clamp(0, entries - 1)[:, None].expand(-1, width, -1))
        hidden = (is_entry[:, None] & ~allowed).repeat_interleave(slots, 1)
        mask = mask.masked_fill(hidden[:, None], -torch.inf)
        at = blocks.at.gather(1, chosen) + slot + 1
        states = self.model(blocks.states[here, chosen, slot], tokens, at, mask, cache)
        cache.append([slots * width] * batch)
        itself = torch.eye(width, dtype=torch.bool, device=tokens.device).repeat_interleave(slots, 1)
        sees = torch.cat([sees, itself.expand(batch, -1, -1)], -1)
        return Blocks(blocks.rows, states, self.model.logits(states), at, sees)

    def _chain(self, first: Blocks, go_on: GoOn, sizes: Tensor, state: DecodeState) -> Draft:
        """Block after block, each after the last slot of the one before."""
        blocks, rows = first, list(first.logits[:, 0].unbind(1))

        def read_one(token: Tensor) -> Tensor:
            nonlocal blocks
            rows.pop(0)
            if not rows:
                only = torch.zeros_like(token)[:, None]
                blocks = go_on(blocks, only, only + self.config.slots - 1, token[:, None])
                rows.extend(blocks.logits[:, 0].unbind(1))
            return rows[0]

        return serving.chain(rows[0], read_one, sizes, state)

    def _tree(self, first: Blocks, go_on: GoOn, sizes: Tensor) -> Draft:
        """The likeliest paths of all blocks: each block's likeliest tokens, and more blocks after the best tokens of
        its first unsure slot."""
        blocks = first
        stems: list[list[Path]] = [[[]] for _ in first.rows]
        paths: list[list[Path]] = [[] for _ in first.rows]
        for number in range(self.config.blocks):
            best = log_probs(blocks.logits).topk(min(max(WIDTHS), blocks.logits.shape[-1]), -1)
            offers = Offers(*doubt(self._ranks(blocks)), best.indices, best.values)
            for slot_paths, chains in zip(paths, offers.chains(stems), strict=True):
                slot_paths += chains
            leaves = offers.leaves(stems)
            if number + 1 == self.config.blocks or int(sizes.max()) < 2 or not any(leaves):
                break
            stems = [[leaf.path for leaf in slot_leaves] for slot_leaves in leaves]
            blocks = go_on(blocks, *(x.to(first.at.device) for x in positions(leaves)))
        best_nodes = [likeliest(slot_paths, size) for slot_paths, size in zip(paths, sizes.tolist(), strict=True)]
        tokens, parents = [tokens for tokens, _ in best_nodes], [parents for _, parents in best_nodes]
        return trees.of_lists(tokens, parents, first.logits.device)

    def _ranks(self, blocks: Blocks) -> Tensor:
        """Rank classes, [B, W, K]."""
        ranks: Tensor = self.model.rank_head(blocks.states, blocks.logits).argmax(-1)
        return ranks


GoOn = Callable[..., Blocks]
"""`_next` on the cache of the step."""
