"""Drafters that feed their own output back: EAGLE's heads (arXiv 2401.15077, 2406.16858, 2503.01840) and MTP.

A step module reads pairs (at rotary position i, the target's feature of position i and token i + 1) with causal
attention over earlier pairs, and predicts token i + 2.  The next step reads the drafted token with the module's own
output in place of the feature, at position i + 1, and so on.  Keys of pairs are kept; those of drafted tokens are
dropped with the draft, since their features were predictions.

With several modules, module m reads token i + 1 + m and, in place of the feature, the output of module m - 1 for the
token before (DeepSeek-V3, arXiv 2412.19437).  So module m reads every token of a text except the first m + 1, and
drafted tokens are read by all modules that predict from them.  After the last module its own output is fed back.

Training unrolls the same steps at every position of a text (EAGLE-3's training-time test).  In step s the rollout of
position i attends to the same rows as in serving: pairs up to i of its text, and its own steps 1 to s.

B slots or texts, n positions, K steps, D modules, H hidden size, V vocabulary, h heads, d head size, E drafted nodes
read.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from outrider.decoding.draft import Draft, to_device
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState
from outrider.fast.static.step import StaticDrafter
from outrider.nn.blocks import Attend, attending, attention, rotary
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.drafting import serving
from outrider.nn.drafting.static_rollout import StaticChain, StaticTree
from outrider.nn.memory import FeatureMemory, PairDrafter
from outrider.nn.rows import SharedLabels, rollouts
from outrider.nn.shape import LayerConfig
from outrider.targets.cache.attention_mask import AttentionLimit
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import LayerSizes

READ = 512
"""Maximum number of pairs of one slot read in one pass."""
ROWS = 128
"""Rollouts per attention call in training; more would compute more masked scores."""


class RecurrentConfig(LayerConfig):
    """Settings of every drafter of this kind."""

    length: PositiveInt = 5
    """Tokens drafted per step; levels of a tree."""
    width: PositiveInt = 1
    """Maximum number of children of a node; above 1 the draft is a tree, of the likeliest paths at temperature 0 or of
    drawn siblings."""
    nodes: PositiveInt = 16
    """Number of nodes of a tree; a chain has `length`."""
    replacement: bool = False
    """Sample the siblings of a tree with replacement; no: without, so that more are accepted."""
    ttt: PositiveInt = 7
    """Steps unrolled in training."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of a step in training relative to the previous step: step s has weight decay ** s."""
    anchors: PositiveInt | None = None
    """Maximum number of rollouts trained per text and step; by default all.  Fewer rollouts save time in the head,
    which is most of a step's work."""


