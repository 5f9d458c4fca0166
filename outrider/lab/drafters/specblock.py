"""SpecBlock: blocks of K slots, one pass each, one after another; a tree where the draft is unsure.  (arXiv
2605.07243.)

A block reads a feature and the next token.  The feature is a position's fused taps for the first block, and for the
next the draft's own state of the slot that it continues.  Slot k reads feature, token and a learnt query, at rotary
position i + 1 + k, and attends to all slots of earlier positions and its own up to k.  Between two layers each slot
reads its predecessor, h_k <- W [h_k; h_{k-1}], so that slots depend on each other while the pass stays parallel.

A rank head predicts for each slot the rank of the target's choice in the draft's order: 1, 2-4, 5-10 or beyond.  A
greedy draft is a tree: block 1's likeliest tokens as a chain; at the first slot that is not sure of rank 1 the 4 or 10
best tokens, none beyond rank 10, each continued by a block of its own, which branches likewise, up to `blocks` one
after another, at most 10 side by side; of all that, the likeliest paths.  Drawn drafts are chains of as many blocks; q
of each slot is a softmax of its row.  With `choose_blocks` a step drafts as many blocks as pay by the seconds measured.

In training a slot weighs 0.8^k where the earlier slots of its block are right (the likeliest token is the text's).

Differs from the paper: training unrolls two blocks and not three unless `blocks` is 3, M drawn once per batch; later
blocks are trained from `anchors` positions instead of all; the rank's loss has the row's weight, 0.8^k too, and its
class weights are scaled to a mean of 1; the head is the target's own, frozen, unless `vocabulary` is given; W begins as
the identity on h_k; the cost decides how many blocks are drafted, where the paper's bandit decides when to train.

Use it where training may take long: after as many steps more is accepted than of EAGLE-3, and a step takes four times
as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from transformers import DynamicCache

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState, Scores
from outrider.lab.blocks_by_cost import BlocksByCost
from outrider.lab.rank_tree import WIDTHS, Offers, Path, doubt, levels, likeliest, positions
from outrider.method import Method
from outrider.nn.blocks import ContextLayer, FusedTaps, RMSNorm, Shift, attending, rollout_mask, rotary
from outrider.nn.draft_model import Batch
from outrider.nn.drafting import serving, trees
from outrider.nn.heads import RankHead, ReducedHead, VocabularyModel, class_weights, rank_class, rank_loss
from outrider.nn.memory import FeatureMemory, PairDrafter
from outrider.nn.rows import RowLabels, SharedLabels, pair_mask, sample_anchors, whole_blocks
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
"""First blocks in one pass of training; with more, more attention between them is masked and wasted."""


class Config(LayerConfig):
    kind: Literal["specblock"] = "specblock"
    slots: PositiveInt = 4
    """Tokens drafted by one block."""
    blocks: PositiveInt = 2
    """Blocks trained, and drafted, one after another."""
    choose_blocks: bool = False
    """Draft as many blocks in each step as pay by the seconds measured and by what was accepted; no: all of them."""
    nodes: PositiveInt = 60
    """Most tokens of a draft, per step."""
    layers: PositiveInt = 2
    """Decoder layers of the draft model."""
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; three, low, middle and high, unless given."""
    vocabulary: PositiveInt | None = None
    """Number of tokens, the most frequent, that it can draft, by its own head; unless given all, by the target's."""
    init_from_layers: InitLayers = None
    anchors: PositiveInt = 512
    """Most positions drafted from per text and step in training."""
    decay: PositiveFloat = 0.8
    """Weight of a slot in training relative to the one before it in its block: slot k weighs decay^k."""


