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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from outrider import packed
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import serving, trees
from outrider.nn.blocks import RMSNorm, angles, check_heads, rotate
from outrider.nn.draft_model import Batch, chosen, picked
from outrider.nn.rows import Labelled, SharedLabels
from outrider.nn.serving import FeatureBuffer
from outrider.nn.shape import LayerConfig
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import LayerSizes, Target

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


class RecurrentModel(Protocol):
    """A draft model as this module serves and unrolls it."""

    @property
    def config(self) -> RecurrentConfig: ...

    shape: LayerSizes
    target: Target
    taps: tuple[int, ...]
    """Target layers its features are made of; () takes the hidden state after the final norm."""
    num_modules: int
    """Step modules with weights of their own: step s takes module min(s, num_modules - 1)."""

    def features(self, seen: Tensor) -> Tensor:
        """What the target said, taps [B, n, T, H] or hidden [B, n, H], as a step module takes it: [B, n, H]."""

    def step(self, module: int, words: Tensor, features: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        """words, features [B, n, H] to what the next step takes for features, [B, n, H].  angle as `blocks.angles` gives it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """What a step gave, [..., H], to logits [..., V]."""


@runtime_checkable
class OwnRotation(Protocol):
    """A model whose step modules turn by positions themselves, and may see less than all before them."""

    limits: Sequence[Any]
    """How far each module sees, None without end; else its `kind` is window and its `size` counts positions, its own too."""

    def turn(self, positions: Tensor) -> Tensor:
        """What `step` is given as `angle`, for positions [B or 1, n] of pairs."""


def turned(model: RecurrentModel, positions: Tensor) -> Tensor:
    """What the steps at these positions [B or 1, n] turn by."""
    if isinstance(model, OwnRotation):
        return model.turn(positions)
    return angles(positions, model.shape)


def limit_of(model: RecurrentModel, module: int) -> Any:
    """How far this module sees."""
    return model.limits[module] if isinstance(model, OwnRotation) else None


def module_of(step: int, model: RecurrentModel) -> int:
    """Which module takes this step, counted from 0."""
    return min(step, model.num_modules - 1)


class RecurrentAttention(nn.Module):
    """Self-attention that leaves to its caller what is seen.

    gated: sigmoid(W x + b) scales every number of every head before o_proj, x being the layer's input.
    """

    def __init__(self, width: int, hidden: int, shape: LayerSizes, qk_norm: bool = False, gated: bool = False):
        """width: of the input; hidden: of the output."""
        super().__init__()
        check_heads(shape)
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.gate = nn.Linear(width, shape.heads * shape.head_dim) if gated else None

    def forward(self, x: Tensor, angle: Tensor, attend: Attend, layer: int) -> Tensor:
        """x [B, n, width]; returns [B, n, H]."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q).transpose(1, 2), angle), rotate(self.k_norm(k).transpose(1, 2), angle)
        out = attend(q, k, v.transpose(1, 2), layer).transpose(1, 2).flatten(2)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.o_proj(out)


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


def seen_of(model: RecurrentModel, source: Batch | Scores) -> Tensor:
    """What this model looks at of a target's pass: taps [B, n, T, H], or hidden states [B, n, H] where it has no taps."""
    if not model.taps:
        return source.hidden
    assert source.taps is not None
    return source.taps


# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Pairs:
    """Keys and values of the pairs every slot has read, and features of those that wait."""

    kept: SlotCache
    waiting: FeatureBuffer
    """The last one known always waits: its pass gives the first drafted token."""
    said: list[Tensor | None]
    """Of every slot, what all modules said of the last token read, side by side [D * H]; None before the first."""


class RecurrentDrafter(Drafter):
    """Drafts a chain or a tree, feeding a step module its own output."""

    def __init__(self, model: RecurrentModel):
        assert isinstance(model, nn.Module)
        packed.pack(model)
        self.model = model
        self.taps, self.hidden = model.taps, model.target.spec.hidden
        self.width = _allowed_width(model)
        config = model.config
        self.parents = trees.shape(self.width, config.length, config.nodes) if self.width > 1 else ()
        self.limit = len(self.parents) or config.length
        self.dtype = next(model.parameters()).dtype

    def allocate(self, cache: Cache) -> Pairs:
        # besides the text's pairs: drafted tokens that are read, and columns where slots bring unequal numbers of pairs
        room = self.limit + 1 + max(self.limit, self.width * self.model.config.length)
        target, taps = self.model.target, len(self.taps)
        like = torch.empty(*([taps] if taps else []), target.spec.hidden, device=target.device, dtype=self.dtype)
        kept = SlotCache(cache.slots, cache.length + room, target.device, self.model.num_modules)
        return Pairs(kept, FeatureBuffer(cache.slots, like), [None] * cache.slots)

    def admit(self, memory: Pairs, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        memory.waiting.admit(rows, seen_of(self.model, scores), lengths)
        self._settle(memory, rows, state)

    @torch.inference_mode()
    def propose(self, memory: Pairs, state: DecodeState, budget: Tensor) -> Draft:
        rows, kept = state.rows, memory.kept
        # behind the very first token of a text there is no feature yet
        budget = budget * torch.tensor([memory.waiting.count(row) > 0 for row in rows])
        if not int(budget.max()):
            return Draft.empty(len(rows), state.device)
        self._settle(memory, rows, state)
        with packed.products():
            rollout = Rollout(self.model, kept, rows, self._last(memory, rows, state), self.dtype)
            try:
                return serving.possible(self._draft(rollout, state, budget), state)
            finally:
                rollout.forget()

    def _draft(self, rollout: Rollout, state: DecodeState, budget: Tensor) -> Draft:
        first = self.model.logits(_parts(self.model, rollout.hidden)[0][:, 0])
        if self.width == 1:
            return serving.chain(first, rollout.read_one, budget, state)
        config = self.model.config
        shape: Any = {"width": self.width, "depth": config.length, "parents": self.parents}
        return serving.tree(first, rollout.expand, budget, state, **shape, replacement=config.replacement)

    def observe(self, memory: Pairs, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        memory.waiting.observe(state.rows, seen_of(self.model, scores), kept)

    def free(self, memory: Pairs, rows: Sequence[int]) -> None:
        memory.kept.free(rows)
        memory.waiting.free(rows)
        for row in rows:
            memory.said[row] = None

    @torch.inference_mode()
    def _settle(self, memory: Pairs, rows: Sequence[int], state: DecodeState) -> None:
        """Read what waits where it is more than a step brings, such as a prompt; each slot by itself, so none is padded."""
        for row in rows:
            while (waiting := memory.waiting.count(row)) > self.limit + 1:
                self._read(memory, [row], state, *memory.waiting.take([row], [min(waiting - 1, READ)]))

    def _last(self, memory: Pairs, rows: Sequence[int], state: DecodeState) -> Tensor:
        """Read all that waits; what the modules say of each slot's last token, [B, D * H]."""
        features, counts = memory.waiting.take(rows)
        found = self._read(memory, rows, state, features, counts)
        last = torch.tensor(counts, device=found.device).clamp(min=1) - 1
        return found[torch.arange(len(rows), device=found.device), last]

    def _read(
        self, memory: Pairs, rows: Sequence[int], state: DecodeState, seen: Tensor, counts: Sequence[int]
    ) -> Tensor:  # fmt: skip
        """Read pairs of these slots, right-padded features [R, n, ...] of which counts[r] are real; outputs [R, n, D * H]."""
        kept, model, width = memory.kept, self.model, seen.shape[1]
        tokens = []
        for row, count in zip(rows, counts, strict=True):
            begin = kept.lengths[row] + 1
            tokens.append(state.tokens[row][begin : begin + count] + [0] * (width - count))
        kept.open(rows, width)
        words, features = model.target.embed(torch.tensor(tokens, device=kept.device)), model.features(seen.to(self.dtype))
        at = kept.positions()
        angle = turned(model, at)
        found: list[Tensor] = []
        for module in range(model.num_modules):
            if module:
                features = _shifted(found[-1], [memory.said[row] for row in rows], module - 1)
            found.append(model.step(module, words, features, angle, _looking(kept, self._mask(kept, width, at, module))))
        kept.append(counts)
        joined = torch.cat(found, -1)
        if model.num_modules > 1:
            for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
                if count:
                    memory.said[row] = joined[b, count - 1].clone()
        return joined

    def _mask(self, kept: SlotCache, width: int, at: Tensor, module: int) -> Tensor | None:
        """Additive, for the open pass of pairs; None: all is seen."""
        limit = limit_of(self.model, module)
        if limit is not None:
            return _without_holes(kept.masks(None, self.dtype, {"": limit})[""], at, module)
        if width == 1 and kept.is_even and not module:
            return None
        return _without_holes(kept.mask(None, self.dtype), at, module)


def _parts(model: RecurrentModel, hidden: Tensor) -> list[Tensor]:
    """What each module said, [..., H] each, of hidden [..., D * H]."""
    return list(hidden.chunk(model.num_modules, -1))


def _shifted(said: Tensor, before: Sequence[Tensor | None], module: int) -> Tensor:
    """What `module` said of the token before each, [R, n, H]; said [R, n, H], before [D * H] of each row."""
    size = said.shape[-1]
    nothing = said.new_zeros(size)
    first = [nothing if own is None else own[module * size : (module + 1) * size] for own in before]
    return torch.cat([torch.stack(first)[:, None], said[:, :-1]], 1)


def _without_holes(mask: Tensor, at: Tensor, module: int) -> Tensor:
    """The mask [R or 1, 1, Q, end] without the first pairs, which module m can't know.  at [R or 1, Q], where queries stand.

    What stands there itself may see them: a row that sees nothing would be NaN.
    """
    if not module:
        return mask
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return mask.masked_fill((columns < module) & (at >= module)[:, None, :, None], -torch.inf)


class Rollout:
    """Drafted tokens behind the pairs that some slots have read.  Their keys stand behind the pairs' until `forget`."""

    def __init__(self, model: RecurrentModel, kept: SlotCache, rows: Sequence[int], root: Tensor, dtype: torch.dtype):
        """root [B, D * H]: what the modules said of each slot's last token."""
        self.model, self.kept, self.rows, self.dtype = model, kept, rows, dtype
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
        model, kept = self.model, self.kept
        nodes = tree.tokens.shape[1]
        self._step += 1
        first = module_of(self._step, model)
        above = tree.parents[:, -fresh:, None] + 1
        before = _parts(model, self.hidden.gather(1, above.expand(-1, -1, self.hidden.shape[-1])))
        words, found = model.target.embed(tree.tokens[:, -fresh:]), list(before)
        for module in range(first, model.num_modules):
            # behind the last module goes on what it said itself
            features = before[module - 1 if self._step < model.num_modules else module]
            self._stand(0)
            kept.open(self.rows, nodes)
            at = kept.positions(torch.full((1, fresh), self._step - 1, device=kept.device))
            mask = self._mask(tree, fresh, module, at)
            self._stand(nodes - fresh)
            kept.open(self.rows, fresh)
            found[module] = model.step(module, words, features, turned(model, at), _looking(kept, mask))
        self.hidden = torch.cat([self.hidden, torch.cat(found, -1)], 1)
        return model.logits(found[first])

    def forget(self) -> None:
        """No drafted token was read."""
        self._stand(0)

    def _stand(self, behind: int) -> None:
        for row, start in zip(self.rows, self.starts, strict=True):
            self.kept.lengths[row] = start + behind

    def _mask(self, tree: Draft, fresh: int, module: int, at: Tensor) -> Tensor | None:
        """Additive, for the open pass of all nodes: pairs, ancestors and itself.  None: all is seen."""
        limit = limit_of(self.model, module)
        if limit is not None:
            sees, depths = tree.rows()
            every = self.kept.masks(sees[:, 1:, 1:], self.dtype, {"": limit}, depths[:, 1:] - 1)[""]
            return _without_holes(every[:, :, -fresh:], at, module)
        if not tree.branches and self.kept.is_even and not module:
            return None
        return _without_holes(self.kept.mask(tree.rows()[0][:, -fresh:, 1:], self.dtype), at, module)


def _looking(kept: SlotCache, mask: Tensor | None) -> Attend:
    """Attention over all that the open pass of `kept` may look at."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        return attention(q, *kept.update(k, v, layer), mask, sinks)

    return attend


def _allowed_width(model: RecurrentModel) -> int:
    """The config's width, or 1 for a target that verifies no trees."""
    config = model.config
    kind = getattr(config, "kind", "drafter")
    if config.width == 1:
        serving.warn_idle(kind, config, {"nodes": False, "replacement": False}, "on a chain; set width above 1 for a tree")
    elif not serving.verifies_trees(model.target, kind, f"a chain of {config.length}, as with width 1"):
        return 1
    return config.width


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
        config, device, length = model.config, batch.tokens.device, batch.tokens.shape[1]
        self.model, self._terms = model, terms
        at, steps = torch.arange(max(1, length - 2), device=device)[None], torch.arange(config.ttt, device=device)
        at = at.expand(len(batch.tokens), -1)
        learnt = self._learnt(batch, at, steps)
        live = chosen(learnt[..., 0] > 0, config.anchors)
        if model.num_modules == 1:  # else a deeper module reads what the one before it said at every place
            at = at.gather(1, foremost(live))
            learnt, live = learnt.gather(1, at[..., None].expand(-1, -1, len(steps))), live.gather(1, at)
        labels_at = (at[..., None] + 2 + steps).clamp(max=length - 1)
        offsets, count = torch.arange(len(live), device=device)[:, None, None] * length, int(live.sum())
        rows = Labelled(
            picked(batch.tokens, labels_at)[live].flatten(), (learnt[live] * config.decay**steps).flatten(),
            steps.repeat(count), torch.arange(count, device=device).repeat_interleave(config.ttt),
            (offsets + labels_at - 1)[live].flatten().clamp(min=0),
        )  # fmt: skip
        super().__init__(model.target, unrolled(model, batch, features, at)[live].flatten(0, 1), batch.hidden, rows)

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self.model.logits(states)

    def _learnt(self, batch: Batch, at: Tensor, steps: Tensor) -> Tensor:
        """[B, n, K] int64: the label is of the rollout's own text and one to learn, and so are those of all steps before."""
        wanted = at[..., None] + 2 + steps
        labels_at = wanted.clamp(max=batch.tokens.shape[1] - 1)
        is_own = picked(batch.documents, labels_at) == batch.documents.gather(1, at)[..., None]
        return (picked(batch.loss_mask, labels_at) & (wanted < batch.tokens.shape[1]) & is_own).long().cumprod(-1)

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
    attend = Unrolled(batch.documents, every, at, lambda layer: limit_of(model, layer))

    def step(number: int, hidden: Tensor, rows: Tensor) -> Tensor:
        words = model.target.embed(batch.tokens.gather(1, (rows + 1 + number).clamp(max=length - 1)))
        return model.step(module_of(number, model), words, hidden, turned(model, rows + number), attend)

    pairs = step(0, features[:, : every.shape[1]], every)
    states = [pairs.gather(1, at[..., None].expand(-1, -1, pairs.shape[-1]))]
    for number in range(1, config.ttt):
        states.append(step(number, states[-1], at))
    return torch.stack(states, 2)


class Unrolled:
    """Attention of unrolled steps.  What a layer sees first is the pairs; each later call is one more step of every rollout."""

    def __init__(self, documents: Tensor, pairs: Tensor, at: Tensor, limit: Callable[[int], Any] = lambda layer: None):
        """documents [B, S] as in `Batch`; positions of pairs [B, n] and of rollouts [B, A].  limit: how far a layer sees."""
        self.documents, self._pairs, self._at, self._limit = documents, pairs, at, limit
        # fetched once: every layer and step asks
        self._ends = [[int(part.max()) + 1 for part in rows.split(ROWS, 1)] for rows in (pairs, at)]
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        kept = self._kept.setdefault(layer, [])
        kept.append((k, v))
        limit, found = self._limit(layer), []
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
