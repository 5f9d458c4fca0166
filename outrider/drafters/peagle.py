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

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from outrider import packed
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import serving
from outrider.nn.blocks import ContextLayer, PairLayer, RMSNorm, SelfAttention, angles
from outrider.nn.draft_model import Batch, DraftModel, MaskToken, copy_layers, mask_token, resolve_taps, with_mask
from outrider.nn.heads import ReducedHead
from outrider.nn.pairs import PairBuffer, draw, sight
from outrider.nn.rows import DetachedRows, Labelled
from outrider.nn.shape import LayerConfig, resolved
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
    copies: tuple[NonNegativeInt, ...] | None = None
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


class Model(DraftModel):
    """Pairs and masks in, one state a row out, and a head on it."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config, self.shape = resolved(with_mask(config, target), target.spec)
        self.target, shape = target, self.shape
        self.taps = resolve_taps(config.taps, target.spec, 3)
        hidden = target.spec.hidden
        self.fc = nn.Linear(hidden * len(self.taps), hidden, bias=False)
        first = PairLayer(hidden, shape, SelfAttention(hidden, shape, 2 * hidden), config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(ContextLayer(hidden, shape) for _ in range(config.layers - 1))])
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, hidden * len(self.taps)) * 0.02)
        self.mask_token = mask_token(config.mask_token, target)
        if self.mask_token is None:
            self.mask = nn.Parameter(torch.randn(hidden) * 0.02)
        self.head = None if config.vocabulary is None else ReducedHead(target, config.vocabulary)
        if config.copies is not None:
            copy_layers(list(self.layers)[1:], config.copies, target)

    def begin(self, counts: Tensor) -> None:
        if self.head is not None:
            self.head.begin(counts)

    def facts(self) -> Mapping[str, Any]:
        return {} if self.head is None else {"draft_vocabulary": self.head.content_hash}

    def forward(
        self, taps: Tensor, tokens: Tensor, masks: int, at: Tensor, mask: Tensor | None, kept: SlotCache | None = None
    ) -> Tensor:
        """States [B, C + masks, H] of pairs and the masks behind them.

        taps [B, C, T, H] and tokens [B, C] of pairs; at [B or 1, C + masks] rotary positions; mask as the layers take it.
        """
        features = self.fc(taps.flatten(2).to(self.fc.weight.dtype))
        words = self.target.embed(tokens).to(features.dtype)
        if masks:
            empty = self.fc(self.mask_hidden).to(features.dtype)
            features = torch.cat([features, empty.expand(len(tokens), masks, -1)], 1)
            words = torch.cat([words, self._mask_word(words).expand(len(tokens), masks, -1)], 1)
        turn = angles(at, self.shape)
        x = self.layers[0](words, features, turn, mask, kept, 0)
        for i, layer in enumerate(list(self.layers)[1:], 1):
            x = layer(x, x[:, :0], turn, turn, mask, kept, i)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] of states [..., H]; -inf where a reduced vocabulary has no token."""
        return self.target.head(states) if self.head is None else self.head(states)

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> PEagle:
        return PEagle(self)

    def _mask_word(self, words: Tensor) -> Tensor:
        if self.mask_token is None:
            return self.mask.to(words.dtype)
        return self.target.embed(torch.tensor([self.mask_token], device=words.device)).to(words.dtype)


