"""SpecBlock: blocks of K slots, one pass each, one behind another; a tree where the draft doubts.  (arXiv 2605.07243.)

A block stands on a feature and the token behind it: the fused taps of a position for the first, the draft's own state of the
slot that it goes on from for the next.  Slot k reads feature, token and a learnt query, at rotary position i + 1 + k, and sees
all slots of earlier positions and its own up to k.  Between two layers each slot takes in its predecessor, h_k <- W [h_k;
h_{k-1}], so that dependence runs along the block while the pass stays parallel.

A rank head says for each slot how far down the draft's ranking the target's choice will be: 1, 2-4, 5-10 or beyond.  A greedy
draft is a tree: block 1's likeliest tokens as a chain; at the first slot that is not sure of its first rank the 4 or 10 best
tokens, each continued by a block of its own, none beyond rank 10; of all that, the likeliest paths.  Drawn drafts are chains
of two blocks, q of each slot a softmax of its row.

A slot counts in training where the slots of its block before it are right (the likeliest token is the text's), by 0.8^k.

Differs from the paper: serving drafts, and training unrolls, two blocks and not three, M drawn once a batch; later blocks are
trained from `anchors` positions instead of all; the rank's loss has the row's weight, 0.8^k too, and its class weights are
scaled to a mean of 1; the head is the target's own, frozen, unless `vocabulary` is given; W begins as the identity on h_k; the
bandit that learns online is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from transformers import DynamicCache

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState
from outrider.nn import serving, trees
from outrider.nn.blocks import ContextLayer, FusedTaps, RMSNorm, attending, rotary
from outrider.nn.draft_model import Batch, copy_layers, draw, resolve_taps, sight
from outrider.nn.heads import RankHead, ReducedHead, VocabularyModel, class_weights, rank_class, rank_loss
from outrider.nn.memory import FeatureMemory, PairDrafter
from outrider.nn.rows import Labelled, SharedLabels, whole_blocks
from outrider.nn.shape import LayerConfig
from outrider.sampling.distribution import log_probs
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target

WIDTHS = (1, 4, 10, 0)
"""Tokens that go on into a second block, by the class of the slot they stand in."""
PAIRS = 64
"""First blocks that pass together in training: more of them see more of each other's keys in vain."""


class Config(LayerConfig):
    kind: Literal["specblock"] = "specblock"
    slots: PositiveInt = 4
    """Tokens drafted by one block."""
    blocks: PositiveInt = 2
    """Blocks trained one behind another; with 1, serving drafts one block too."""
    nodes: PositiveInt = 60
    """Most tokens of a draft."""
    layers: PositiveInt = 2
    """Decoder layers of the draft model."""
    taps: tuple[int, ...] | None = None
    """Target layers it sees, counted from 0; three, low, middle and high, unless given."""
    vocabulary: PositiveInt | None = None
    """Tokens a draft may hold, the most frequent, with trained rows of their own; all, by the target's head, unless given."""
    init_from_layers: tuple[NonNegativeInt, ...] | None = None
    """Target layers, one a draft layer and counted from 0, whose weights training begins with; random unless given."""
    anchors: PositiveInt = 512
    """Most positions drafted from per text and step in training."""
    decay: PositiveFloat = 0.8
    """Slot k weighs decay^k in training."""