class Model(VocabularyModel, FusedTaps):
    """Takes a feature and a token; returns K states, and heads' outputs of them."""

    rows_are_independent = False  # classes of ranks weigh by how often they are in the batch

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

    def first(self, features: Tensor, tokens: Tensor, at: Tensor, mask: Tensor, asked: Tensor, cache: Any) -> Tensor:
        """States [B, A, K, H] of first blocks of the pairs `asked` [B, A], as `forward` gives them for blocks of all
        pairs, at positions `at` [B, n].

        These attend to the other blocks, which pass too, up to the last layer's keys and values.
        mask [B, 1, n * K, n * K] hides everything after its row.
        """
        x, step = self._rows(features, tokens), self.config.slots * CHUNK
        cos_sin = rotary(self._positions(at), self.shape)
        *lower, last = self.layers
        assert isinstance(last, ContextLayer)
        for i, layer in enumerate(lower):
            parts = zip(self._shifted(i, x).split(step, 1), cos_sin.split(step, -2), mask.split(step, 2), strict=True)
            prefixes = [
                (part, own, attending(rows_mask[..., : n * step], cache))
                for n, (part, own, rows_mask) in enumerate(parts, 1)
            ]
            x = torch.cat([layer(part, own, attend, i) for part, own, attend in prefixes], 1)
        x = self._shifted(len(lower), x)
        rows = (self.config.slots * asked[..., None] + torch.arange(self.config.slots, device=asked.device)).flatten(1)
        texts = torch.arange(len(rows), device=rows.device)[:, None]
        own = rotary(self._positions(at.gather(1, asked)), self.shape)
        normed, attend = last.input_layernorm(x), attending(mask[texts, 0, rows][:, None], cache)
        x = x[texts, rows] + last.self_attn(normed[texts, rows], own, attend, len(lower), normed, cos_sin)
        return self.norm(x + last.mlp(last.post_attention_layernorm(x))).unflatten(1, (-1, self.config.slots))

    def _rows(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Input of the first layer, [B, n * K, H]."""
        words = self.word_norm(self.target.embed(tokens).to(features.dtype))
        given = torch.cat([self.cond_norm(features), words], -1)[:, :, None].expand(-1, -1, self.config.slots, -1)
        queries = self.query_norm(self.queries.to(features.dtype)).expand(*given.shape[:-1], -1)
        return self.fuse(torch.cat([given, queries], -1)).flatten(1, 2)

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


class Memory(FeatureMemory):
    """With the blocks of the step that is open, and what they cost."""

    def __init__(self, slots: int, length: int, layers: int, model: Model):
        super().__init__(slots, length, layers, model)
        self.costs = BlocksByCost(model.config.blocks) if model.config.choose_blocks else None
        self.levels: list[list[int]] = []
        """Which block each drafted node is of, by slot."""


class SpecBlock(PairDrafter):
    """Drafts a tree at temperature 0 where the target verifies trees, else a chain of blocks."""

    def __init__(self, model: Model):
        self.config, self.longest = model.config, model.config.slots * model.config.blocks
        chain = min(self.longest, self.config.nodes)
        self.has_trees = serving.verifies_trees(model.target, "specblock", f"chains of at most {chain}")
        super().__init__(model, self.config.nodes if self.has_trees else chain, self.longest + 1)

    def allocate(self, cache: Cache) -> Memory:
        # besides the text: what a step brings, and later blocks for every candidate
        count = cache.length + self.longest + 1 + max(WIDTHS) * (self.config.blocks - 1)
        return Memory(cache.slots, count * self.config.slots, self.config.layers, self.model)

    def draft(self, memory: Memory, state: DecodeState, sizes: Tensor) -> Draft:
        costs, cache = memory.costs, memory.kv_cache
        count = self.config.blocks if costs is None else costs.begin()

        def lapped(blocks: Blocks) -> Blocks:
            if costs is not None:
                costs.lap(state.device)
            return blocks

        def go_on(*at: Any) -> Blocks:
            return lapped(self._next(cache, *at))

        first = lapped(self._first(memory, state))
        lengths = [cache.lengths[row] for row in state.rows]
        if state.judge.temperature is None and not state.judge.bans and self.has_trees:
            draft = self._tree(memory, first, go_on, sizes, count)
        else:
            longest = self.config.slots * count
            draft = self._chain(first, go_on, sizes.clamp(max=longest), state)
            memory.levels = [[n // self.config.slots for n in range(longest)]] * len(lengths)
        for row, length in zip(state.rows, lengths, strict=True):  # later blocks are forgotten
            cache.lengths[row] = length
        return draft

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        super().observe(memory, state, draft, accepted, scores)
        if memory.costs is None or not memory.levels:
            return
        numbers = [list(range(size)) for size in draft.live] if draft.origin is None else draft.origin.tolist()
        ended = enumerate(zip(accepted.paths, accepted.next_tokens, strict=True))
        # a slot that ended inside its block did not show what it would have accepted
        found = [[memory.levels[b][numbers[b][n]] for n in path] for b, (path, following) in ended if following >= 0]
        memory.costs.learn(found, state.timing.draft + state.timing.verify + state.timing.other)
        memory.levels = []

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        self._read(memory, [row], state, leave=1)

    def _read(
        self, memory: FeatureMemory, rows: Sequence[int], state: DecodeState, leave: int
    ) -> tuple[Tensor, Tensor]:
        """Read buffered pairs.  Returns the states of each slot's last one, [B, K, H], and its position, [B]."""
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
        own = (number[:, None] // slots == number // slots) & (number[:, None] >= number)
        mask = cache.mask(own[None], self.model.dtype)
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

    def _tree(self, memory: Memory, first: Blocks, go_on: GoOn, sizes: Tensor, count: int) -> Draft:
        """The likeliest paths of all blocks: each block's likeliest tokens, and more blocks after the best tokens of
        its first unsure slot."""
        blocks = first
        stems: list[list[Path]] = [[[]] for _ in first.rows]
        paths: list[list[tuple[int, Path]]] = [[] for _ in first.rows]
        for number in range(count):
            best = log_probs(blocks.logits).topk(min(max(WIDTHS), blocks.logits.shape[-1]), -1)
            offers = Offers(*doubt(self._ranks(blocks)), best.indices, best.values)
            for own, chains in zip(paths, offers.chains(stems), strict=True):
                own += [(number, chain) for chain in chains]
            leaves = offers.leaves(stems)
            if number + 1 == count or int(sizes.max()) < 2 or not any(leaves):
                break
            stems = [[leaf.path for leaf in own] for own in leaves]
            blocks = go_on(blocks, *(x.to(first.at.device) for x in positions(leaves)))
        found = [likeliest([path for _, path in own], size) for own, size in zip(paths, sizes.tolist(), strict=True)]
        if memory.costs is not None:
            memory.levels = [levels(*nodes, own) for nodes, own in zip(found, paths, strict=True)]
        return trees.of_lists([own for own, _ in found], [parents for _, parents in found], first.logits.device)

    def _ranks(self, blocks: Blocks) -> Tensor:
        """Rank classes, [B, W, K]."""
        found: Tensor = self.model.rank_head(blocks.states, blocks.logits).argmax(-1)
        return found


GoOn = Callable[..., Blocks]
"""`_next` on the cache of the step."""


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows(SharedLabels):
    """Predictions of blocks after drawn pairs: block b of pair i begins after m_1 + ... + m_{b-1} tokens, each m drawn.

    Every block has all rows that have a label, whatever is drafted; those after a wrong slot weigh 0.
    """

    def __init__(self, model: Model, batch: Batch):
        config, device = model.config, batch.tokens.device
        anchors = sample_anchors(batch, config.anchors, 2, config.blocks * config.slots)
        # on the CPU, whose random state a checkpoint stores
        taken = torch.randint(1, config.slots + 1, (config.blocks - 1,)).tolist()
        states = rollout(model, batch, anchors.at, taken)
        begins = torch.tensor([sum(taken[:b]) for b in range(config.blocks)], device=device)
        depths = begins[:, None] + torch.arange(config.slots, device=device)
        learnt = anchors.loss_mask[..., depths]
        where = learnt.nonzero().unbind(-1)
        text, pair, number, slot = where
        labels_at = anchors.labels_at[..., depths][where]
        block = (text * anchors.at.shape[1] + pair) * config.blocks + number
        rows = RowLabels.of(batch, text, labels_at, torch.ones_like(block), depths[number, slot], block)
        super().__init__(model, states[where], batch.final, rows)
        is_right, self.ranks = self._looked_at()
        right = torch.ones_like(learnt)
        right[where] = is_right
        counts = F.pad(right[..., :-1], (1, 0), value=True).long().cumprod(-1)
        self.weight = counts[where] * torch.as_tensor(config.decay, device=device) ** slot
        self.class_weights = class_weights(self.ranks[self.weight > 0])

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        found = self.model.rank_head(self.states[rows].detach(), draft.detach())
        true = self.ranks[rows]
        return {"rank": rank_loss(found.float(), true) * self.class_weights[true]}

    @torch.no_grad()
    def _looked_at(self) -> tuple[Tensor, Tensor]:
        """Which rows' likeliest token is the text's, [M] bool, and the class of the target's choice, [M]."""
        right, ranks = [self.labels[:0].bool()], [self.labels[:0]]
        for part in whole_blocks(self.block, max(1, 2**22 // self.vocabulary)):
            draft = self.model.logits(self.states[part])
            right.append(draft.argmax(-1) == self.labels[part])
            ranks.append(rank_class(draft, self.target_logits(part).argmax(-1)))
        # older torch would reuse the head's weights, cast here without a gradient, for the loss
        torch.clear_autocast_cache()
        return torch.cat(right), torch.cat(ranks)


def rollout(model: Model, batch: Batch, at: Tensor, taken: Sequence[int]) -> Tensor:
    """States [B, A, blocks, K, H]: every pair's first block, then those after the drawn pairs.

    Block b + 2 continues slot taken[b] - 1 of the one before, with the text's own token.
    """
    slots, length = model.config.slots, batch.tokens.shape[1] - 1
    text_mask, cache = pair_mask(batch.documents), DynamicCache()
    every = torch.arange(length, device=at.device).expand(len(at), -1)
    mask = rollout_mask(text_mask, every, [], slots)[:, None]
    fused, first = model.fused(batch.taps[:, :-1]), batch.tokens[:, 1:]
    found = [model.first(fused, first, batch.positions[:, :-1], mask, at, cache)]
    for b, count in enumerate(taken):
        later = sum(taken[: b + 1])
        tokens = batch.tokens.gather(1, (at + later + 1).clamp(max=length))
        positions = batch.positions.gather(1, at) + later
        mask = rollout_mask(text_mask, at, taken[: b + 1], slots)[:, None]
        found.append(model(found[-1][:, :, count - 1], tokens, positions, mask, cache))
    return torch.stack(found, 2)
