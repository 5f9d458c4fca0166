"""What drafters share that feed their own output back: EAGLE's heads (arXiv 2401.15077, 2406.16858, 2503.01840) and MTP.

A step module reads pairs, at rotary position i the target's feature of position i and token i + 1, with causal attention over
the pairs before, and says what follows token i + 1.  Drafting goes on from there: the drafted token with the module's own
output in the feature's place, at position i + 1, and so on.  Keys of pairs stay; those of drafted tokens are forgotten with the
draft, since their features were guesses.

Where there are several modules, module m reads token i + 1 + m and, in the feature's place, what module m - 1 said of the token
before (DeepSeek-V3, arXiv 2412.19437).  So every module reads every token of a text but its first m + 1, and drafted tokens
are read by all modules that have to guess from them.  Behind the last module its own output goes on.

Training unrolls the same steps at every position of a text (EAGLE-3's training-time test).  The rollout of position i sees in
step s what its twin sees when served: pairs up to i of its own text, and its own steps 1 to s.

B slots or texts, n positions, K steps, D modules, H hidden size, V vocabulary, h heads, d head size, E drafted nodes read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from outrider import packed
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState
from outrider.nn import serving
from outrider.nn.blocks import Attention, angles, rotate
from outrider.nn.draft_model import Batch, DraftModel, chosen, labelled
from outrider.nn.pairs import PairMemory
from outrider.nn.rows import Labelled, SharedLabels
from outrider.nn.shape import LayerConfig
from outrider.targets.attention_mask import Limit
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import LayerSizes

READ = 512
"""Most pairs of one slot read in one pass."""
ROWS = 128
"""Rollouts that attend together in training: more of them see more of each other's keys in vain."""


class Attend(Protocol):
    """What a step module asks for its attention."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """q [B, h, n, d], k and v [B, kv heads, n, d] to the attention's output [B, h, n, d]; keys and values are noted.

        Layers are counted through all modules of a model.  sinks as in `attention`.
        """


class RecurrentConfig(LayerConfig):
    """What every drafter of this kind can set."""

    length: PositiveInt = 5
    """Tokens drafted per step; levels of a tree."""
    width: PositiveInt = 1
    """Children a node may have; above 1 the draft is a tree: the likeliest paths at temperature 0, drawn siblings else."""
    nodes: PositiveInt = 16
    """Nodes of a tree; a chain has `length`."""
    replacement: bool = False
    """Draw the siblings of a tree independently; by default a younger one is none of its elders, and more are kept."""
    ttt: PositiveInt = 7
    """Steps unrolled in training."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Step s weighs decay ** s in training."""
    anchors: PositiveInt | None = None
    """Most rollouts trained per text and step; all unless given.  Fewer spare the head, which is most of a step's work."""