class Shift(nn.Module):
    """h_k <- W [h_k; h_{k-1}] within a block; slot 0 stands beside itself."""

    def __init__(self, hidden: int):
        super().__init__()
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(torch.eye(hidden, 2 * hidden))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K, H]."""
        return self.proj(torch.cat([x, torch.cat([x[..., :1, :], x[..., :-1, :]], -2)], -1))


class Model(VocabularyModel, FusedTaps):
    """A feature and a token in, K states out; heads on them."""

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

    def forward(self, features: Tensor, tokens: Tensor, at: Tensor, mask: Tensor, kept: Any) -> Tensor:
        """States [B, n, K, H] of blocks on features [B, n, H] and the tokens [B, n] behind them, at positions `at` [B or 1, n].

        mask is over the n * K rows, block by block, behind what `kept` holds.
        """
        x, turn, attend = self._rows(features, tokens), rotary(self._places(at), self.shape), attending(mask, kept)
        for i, layer in enumerate(self.layers):
            x = layer(self._shifted(i, x), turn, attend, i)
        return self.norm(x).unflatten(1, (-1, self.config.slots))

    def first(self, features: Tensor, tokens: Tensor, mask: Tensor, asked: Tensor, kept: Any) -> Tensor:
        """States [B, A, K, H] of first blocks at the places `asked` [B, A], as `forward` gives them for blocks at every place.

        The other blocks are seen by these, so they pass too, but for what the last layer does with its keys and values.
        mask [B, 1, n * K, n * K] sees nothing behind its row.
        """
        x, every = self._rows(features, tokens), self._places(torch.arange(features.shape[1], device=mask.device)[None])
        turn, step = rotary(every, self.shape), self.config.slots * PAIRS
        *lower, last = self.layers
        assert isinstance(last, ContextLayer)
        for i, layer in enumerate(lower):
            parts = zip(self._shifted(i, x).split(step, 1), turn.split(step, -2), mask.split(step, 2), strict=True)
            seen_so_far = [(part, own, attending(seen[..., : n * step], kept)) for n, (part, own, seen) in enumerate(parts, 1)]
            x = torch.cat([layer(part, own, attend, i) for part, own, attend in seen_so_far], 1)
        x = self._shifted(len(lower), x)
        rows = (self.config.slots * asked[..., None] + torch.arange(self.config.slots, device=asked.device)).flatten(1)
        texts, own = torch.arange(len(rows), device=rows.device)[:, None], rotary(self._places(asked), self.shape)
        normed = last.input_layernorm(x)
        attend = attending(mask[texts, 0, rows][:, None], kept)
        x = x[texts, rows] + last.self_attn(normed[texts, rows], own, attend, len(lower), normed, turn)
        return self.norm(x + last.mlp(last.post_attention_layernorm(x))).unflatten(1, (-1, self.config.slots))

    def _rows(self, features: Tensor, tokens: Tensor) -> Tensor:
        """What enters the first layer, [B, n * K, H]."""
        words = self.word_norm(self.target.embed(tokens).to(features.dtype))
        given = torch.cat([self.cond_norm(features), words], -1)[:, :, None].expand(-1, -1, self.config.slots, -1)
        queries = self.query_norm(self.queries.to(features.dtype)).expand(*given.shape[:-1], -1)
        return self.fuse(torch.cat([given, queries], -1)).flatten(1, 2)

    def _places(self, at: Tensor) -> Tensor:
        """Rotary positions [.., n * K] of blocks at `at` [.., n]."""
        return (at[..., None] + 1 + torch.arange(self.config.slots, device=at.device)).flatten(1)

    def _shifted(self, layer: int, x: Tensor) -> Tensor:
        """x [B, n * K, H] as it enters this layer."""
        return self.shifts[layer - 1](x.unflatten(1, (-1, self.config.slots))).flatten(1, 2) if layer else x

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> SpecBlock:
        return SpecBlock(self)


build = Model.build


# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class First:
    """A first block behind the newest pair of every slot."""

    def __init__(self, rows: Sequence[int], states: Tensor, logits: Tensor, at: Tensor):
        self.rows = rows
        self.states, self.logits, self.at = states, logits, at
        """[B, K, H], [B, K, V], and where that pair stands, [B]."""


class SpecBlock(PairDrafter):
    """Drafts a tree at temperature 0, where the target verifies trees, and a chain of up to two blocks else."""

    def __init__(self, model: Model):
        self.config = model.config
        self.longest = self.config.slots * min(2, self.config.blocks)
        chain = min(self.longest, self.config.nodes)
        self.has_trees = serving.verifies_trees(model.target, "specblock", f"chains of at most {chain}")
        super().__init__(model, self.config.nodes if self.has_trees else chain, self.longest + 1)

    def allocate(self, cache: Cache) -> FeatureMemory:
        # besides the text: what a step brings, and a second block for each of the most candidates
        pairs = cache.length + self.longest + 1 + max(WIDTHS)
        return FeatureMemory(cache.slots, pairs * self.config.slots, self.config.layers, self.model)

    def draft(self, memory: FeatureMemory, state: DecodeState, sizes: Tensor) -> Draft:
        first = self._first(memory, state)
        if state.judge.temperature is None and not state.judge.bans and self.has_trees:
            return self._tree(memory.kept, first, sizes)
        return self._chain(memory.kept, first, sizes.clamp(max=self.longest), state)

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        self._read(memory, [row], state, leave=1)

    def _read(self, memory: FeatureMemory, rows: Sequence[int], state: DecodeState, leave: int) -> tuple[Tensor, Tensor]:
        """Read waiting pairs.  Returns the states of each slot's last one, [B, K, H], and where it stands, [B]."""
        kept, slots = memory.kept, self.config.slots
        taps, tokens, counts = memory.waiting.pairs(rows, state, leave)
        kept.open(rows, slots * tokens.shape[1])
        at = kept.positions()[:, ::slots] // slots
        states = self.model(self.model.fused(taps), tokens, at, kept.mask(None, self.model.dtype), kept)
        last = (torch.tensor(counts, device=at.device) - 1).clamp(min=0)
        begins = kept.starts // slots
        kept.append([slots * count for count in counts])
        return states[torch.arange(len(counts), device=at.device), last], begins + last

    def _first(self, memory: FeatureMemory, state: DecodeState) -> First:
        states, at = self._read(memory, state.rows, state, leave=0)
        return First(state.rows, states, self.model.logits(states), at)

    def _second(self, kept: SlotCache, first: First, slot: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, W, K, V] of blocks behind tokens [B, W] in slot `slot` [B] of the first; their keys are forgotten."""
        slots, width = self.config.slots, tokens.shape[1]
        kept.open(first.rows, slots * width)
        number = torch.arange(slots * width, device=tokens.device)
        own = (number[:, None] // slots == number // slots) & (number[:, None] >= number)
        mask = kept.mask(own[None], self.model.dtype)
        # the slots of the first block behind the one that it goes on from; they stand last
        behind = kept.columns - kept.starts[:, None]
        hidden = (behind < 0) & (behind >= slot[:, None] + 1 - slots)
        mask = mask.masked_fill(hidden[:, None, None], -torch.inf)
        features = first.states[torch.arange(len(slot), device=slot.device), slot][:, None].expand(-1, width, -1)
        at = (first.at + slot + 1)[:, None].expand(-1, width)
        states = self.model(features, tokens, at, mask, kept)
        kept.append([0] * len(first.rows))
        return self.model.logits(states)

    def _chain(self, kept: SlotCache, first: First, sizes: Tensor, state: DecodeState) -> Draft:
        """The first block, and a second behind its last slot."""
        slots, rows = self.config.slots, list(first.logits.unbind(1))

        def read_one(token: Tensor) -> Tensor:
            rows.pop(0)
            if not rows:
                last = torch.full_like(token, slots - 1)
                rows.extend(self._second(kept, first, last, token[:, None])[:, 0].unbind(1))
            return rows[0]

        return serving.chain(rows[0], read_one, sizes, state)

    def _tree(self, kept: SlotCache, first: First, sizes: Tensor) -> Draft:
        """The first block's likeliest tokens, and second blocks behind the best of its first slot in doubt."""
        slot, width = doubt(self.model.rank_head(first.states, first.logits).argmax(-1))
        best = log_probs(first.logits).topk(min(max(WIDTHS), first.logits.shape[-1]), -1)
        here, most = torch.arange(len(slot), device=slot.device), min(int(width.max()), best.indices.shape[-1])
        tokens, scores = best.indices[here, slot, :most], best.values[here, slot, :most]
        chains, offers = _listed(best.indices[..., 0], best.values[..., 0]), _listed(tokens, scores)
        behind: list[Path] = [[]] * tokens.numel()
        if most and self.config.blocks > 1 and int(sizes.max()) > 1:
            second = log_probs(self._second(kept, first, slot, tokens)).max(-1)
            behind = _listed(second.indices.flatten(0, 1), second.values.flatten(0, 1))
        found = []
        for b, (at, wide, size) in enumerate(zip(slot.tolist(), width.tolist(), sizes.tolist(), strict=True)):
            branches = [[*chains[b][:at], offers[b][w], *behind[b * most + w]] for w in range(min(wide, most))]
            found.append(likeliest([chains[b], *branches], size))
        return trees.of_lists([own for own, _ in found], [parents for _, parents in found], first.logits.device)