class RecurrentModel(DraftModel):
    """A draft model of step modules: served by `RecurrentDrafter`, trained by `UnrolledRows`."""

    shape: LayerSizes
    taps: tuple[int, ...] = ()
    """Target layers its features are made of; () uses the hidden state after the final norm."""
    num_modules = 1
    """Number of step modules; step s uses module min(s, num_modules - 1)."""
    limits: Sequence[AttentionLimit | None] = (None,)
    """How far back each module attends."""

    def features(self, states: Tensor) -> Tensor:
        """The features [B, n, H] that a step module reads, from the target's states [B, n, T, H]."""
        return states.flatten(-2).to(self.dtype)

    def cos_sin(self, positions: Tensor) -> Tensor:
        """The rotary cos and sin for `step`, for positions [B or 1, n] of pairs."""
        return rotary(positions, self.shape)

    @abstractmethod
    def step(self, module: int, words: Tensor, features: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """The next step's features [B, n, H] from words and features [B, n, H]; cos_sin from the method of that
        name."""

    def guide(self, batch: Batch, at: Tensor) -> Tensor | None:
        """An additional input [B, A, H] of the rollouts from positions `at` [B, A]; None if there is none."""
        return None

    def guided(self, states: Tensor, guide: Tensor | None) -> Tensor:
        """A step's output [B, n, H] combined with the guide [B, n or 1, H] of its rollout."""
        return states

    def predict(self, batch: Batch) -> UnrolledRows:
        return UnrolledRows(self, batch, self.features(self.target_states(batch)))

    def drafter(self) -> Drafter:
        return RecurrentDrafter(self)


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Memory(FeatureMemory):
    """Unread pairs, always including the last: the pass over it gives the first drafted token."""

    outputs: Tensor
    """[slots, D * H]: outputs of all modules for the last pair read, concatenated; 0 before the first."""
    guide: Tensor | None = None
    """[slots, H], the guide of each slot's next draft; None if there is none."""


class RecurrentDrafter(PairDrafter):
    """Drafts a chain or a tree, feeding a step module its own output."""

    def __init__(self, model: RecurrentModel):
        self.branching = serving.Branching(serving.allowed(model.config, model.target))
        super().__init__(model, self.branching.limit, self.branching.limit + 1)

    def allocate(self, cache: Cache) -> Memory:
        # in addition to the text's pairs: drafted tokens that are read, and columns because slots have unequal numbers
        # of pairs
        more = self.limit + 1 + max(self.limit, self.branching.width * self.model.config.length)
        modules, target = self.model.num_modules, self.model.target
        memory = Memory(cache.slots, cache.length + more, modules, self.model)
        width = modules * target.spec.hidden
        memory.outputs = torch.zeros(cache.slots, width, device=target.device, dtype=self.model.dtype)
        return memory

    def draft(self, memory: Memory, state: DecodeState, sizes: Tensor) -> Draft:
        self._read(memory, state.rows, state)
        rows = to_device(state.rows, memory.outputs.device)
        guide = None if memory.guide is None else memory.guide[rows]
        rollout = Rollout(self.model, memory.kv_cache, state.rows, memory.outputs[rows], guide)
        try:
            first = self.model.logits(rollout.hidden[:, 0, : self.hidden])
            return self.branching.draft(first, rollout.read_one, rollout.expand, sizes, state)
        finally:
            rollout.forget()

    def static(self, memory: Memory, is_greedy: bool) -> StaticDrafter:
        assert memory.guide is None
        if self.branching.width > 1:
            return StaticTree(self, memory, self.branching, is_greedy)
        return StaticChain(self, memory, self.limit, is_greedy)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        super().free(memory, rows)
        memory.outputs[to_device(rows, memory.outputs.device)] = 0

    def read(self, memory: Memory, row: int, state: DecodeState) -> None:
        while (unread := memory.features.count(row)) > self.most:
            self._read(memory, [row], state, leave=max(1, unread - READ))

    def _read(self, memory: Memory, rows: Sequence[int], state: DecodeState, leave: int = 0) -> None:
        """Read all unread pairs of these slots except the last `leave`."""
        cache, model = memory.kv_cache, self.model
        states, tokens, counts = memory.features.take_with_tokens(rows, state, leave)
        if not tokens.shape[1]:  # a whole step has read them
            return
        cache.open(rows, tokens.shape[1])
        at = cache.positions()
        words, features, cos_sin = model.target.embed(tokens), model.features(states), model.cos_sin(at)
        at_rows = to_device(rows, memory.outputs.device)
        before = memory.outputs[at_rows][:, None].chunk(model.num_modules, -1)
        outputs: list[Tensor] = []
        for module in range(model.num_modules):
            if module:  # the previous module's output for the previous token
                features = torch.cat([before[module - 1], outputs[-1][:, :-1]], 1)
            outputs.append(
                model.step(module, words, features, cos_sin, attending(_mask(model, cache, module, at), cache))
            )
        cache.append(counts)
        read = [(b, rows[b], count - 1) for b, count in enumerate(counts) if count]
        slot, row, last = to_device(read, memory.outputs.device).view(-1, 3).unbind(-1)
        memory.outputs[row] = torch.cat(outputs, -1)[slot, last]


class Rollout:
    """Drafted tokens after the pairs that some slots have read.  Their keys follow those of the pairs until
    `forget`."""

    def __init__(
        self, model: RecurrentModel, cache: SlotCache, rows: Sequence[int], root: Tensor, guide: Tensor | None = None
    ):  # fmt: skip
        """root [B, D * H]: outputs of the modules for each slot's last token.  guide [B, H] as in `Memory`."""
        self.model, self.kv_cache, self.rows = model, cache, rows
        self.starts = [cache.lengths[row] for row in rows]
        self.guide = None if guide is None else guide[:, None]
        self.hidden = model.guided(root[:, None], self.guide)
        """[B, 1 + E, D * H], outputs for the last token and for drafted nodes in the order they were read.

        A module that does not predict from a node does not read it; its output for the node's parent is repeated.
        """
        self.chain: list[Tensor] = []
        self._step = 0

    def read_one(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token [B] of each slot's chain."""
        self.chain.append(tokens)
        ids = torch.stack(self.chain, 1)
        return self.expand(Draft.chain(ids, torch.full((len(ids),), ids.shape[1])), 1)[:, 0]

    def expand(self, tree: Draft, new: int) -> Tensor:
        """As `trees.Expand`."""
        model, cache, nodes = self.model, self.kv_cache, tree.tokens.shape[1]
        self._step += 1
        first = min(self._step, model.num_modules - 1)
        above = tree.parents[:, -new:, None] + 1
        before = self.hidden.gather(1, above.expand(-1, -1, self.hidden.shape[-1])).chunk(model.num_modules, -1)
        self._set_lengths(0)
        cache.open(self.rows, nodes)
        at = cache.positions(torch.full((1, new), self._step - 1, device=cache.device))
        masks = {module: _mask(model, cache, module, at, tree) for module in range(first, model.num_modules)}
        self._set_lengths(nodes - new)
        cache.open(self.rows, new)
        words, cos_sin, outputs = model.target.embed(tree.tokens[:, -new:]), model.cos_sin(at), list(before)
        for module, mask in masks.items():
            # after the last module its own output is fed back
            features = before[module - 1 if self._step < model.num_modules else module]
            states = model.step(module, words, features, cos_sin, attending(mask, cache))
            outputs[module] = model.guided(states, self.guide)
        self.hidden = torch.cat([self.hidden, torch.cat(outputs, -1)], 1)
        return model.logits(outputs[first])

    def forget(self) -> None:
        """Forget the drafted tokens."""
        self._set_lengths(0)

    def _set_lengths(self, drafted: int) -> None:
        for row, start in zip(self.rows, self.starts, strict=True):
            self.kv_cache.lengths[row] = start + drafted


def _mask(model: RecurrentModel, cache: SlotCache, module: int, at: Tensor, tree: Draft | None = None) -> Tensor | None:
    """Additive attention mask [R or 1, 1, n, end] of the open pass's last n rows, at positions `at` [R or 1, n]; None
    if every row attends to everything.

    The pass is over all nodes of a tree, or over pairs.  Module m lacks the first m pairs.
    """
    limit, is_chain = model.limits[module], tree is None or not tree.branches
    if limit is None and not module and is_chain and at.shape[1] == 1 and cache.is_even:
        return None
    tree_mask = depths = None
    if tree is not None and tree.branches:
        tree_mask, depths = tree.rows()
        tree_mask, depths = tree_mask[:, 1:, 1:], depths[:, 1:] - 1
    mask = cache.masks(tree_mask, model.dtype, {"": limit}, depths)[""][:, :, -at.shape[1] :]
    # the first m rows still attend to them: a row that attends to nothing would be NaN
    lacking = (torch.arange(mask.shape[-1], device=mask.device) < module) & (at >= module)[:, None, :, None]
    return mask.masked_fill(lacking, -torch.inf) if module else mask


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class UnrolledRows(SharedLabels):
    """Predictions of rollouts from every position of a batch: K rows per rollout, row s labelled with token i + 2 + s.

    Step s reads token i + 1 + s and the output of step s - 1, step 0 the target's feature of position i; the gradient
    goes through all steps.  Rollouts without trained labels, and those that `anchors` leaves out, have no rows.
    """

    def __init__(self, model: RecurrentModel, batch: Batch, features: Tensor):
        """features [B, S, H]."""
        config = model.config
        live, _, rows = rollouts(batch, config.ttt, config.anchors, config.decay)
        # a deeper module reads the output of the one before it at every position
        every = torch.arange(live.shape[1], device=live.device).expand_as(live)
        at = foremost(live) if model.num_modules == 1 else every
        states = unrolled(model, batch, features, at, model.guide(batch, at))[live.gather(1, at)]
        super().__init__(model, states.flatten(0, 1), batch.final, rows)


def foremost(live: Tensor) -> Tensor:
    """The live positions of every text, [B, A] ascending and padded with others; A is the maximum over texts.  live
    [B, n]."""
    most = max(1, int(live.sum(1).max()))
    order = live.long().sort(dim=1, descending=True, stable=True).indices
    return order[:, :most].sort(1).values


def unrolled(model: RecurrentModel, batch: Batch, features: Tensor, at: Tensor, guide: Tensor | None = None) -> Tensor:
    """Outputs [B, A, K, H] of all steps of the rollouts at positions `at` [B, A].  features [B, S, H], guide
    [B, A, H]."""
    config, length = model.config, batch.tokens.shape[1]
    every = torch.arange(max(1, length - 2), device=features.device).expand(len(features), -1)
    attend, positions = Unrolled(batch.documents, every, at, model.limits), batch.positions

    def step(number: int, hidden: Tensor, rows: Tensor) -> Tensor:
        words = model.target.embed(batch.tokens.gather(1, (rows + 1 + number).clamp(max=length - 1)))
        cos_sin = model.cos_sin(positions.gather(1, rows) + number)
        return model.step(min(number, model.num_modules - 1), words, hidden, cos_sin, attend.step(number))

    first = step(0, features[:, : every.shape[1]], every)
    states = [model.guided(first.gather(1, at[..., None].expand(-1, -1, first.shape[-1])), guide)]
    for number in range(1, config.ttt):
        states.append(model.guided(step(number, states[-1], at), guide))
    return torch.stack(states, 2)


class Unrolled:
    """Attention of unrolled steps.  Each layer's first step is over the pairs, the later ones are over the rollouts."""

    def __init__(self, documents: Tensor, every: Tensor, at: Tensor, limits: Sequence[AttentionLimit | None] = (None,)):
        """documents [B, S] as in `Batch`; positions `every` [B, n] of pairs and `at` [B, A] of rollouts; limits by
        layer."""
        self.documents, self._every, self._at, self._limits = documents, every, at, limits
        # fetched once for all layers and steps
        self._ends = [[int(part.max()) + 1 for part in rows.split(ROWS, 1)] for rows in (every, at)]
        self._cached: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        """Keys and values of every layer, by step."""

    def step(self, number: int) -> Attend:
        """Attention in this step.  Repeating a step after later ones gives the same output."""
        return functools.partial(self._attend, number)

    def _attend(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        steps = self._cached.setdefault(layer, {})
        steps.setdefault(number, (k, v))  # keep the first ones, which later steps have read
        cache = [*(steps[earlier] for earlier in steps if earlier < number), (k, v)]
        limit, outputs = self._limits[layer], []
        rows, ends = (self._every, self._ends[0]) if len(cache) == 1 else (self._at, self._ends[1])
        for begin in range(0, q.shape[2], ROWS):
            at = rows[:, begin : min(begin + ROWS, q.shape[2])]
            end = min(ends[begin // ROWS], cache[0][0].shape[2])
            keys, values = (
                torch.cat([first[:, :, :end], *(step_rows[:, :, begin : begin + ROWS] for step_rows in others)], 2)
                for first, *others in zip(*cache, strict=True)
            )
            mask = unrolled_mask(self.documents, at, end, len(cache) - 1, None if limit is None else limit.size)
            outputs.append(attention(q[:, :, begin : begin + ROWS], keys, values, mask, sinks))
        return torch.cat(outputs, 2)


def unrolled_mask(documents: Tensor, rows: Tensor, end: int, steps: int, window: int | None = None) -> Tensor:
    """Attention mask of rollouts at positions `rows` [B, a] in step `steps`: [B, 1, a, end + steps * a] bool.

    Columns are the pairs 0 to end - 1, then these rollouts' keys of each step from 1 on.  documents [B, S].  window:
    maximum number of positions that a row attends to, including its own.
    """
    at, row_at = torch.arange(end, device=documents.device), rows[..., None]
    is_before = (at <= row_at) & (documents.gather(1, rows)[..., None] == documents[:, None, :end])
    is_own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).repeat(1, steps).expand(len(rows), -1, -1)
    if window is not None:
        back = torch.arange(steps - 1, -1, -1, device=documents.device).repeat_interleave(rows.shape[1])
        is_before, is_own = is_before & (row_at + steps - at < window), is_own & (back < window)
    return torch.cat([is_before, is_own], -1)[:, None]