class RecurrentModel(DraftModel):
    """A draft model of step modules: served by `RecurrentDrafter`, trained by `UnrolledRows`."""

    shape: LayerSizes
    taps: tuple[int, ...] = ()
    """Target layers its features are made of; () takes the hidden state after the final norm."""
    num_modules = 1
    """Step modules with weights of their own: step s takes module min(s, num_modules - 1)."""
    limits: Sequence[Limit | None] = (None,)
    """How far each module sees."""

    def features(self, seen: Tensor) -> Tensor:
        """What was seen, [B, n, T, H], as a step module takes it: [B, n, H]."""
        return seen.flatten(-2).to(self.dtype)

    def turn(self, positions: Tensor) -> Tensor:
        """What `step` is given as `angle`, for positions [B or 1, n] of pairs."""
        return angles(positions, self.shape)

    @abstractmethod
    def step(self, module: int, words: Tensor, features: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        """words, features [B, n, H] to what the next step takes for features, [B, n, H].  angle as `turn` gives it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """What a step gave, [..., H], to logits [..., V]."""
        return self.target.head(hidden)

    def predict(self, batch: Batch) -> UnrolledRows:
        return UnrolledRows(self, batch, self.features(self.seen(batch)))

    def drafter(self) -> RecurrentDrafter:
        return RecurrentDrafter(self)


class RecurrentAttention(Attention):
    """Self-attention that leaves to its caller what is seen.

    gated: sigmoid(W x + b) scales every number of every head before o_proj, x being the layer's input.
    """

    def __init__(self, width: int, hidden: int, shape: LayerSizes, qk_norm: bool = False, gated: bool = False):
        """width: of the input; hidden: of the output."""
        super().__init__(hidden, shape, width)
        if not qk_norm:
            self.q_norm = self.k_norm = nn.Identity()  # type: ignore[assignment]
        self.gate = nn.Linear(width, shape.heads * shape.head_dim) if gated else None

    def forward(self, x: Tensor, angle: Tensor, attend: Attend, layer: int) -> Tensor:  # type: ignore[override]
        """x [B, n, width]; returns [B, n, H]."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))).transpose(1, 2), angle)
        out = attend(q, *self.keys_values(x, angle), layer).transpose(1, 2).flatten(2)
        return self.o_proj(out if self.gate is None else out * self.gate(x).sigmoid())


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Scaled dot products, kv heads shared out over query heads.

    sinks [h]: logits of one more key of every head, whose value is nothing (gpt-oss, MiMo-V2).
    """
    if sinks is not None:
        mask = q.new_zeros(1, 1, 1, k.shape[2]) if mask is None else mask
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        mask = mask.expand(len(q), q.shape[1], q.shape[2], -1)
        mask = torch.cat([mask, sinks.to(mask.dtype).view(1, -1, 1, 1).expand_as(mask[..., :1])], -1)
        k, v = (F.pad(one, (0, 0, 0, 1)) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Memory(PairMemory):
    """Pairs that wait, the last one known always among them: its pass gives the first drafted token."""

    def __init__(self, slots: int, length: int, model: RecurrentModel):
        target, modules = model.target, model.num_modules
        super().__init__(slots, length, modules, model)
        self.said = torch.zeros(slots, modules * target.spec.hidden, device=target.device, dtype=model.dtype)
        """[slots, D * H]: what all modules said of the last pair read, side by side; 0 before the first."""


class RecurrentDrafter(serving.FeatureDrafter):
    """Drafts a chain or a tree, feeding a step module its own output."""

    def __init__(self, model: RecurrentModel):
        self.model, self.branching = model, serving.Branching(serving.allowed(model.config, model.target))
        self.limit = self.branching.limit
        super().__init__(model, self.limit + 1)

    def allocate(self, cache: Cache) -> Memory:
        # besides the text's pairs: drafted tokens that are read, and columns where slots bring unequal numbers of pairs
        room = self.limit + 1 + max(self.limit, self.branching.width * self.model.config.length)
        return Memory(cache.slots, cache.length + room, self.model)

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        sizes = memory.waiting.within(state.rows, budget)
        if not int(sizes.max()):
            return Draft.empty(len(state.rows), state.device)
        self.catch_up(memory, state.rows, state)
        with packed.products():
            self._read(memory, state.rows, state)
            rollout = Rollout(self.model, memory.kept, state.rows, memory.said[state.rows])
            try:
                first = self.model.logits(rollout.hidden[:, 0, : self.hidden])
                draft = self.branching.draft(first, rollout.read_one, rollout.expand, sizes, state)
                return serving.possible(draft, state)
            finally:
                rollout.forget()

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        memory.said[list(rows)] = 0

    def read(self, memory: Memory, row: int, state: DecodeState) -> None:
        while (waiting := memory.waiting.count(row)) > self.most:
            self._read(memory, [row], state, leave=max(1, waiting - READ))

    def _read(self, memory: Memory, rows: Sequence[int], state: DecodeState, leave: int = 0) -> None:
        """Read all pairs of these slots that wait, but for the last `leave`."""
        kept, model = memory.kept, self.model
        seen, tokens, counts = memory.waiting.pairs(rows, state, leave)
        kept.open(rows, tokens.shape[1])
        at = kept.positions()
        words, features, angle = model.target.embed(tokens), model.features(seen), model.turn(at)
        before = memory.said[list(rows)][:, None].chunk(model.num_modules, -1)
        found: list[Tensor] = []
        for module in range(model.num_modules):
            if module:  # what the module before said of the token before
                features = torch.cat([before[module - 1], found[-1][:, :-1]], 1)
            found.append(model.step(module, words, features, angle, _looking(kept, _mask(model, kept, module, at))))
        kept.append(counts)
        read = [b for b, count in enumerate(counts) if count]
        memory.said[[rows[b] for b in read]] = torch.cat(found, -1)[read, [counts[b] - 1 for b in read]]


class Rollout:
    """Drafted tokens behind the pairs that some slots have read.  Their keys stand behind the pairs' until `forget`."""

    def __init__(self, model: RecurrentModel, kept: SlotCache, rows: Sequence[int], root: Tensor):
        """root [B, D * H]: what the modules said of each slot's last token."""
        self.model, self.kept, self.rows = model, kept, rows
        self.starts = [kept.lengths[row] for row in rows]
        self.hidden = root[:, None]
        """[B, 1 + E, D * H] outputs: of the last token, and of drafted nodes in the order they were read.

        A module that has no more to guess from a node reads it no more: there stands what it said of an earlier one.
        """
        self.chain: list[Tensor] = []
        self._step = 0

    def read_one(self, tokens: Tensor) -> Tensor:
        """Read one more token of a chain in every slot, [B]; logits [B, V] behind it."""
        self.chain.append(tokens)
        ids = torch.stack(self.chain, 1)
        return self.expand(Draft.chain(ids, torch.full((len(ids),), ids.shape[1])), 1)[:, 0]

    def expand(self, tree: Draft, fresh: int) -> Tensor:
        """As `trees.Expand`."""
        model, kept, nodes = self.model, self.kept, tree.tokens.shape[1]
        self._step += 1
        first = min(self._step, model.num_modules - 1)
        above = tree.parents[:, -fresh:, None] + 1
        before = self.hidden.gather(1, above.expand(-1, -1, self.hidden.shape[-1])).chunk(model.num_modules, -1)
        self._stand(0)
        kept.open(self.rows, nodes)
        at = kept.positions(torch.full((1, fresh), self._step - 1, device=kept.device))
        masks = {module: _mask(model, kept, module, at, tree) for module in range(first, model.num_modules)}
        self._stand(nodes - fresh)
        kept.open(self.rows, fresh)
        words, angle, found = model.target.embed(tree.tokens[:, -fresh:]), model.turn(at), list(before)
        for module, mask in masks.items():
            # behind the last module goes on what it said itself
            features = before[module - 1 if self._step < model.num_modules else module]
            found[module] = model.step(module, words, features, angle, _looking(kept, mask))
        self.hidden = torch.cat([self.hidden, torch.cat(found, -1)], 1)
        return model.logits(found[first])

    def forget(self) -> None:
        """No drafted token was read."""
        self._stand(0)

    def _stand(self, behind: int) -> None:
        for row, start in zip(self.rows, self.starts, strict=True):
            self.kept.lengths[row] = start + behind


def _looking(kept: SlotCache, mask: Tensor | None) -> Attend:
    """Attention over all that the open pass of `kept` may look at."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        return attention(q, *kept.update(k, v, layer), mask, sinks)

    return attend


def _mask(model: RecurrentModel, kept: SlotCache, module: int, at: Tensor, tree: Draft | None = None) -> Tensor | None:
    """What the open pass's last n rows, at positions `at` [R or 1, n], may see: additive [R or 1, 1, n, end]; None: all.

    The pass is of all nodes of a tree, or of pairs.  Module m can't know the first m pairs.
    """
    limit, is_chain = model.limits[module], tree is None or not tree.branches
    if limit is None and not module and is_chain and at.shape[1] == 1 and kept.is_even:
        return None
    sees = depths = None
    if tree is not None and tree.branches:
        sees, depths = tree.rows()
        sees, depths = sees[:, 1:, 1:], depths[:, 1:] - 1
    mask = kept.masks(sees, model.dtype, {"": limit}, depths)[""][:, :, -at.shape[1] :]
    # what stands among the first itself may see them: a row that sees nothing would be NaN
    unknown = (torch.arange(mask.shape[-1], device=mask.device) < module) & (at >= module)[:, None, :, None]
    return mask.masked_fill(unknown, -torch.inf) if module else mask


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class UnrolledRows(SharedLabels):
    """Predictions of rollouts from every position of a batch: K rows a rollout, row s labelled with token i + 2 + s.

    Step s reads token i + 1 + s and the output of step s - 1, in step 0 the target's feature of position i; the gradient goes
    through all steps.  Rollouts that learn nothing, or that `anchors` leaves out, have no rows.
    """

    def __init__(
        self, model: RecurrentModel, batch: Batch, features: Tensor,
        terms: Callable[[Tensor, Tensor], Mapping[str, Tensor]] | None = None,
    ):  # fmt: skip
        """features [B, S, H].  terms: (outputs, the target's hidden states where the label is said) [m, H] each, to `extra`."""
        config, device = model.config, batch.tokens.device
        self.model, self._terms = model, terms
        at = torch.arange(max(1, batch.tokens.shape[1] - 2), device=device).expand(len(batch.tokens), -1)
        labels_at, learnt = labelled(batch, at, 2, config.ttt)
        live = chosen(learnt[..., 0], config.anchors)
        if model.num_modules == 1:  # else a deeper module reads what the one before it said at every place
            first = foremost(live)
            at, live = at.gather(1, first), live.gather(1, first)
            labels_at, learnt = (x.gather(1, first[..., None].expand(-1, -1, config.ttt)) for x in (labels_at, learnt))
        weight = learnt[live] * config.decay ** torch.arange(config.ttt, device=device)
        rows = Labelled.blocks(batch, live.nonzero()[:, 0], labels_at[live], weight)
        super().__init__(model.target, unrolled(model, batch, features, at)[live].flatten(0, 1), batch.hidden, rows)

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self.model.logits(states)

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {} if self._terms is None else self._terms(self.states[rows], self._hidden[self._hidden_at[rows]])


def foremost(live: Tensor) -> Tensor:
    """Places of what is live in every text, [B, A] ascending, A that of the text with most; others fill up.  live [B, n]."""
    most = max(1, int(live.sum(1).max()))
    order = live.long().sort(dim=1, descending=True, stable=True).indices
    return order[:, :most].sort(1).values


def unrolled(model: RecurrentModel, batch: Batch, features: Tensor, at: Tensor) -> Tensor:
    """Outputs of all steps of the rollouts at positions `at` [B, A], [B, A, K, H].  features [B, S, H]."""
    config, length = model.config, batch.tokens.shape[1]
    every = torch.arange(max(1, length - 2), device=features.device).expand(len(features), -1)
    attend = Unrolled(batch.documents, every, at, model.limits)

    def step(number: int, hidden: Tensor, rows: Tensor) -> Tensor:
        words = model.target.embed(batch.tokens.gather(1, (rows + 1 + number).clamp(max=length - 1)))
        return model.step(min(number, model.num_modules - 1), words, hidden, model.turn(rows + number), attend)

    pairs = step(0, features[:, : every.shape[1]], every)
    states = [pairs.gather(1, at[..., None].expand(-1, -1, pairs.shape[-1]))]
    for number in range(1, config.ttt):
        states.append(step(number, states[-1], at))
    return torch.stack(states, 2)


class Unrolled:
    """Attention of unrolled steps.  What a layer sees first is the pairs; each later call is one more step of every rollout."""

    def __init__(self, documents: Tensor, pairs: Tensor, at: Tensor, limits: Sequence[Limit | None] = (None,)):
        """documents [B, S] as in `Batch`; positions of pairs [B, n] and of rollouts [B, A]; how far each layer sees."""
        self.documents, self._pairs, self._at, self._limits = documents, pairs, at, limits
        # fetched once: every layer and step asks
        self._ends = [[int(part.max()) + 1 for part in rows.split(ROWS, 1)] for rows in (pairs, at)]
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        kept = self._kept.setdefault(layer, [])
        kept.append((k, v))
        limit, found = self._limits[layer], []
        rows, ends = (self._pairs, self._ends[0]) if len(kept) == 1 else (self._at, self._ends[1])
        for begin in range(0, q.shape[2], ROWS):
            asks = rows[:, begin : min(begin + ROWS, q.shape[2])]
            end = min(ends[begin // ROWS], kept[0][0].shape[2])
            keys, values = (
                torch.cat([first[:, :, :end], *(own[:, :, begin : begin + ROWS] for own in others)], 2)
                for first, *others in zip(*kept, strict=True)
            )
            mask = unrolled_mask(self.documents, asks, end, len(kept) - 1, None if limit is None else limit.size)
            found.append(attention(q[:, :, begin : begin + ROWS], keys, values, mask, sinks))
        return torch.cat(found, 2)


def unrolled_mask(documents: Tensor, rows: Tensor, end: int, steps: int, window: int | None = None) -> Tensor:
    """What rollouts at positions `rows` [B, a] may see in step `steps`: [B, 1, a, end + steps * a] bool.

    Columns are the pairs 0..end - 1, then for each step from 1 on these rollouts' own keys.  documents [B, S].
    window: positions that are seen at most, their own included.
    """
    at, asks = torch.arange(end, device=documents.device), rows[..., None]
    pairs = (at <= asks) & (documents.gather(1, rows)[..., None] == documents[:, None, :end])
    own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).repeat(1, steps).expand(len(rows), -1, -1)
    if window is not None:
        back = torch.arange(steps - 1, -1, -1, device=documents.device).repeat_interleave(rows.shape[1])
        pairs, own = pairs & (asks + steps - at < window), own & (back < window)
    return torch.cat([pairs, own], -1)[:, None]