def doubt(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The slot where a draft branches, the first whose class is not 0 or else the last, and how many tokens go on there.

    ranks [B, K].
    """
    unsure = ranks != 0
    slot = torch.where(unsure.any(-1), unsure.long().argmax(-1), ranks.shape[-1] - 1)
    return slot, torch.tensor(WIDTHS, device=ranks.device)[ranks.gather(-1, slot[:, None])[:, 0]]


Path = list[tuple[int, float]]
"""Tokens from the anchor down, each with its log probability behind the one before."""


def likeliest(paths: Sequence[Path], most: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the likeliest nodes of these paths, descending.  Equal siblings are one, at the better's chance.

    A parent is never less likely than its child, so every prefix is a tree.  A token of probability 0 ends its path.
    """
    totals: dict[tuple[int, ...], float] = {}
    for path in paths:
        tokens = tuple(token for token, _ in path)
        for n, total in enumerate(accumulate(score for _, score in path), 1):
            if total == -torch.inf:
                break
            totals[tokens[:n]] = max(total, totals.get(tokens[:n], -torch.inf))
    # of equals the first found, so parents stand before their children
    nodes = sorted(totals, key=lambda node: -totals[node])[:most]
    place = {(): -1} | {node: n for n, node in enumerate(nodes)}
    return [node[-1] for node in nodes], [place[node[:-1]] for node in nodes]


def _listed(tokens: Tensor, scores: Tensor) -> list[Path]:
    """tokens, scores [n, K], row by row."""
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), scores.tolist(), strict=True)]


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows(SharedLabels):
    """Predictions of blocks behind drawn pairs: block b of pair i goes on after m_1 + ... + m_{b-1} tokens, each m drawn.

    Every block has all rows that have a label, whatever the draft says; those behind a slot that was wrong weigh 0.
    """

    def __init__(self, model: Model, batch: Batch):
        config, device = model.config, batch.tokens.device
        drawn = draw(batch, config.anchors, 2, config.blocks * config.slots)
        # on the CPU, whose random state a checkpoint keeps
        taken = torch.randint(1, config.slots + 1, (config.blocks - 1,)).tolist()
        states = rollout(model, batch, drawn.at, taken)
        begins = torch.tensor([sum(taken[:b]) for b in range(config.blocks)], device=device)
        depths = begins[:, None] + torch.arange(config.slots, device=device)
        learnt = drawn.learnt[..., depths]
        where = learnt.nonzero().unbind(-1)
        text, pair, number, slot = where
        labels_at = drawn.labels_at[..., depths][where]
        block = (text * drawn.at.shape[1] + pair) * config.blocks + number
        rows = Labelled.of(batch, text, labels_at, torch.ones_like(block), depths[number, slot], block)
        super().__init__(model, states[where], batch.hidden, rows)
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
            ranks.append(rank_class(draft, self.said(part).argmax(-1)))
        # in older torch the head's weights, as autocast cast them here without a gradient, would be used for the loss too
        torch.clear_autocast_cache()
        return torch.cat(right), torch.cat(ranks)