def build(config: Config, target: Target) -> PEagle:
    return Model(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()


# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Memory:
    """Keys and values of every slot's pairs, and pairs that no pass has read yet."""

    def __init__(self, slots: int, length: int, model: Model):
        self.kept = SlotCache(slots, length, model.target.device, len(model.layers))
        self.waiting = PairBuffer(slots, len(model.taps), model.target, model.fc.weight.dtype)


class PEagle(Drafter):
    """Drafts a chain a slot in one pass over the new pairs and the masks; the masks' keys are forgotten."""

    def __init__(self, model: Model):
        packed.pack(model)
        self.model = model
        self.taps, self.hidden = model.taps, model.target.spec.hidden
        self.limit = model.config.length

    def allocate(self, cache: Cache) -> Memory:
        # besides the text: masks, and as many columns again where slots bring unequal numbers of new pairs
        return Memory(cache.slots, cache.length + 2 * self.limit, self.model)

    def admit(self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        assert scores.taps is not None
        memory.waiting.admit(rows, scores.taps, lengths)
        self._settle(memory, rows, state)

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        sizes = memory.waiting.within(state.rows, budget.clamp(max=self.limit))
        if not int(sizes.max()):
            return Draft.empty(len(state.rows), state.device)
        self._settle(memory, state.rows, state)
        taps, tokens, counts = memory.waiting.pairs(state.rows, state)
        logits = self._logits(memory.kept, state.rows, taps, tokens, counts, int(sizes.max()))
        following = iter(logits.unbind(1)[1:])
        return serving.possible(serving.chain(logits[:, 0], lambda _: next(following), sizes, state), state)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        assert scores.taps is not None
        memory.waiting.observe(state.rows, scores.taps, kept)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        memory.kept.free(rows)
        memory.waiting.free(rows)

    def _logits(
        self, kept: SlotCache, rows: Sequence[int], taps: Tensor, tokens: Tensor, counts: Sequence[int], depths: int
    ) -> Tensor:
        """Read the new pairs of these slots and draft behind the last: logits [B, depths, V]."""
        new, masks, device = taps.shape[1], depths - 1, taps.device
        real = torch.tensor(counts, device=device)
        kept.open(rows, new + masks)
        order = torch.arange(new + masks, device=device)
        depth = (order - new + 1).clamp(min=0)
        at = kept.positions(torch.where(order < new, order, real[:, None] - 1 + depth))
        mask = kept.mask(visible(new, masks, real), self.model.fc.weight.dtype)
        with packed.products():
            states = self.model(taps, tokens, masks, at.clamp(min=0), mask, kept)
            own = torch.cat([(real - 1).clamp(min=0)[:, None], order[new:].expand(len(counts), -1)], 1)
            logits = self.model.logits(states.gather(1, own[..., None].expand(-1, -1, states.shape[-1])))
        kept.append(counts)
        return logits

    def _settle(self, memory: Memory, rows: Sequence[int], state: DecodeState) -> None:
        """Read what waits where it is more than a step brings, such as a prompt, but for its last pair."""
        for row in rows:
            if memory.waiting.count(row) > self.limit + 1:
                self._read(memory, row, state)

    @torch.inference_mode()
    def _read(self, memory: Memory, row: int, state: DecodeState) -> None:
        taps, tokens, [count] = memory.waiting.pairs([row], state, leave=1)
        memory.kept.open([row], count)
        mask = memory.kept.mask(None, self.model.fc.weight.dtype)
        self.model(taps, tokens, 0, memory.kept.positions(), mask, memory.kept)
        memory.kept.append([count])


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
        config, self.model = model.config, model
        drawn = draw(batch, config.anchors, config.length)
        there = conditional_drop(drawn.learnt, config.ratio, config.floor)
        extra = Masks.of(drawn.at, there)
        pairs = batch.tokens.shape[1] - 1
        at = torch.cat([torch.arange(pairs, device=extra.pair.device).expand(len(extra.pair), -1), extra.pair + extra.depth], 1)
        seen = training_sight(sight(batch.documents), extra)[:, None]
        states = model(batch.taps[:, :-1], batch.tokens[:, 1:], extra.pair.shape[1], at, seen)
        b, a, depth = there.nonzero().unbind(-1)
        row_of = torch.where(depth > 0, pairs + extra.row[b, a, depth], drawn.at[b, a])
        labels_at = drawn.labels_at[b, a, depth]
        rows = Labelled(
            batch.tokens[b, labels_at], torch.ones(len(b), device=b.device), depth, b * drawn.at.shape[1] + a,
            b * batch.tokens.shape[1] + labels_at - 1,
        )  # fmt: skip
        super().__init__(model.target, states[b, row_of], batch.hidden, rows)

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self.model.logits(states)


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


class Masks:
    """The rows at depths above 0, [B, R], those of one text side by side and padded at the end."""

    def __init__(self, pair: Tensor, depth: Tensor, row: Tensor):
        self.pair, self.depth, self.row = pair, depth, row

    @classmethod
    def of(cls, at: Tensor, there: Tensor) -> Masks:
        """at [B, A] pairs, there [B, A, D] which depths are kept.  `row` [B, A, D] says which row each of them has."""
        masks = there.clone()
        masks[..., 0] = False
        counted = masks.flatten(1).cumsum(1)
        row = (counted - 1).view(there.shape)
        width = int(counted[:, -1:].max()) if counted.numel() else 0
        pair, depth = (torch.zeros(len(at), width, dtype=torch.int64, device=at.device) for _ in range(2))
        b, a, d = masks.nonzero().unbind(-1)
        pair[b, row[b, a, d]], depth[b, row[b, a, d]] = at[b, a], d
        return cls(pair, depth, row)


def training_sight(pairs: Tensor, masks: Masks) -> Tensor:
    """What pairs and masks may look at, [B, C + R, C + R] bool; pairs [B, C, C] is what pairs see of pairs.

    A mask of depth d sees what its pair sees, and that pair's masks of depths up to d.  Padding, of depth 0, sees itself alone.
    """
    of_pairs = pairs.gather(1, masks.pair[..., None].expand(-1, -1, pairs.shape[-1])) & (masks.depth > 0)[..., None]
    same = masks.pair[:, :, None] == masks.pair[:, None, :]
    deeper = (masks.depth[:, :, None] >= masks.depth[:, None, :]) & (masks.depth > 0)[:, None, :] & (masks.depth > 0)[..., None]
    itself = torch.eye(masks.pair.shape[1], dtype=torch.bool, device=pairs.device)
    upper = torch.nn.functional.pad(pairs, (0, masks.pair.shape[1]))
    return torch.cat([upper, torch.cat([of_pairs, same & deeper | itself], -1)], 1)