def rollout(model: Model, batch: Batch, at: Tensor, taken: Sequence[int]) -> Tensor:
    """States [B, A, blocks, K, H]: every pair's first block, then those behind the drawn pairs.

    Block b + 2 goes on from slot taken[b] - 1 of the one before, with the text's own token.
    """
    slots, pairs = model.config.slots, batch.tokens.shape[1] - 1
    seen, kept = sight(batch.documents), DynamicCache()
    every = torch.arange(pairs, device=seen.device).expand(len(seen), -1)
    mask = block_sight(seen, every, [], slots)[:, None]
    found = [model.first(model.fused(batch.taps[:, :-1]), batch.tokens[:, 1:], mask, at, kept)]
    for b, count in enumerate(taken):
        places = at + sum(taken[: b + 1])
        tokens = batch.tokens.gather(1, (places + 1).clamp(max=pairs))
        mask = block_sight(seen, at, taken[: b + 1], slots)[:, None]
        found.append(model(found[-1][:, :, count - 1], tokens, places, mask, kept))
    return torch.stack(found, 2)


def block_sight(pairs: Tensor, at: Tensor, taken: Sequence[int], slots: int) -> Tensor:
    """What rows of block len(taken) + 1 see of all blocks so far and their own, [B, A * K, (P + len(taken) * A) * K] bool.

    First blocks of earlier pairs whole, of their own pair's earlier blocks the slots that were taken, their own up to
    themselves.  pairs [B, P, P] says which pairs a pair sees; at [B, A], in the first block every pair.
    """
    order = torch.arange(slots, device=at.device)
    own = [*((order < count).expand(slots, -1) for count in taken), order[:, None] >= order]
    is_own = torch.arange(pairs.shape[-1], device=at.device) == at[..., None]
    before = pairs.gather(1, at[..., None].expand(-1, -1, pairs.shape[-1]))
    # [B, A, K, P, K]
    first = torch.where(is_own[:, :, None, :, None], own[0][:, None], before[:, :, None, :, None])
    same = torch.eye(at.shape[1], dtype=torch.bool, device=at.device)[:, None, :, None]
    later = [(same & seen[:, None]).expand(len(at), -1, -1, -1, -1) for seen in own[1:]]
    return torch.cat([block.flatten(3).flatten(1, 2) for block in (first, *later)], -1)
